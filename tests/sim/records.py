"""What a supervisor writes, kept in memory: events, journal, metrics; and one loop of lives.

The real ones have threads and disks, and tests of their own; here their contract is enough: events
in order, a journal whose newest state reaches the disk a little later, counters that only count.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from supervisor.observe.events import Event, EventLog
from supervisor.observe.journal import Journal, JournalState
from supervisor.observe.metrics import Metrics
from tests.sim.clock import VirtualTime

__all__ = ["CountingMetrics", "EventSink", "SimDisk", "SimJournal"]


class SimDisk:
    """What survives a supervisor."""

    def __init__(self) -> None:
        self.state = JournalState()
        self.events: list[Event] = []


class EventSink(EventLog):
    """The event log of one life."""

    def __init__(self, disk: SimDisk, clock: VirtualTime, tell: Callable[[str], None]) -> None:
        self._disk = disk
        self._time = clock
        self._tell = tell
        self.is_gone = False
        self.first = len(disk.events)

    def append(
        self, kind: str, text: str, *, group: str = "", engine: str = "", **fields: object
    ) -> Event:
        """In memory, at once."""
        event: Event = {
            "seq": len(self._disk.events) + 1, "time": self._time.time(), "kind": kind,
            "text": text, "group": group, "engine": engine, **fields,
        }  # fmt: skip
        if not self.is_gone:
            self._disk.events.append(event)
            self._tell(f"[{kind}] {text}")
        return event

    @property
    def degraded(self) -> str:
        """Never."""
        return ""

    def of_this_life(self) -> list[Event]:
        """What this supervisor has appended."""
        return self._disk.events[self.first :]


class SimJournal(Journal):
    """The journal of one life: a state is on disk a few milliseconds after `save`."""

    def __init__(self, disk: SimDisk, clock: VirtualTime) -> None:
        self._disk = disk
        self._time = clock
        self.is_gone = False

    @property
    def degraded(self) -> str:
        """Never."""
        return ""

    def save(self, state: JournalState) -> None:
        """Write soon; a crash before that loses it."""
        self._time.after(0.004, lambda: self._write(state))

    def _write(self, state: JournalState) -> None:
        if not self.is_gone:
            self._disk.state = state


class CountingMetrics(Metrics):
    """Counts what the real registry would count."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()

    def failover(self, group: str, cause: str, outcome: str, phases_s: Mapping[str, float]) -> None:
        """Count."""
        self.counts["failover", outcome] += 1

    def switchover(self, group: str, outcome: str, phases_s: Mapping[str, float]) -> None:
        """Count."""
        self.counts["switchover", outcome] += 1

    def eviction(self, group: str, engine: str, outcome: str, duration_s: float) -> None:
        """Count."""
        self.counts["eviction", outcome] += 1

    def restart(self, *, kind: str, group: str, name: str) -> None:
        """Count."""
        self.counts["restart", kind] += 1

    def __getattribute__(self, name: str) -> Any:
        """Everything else that sets a gauge does nothing."""
        own = ("counts", "failover", "switchover", "eviction", "restart")
        if name in own or name.startswith("__"):
            return object.__getattribute__(self, name)
        return _ignore


def _ignore(*_: object, **__: object) -> None:
    """A gauge that nobody reads."""
