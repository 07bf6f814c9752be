"""What a running supervisor tells the terminal it was started from.

The daemon calls; `supervisor.cli.run` implements (a progress bar on a terminal, lines elsewhere).
Every call comes on the daemon's loop: an implementation returns at once and never raises.
"""

from typing import Any, Protocol

__all__ = ["NullObserver", "RunObserver"]


class RunObserver(Protocol):
    """Someone who watches a supervisor come up and work."""

    def loading(
        self, group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
    ) -> None:
        """Weights of `group` are loading; called for each progress report of the cache daemon.

        `rate` is in bytes per second, `eta_s` the seconds that are left, None when unknown.
        The last call of a load has `bytes_done == bytes_total`.
        """

    def event(self, event: dict[str, Any]) -> None:
        """One event as it is written to `events.jsonl`: seq, time, kind, group, engine, text."""

    def ready(self, status: dict[str, Any]) -> None:
        """Every group has a primary and clients are answered; the body of `GET /v1/status`.

        Called once per run, also when a standby or a batch engine is still to come.
        """


class NullObserver:
    """Nobody watches (tests, embedding)."""

    def loading(
        self, group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
    ) -> None:
        """Nobody looks at the progress."""

    def event(self, event: dict[str, Any]) -> None:
        """The journal has it already."""

    def ready(self, status: dict[str, Any]) -> None:
        """Nobody waits."""
