"""Restart policy of one engine, zygote, daemon or worker: one small pure value.

Lived long: start again at once. Died young: wait, twice as long each time. Died young too often in
a row: give up, and say so. Deaths that we caused (eviction, restart on request) do not count.
What has served as primary proved that it works: it is never given up, whatever kills it again and
again; there are only short pauses, longer ones from the fourth such death in a row on.
A start that the machine refused (no descriptor, no room for a process, a full disk) says nothing
about the program: it is tried again for ever, with pauses.
"""

from dataclasses import dataclass, replace
from typing import Final

__all__ = [
    "FIRST_BACKOFF_S",
    "LONGEST_SERVED_S",
    "LONGEST_TROUBLE_S",
    "SERVED_PAUSE_S",
    "RestartPolicy",
    "RestartRecord",
]

FIRST_BACKOFF_S: Final = 0.25

SERVED_PAUSE_S: Final = 0.15
"""Behind the death of one that served: first its streams go on elsewhere, then it starts again.
A start takes a CPU for some 100 ms, which the successor needs for its first tokens where there are
few (docs/benchmarks/takeover.md: two cores, p99 45 ms from kill to next token)."""

FREE_SERVED_DEATHS: Final = 3
"""Young deaths in a row of one that had served, before there are pauses."""

LONGEST_SERVED_S: Final = 1.0
"""Between two starts of one that had served: it works, and redundancy is missing."""

LONGEST_TROUBLE_S: Final = 4.0
"""Between two attempts while the machine refuses; short, because redundancy is missing."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The limits, from the topology's `failover`."""

    stable_after_s: float
    max_backoff_s: float
    max_young_deaths: int
    served_pause_s: float = SERVED_PAUSE_S  # 0 where starts wait for the streams themselves


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """What has happened so far."""

    restarts: int = 0
    young_deaths: int = 0  # in a row, before it served
    served_deaths: int = 0  # in a row, young too, after it had served
    not_before_s: float = 0.0  # monotonic
    has_given_up: bool = False
    troubles: int = 0  # starts in a row that the machine refused

    def after_death(
        self,
        policy: RestartPolicy,
        *,
        lived_s: float,
        now_s: float,
        was_ours: bool,
        has_served: bool = False,
    ) -> "RestartRecord":
        """The record after one more death, at `now_s`, of a process that lived `lived_s`."""
        pause_s = policy.served_pause_s if has_served else 0.0
        if was_ours:
            return replace(self, restarts=self.restarts + 1, not_before_s=now_s + pause_s)
        if lived_s >= policy.stable_after_s:
            return RestartRecord(restarts=self.restarts + 1, not_before_s=now_s + pause_s)
        young, served, longest_s = self.young_deaths, self.served_deaths, policy.max_backoff_s
        if has_served:
            served += 1
            doublings = served - FREE_SERVED_DEATHS - 1
            longest_s = min(longest_s, LONGEST_SERVED_S)
        else:
            young += 1
            doublings = young - 1
        delay_s = FIRST_BACKOFF_S * 2 ** min(doublings, 20) if doublings >= 0 else pause_s
        return RestartRecord(
            restarts=self.restarts + 1,
            young_deaths=young,
            served_deaths=served,
            not_before_s=now_s + min(longest_s, delay_s),
            has_given_up=young >= policy.max_young_deaths,
        )

    def after_trouble(self, policy: RestartPolicy, *, now_s: float) -> "RestartRecord":
        """The record after a start that the machine refused at `now_s`: no fault of the program."""
        troubles = self.troubles + 1
        longest_s = min(policy.max_backoff_s, LONGEST_TROUBLE_S)
        delay_s = min(longest_s, FIRST_BACKOFF_S * 2 ** min(troubles - 1, 10))
        return replace(self, troubles=troubles, not_before_s=now_s + delay_s)

    def started(self) -> "RestartRecord":
        """The record once a start has succeeded: the machine plays along again."""
        return replace(self, troubles=0) if self.troubles else self

    def forgiven(self) -> "RestartRecord":
        """The record after an operator's restart: the past does not count."""
        return RestartRecord(restarts=self.restarts)
