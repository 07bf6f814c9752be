"""Restart policy of one engine, zygote, daemon or worker: one small pure value.

Lived long: start again at once. Died young: wait, twice as long each time. Died young too often in
a row: give up, and say so. Deaths that we caused (eviction, restart on request) do not count.
"""

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["FIRST_BACKOFF_S", "RestartPolicy", "RestartRecord"]

FIRST_BACKOFF_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The limits, from the topology's `failover`."""

    stable_after_s: float
    max_backoff_s: float
    max_young_deaths: int


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """What has happened so far."""

    restarts: int = 0
    young_deaths: int = 0  # in a row
    not_before_s: float = 0.0  # monotonic
    has_given_up: bool = False

    def after_death(
        self, policy: RestartPolicy, *, lived_s: float, now_s: float, was_ours: bool
    ) -> "RestartRecord":
        """The record after one more death, at `now_s`, of a process that lived `lived_s`."""
        if was_ours:
            return replace(self, restarts=self.restarts + 1, not_before_s=now_s)
        if lived_s >= policy.stable_after_s:
            return RestartRecord(restarts=self.restarts + 1, not_before_s=now_s)
        young = self.young_deaths + 1
        delay_s = min(policy.max_backoff_s, FIRST_BACKOFF_S * 2 ** (young - 1))
        return RestartRecord(
            restarts=self.restarts + 1,
            young_deaths=young,
            not_before_s=now_s + delay_s,
            has_given_up=young >= policy.max_young_deaths,
        )

    def forgiven(self) -> "RestartRecord":
        """The record after an operator's restart: the past does not count."""
        return RestartRecord(restarts=self.restarts)
