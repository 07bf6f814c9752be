"""What a supervisor writes, kept in memory: events, journal, metrics.

The real ones have threads and disks, and tests of their own; here their contract is enough: events
in order, a journal whose newest state reaches the disk a little later (or, on a full disk, once
that takes it), counters that only count. A damaged journal is read by the real one.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from supervisor.observe.events import Event, EventLog
from supervisor.observe.journal import FILE_NAME, VERSION, Journal, JournalState
from supervisor.observe.metrics import Metrics
from tests.sim.clock import VirtualTime

__all__ = ["CountingMetrics", "EventSink", "SimDisk", "SimJournal"]


_RETRY_S: Final = 1.0
_NO_SPACE: Final = "No space left on device"


class SimDisk:
    """What survives a supervisor."""

    def __init__(self) -> None:
        self.state = JournalState()
        self.events: list[Event] = []
        self.is_full = False
        self.damage = ""  # what happened to the journal since it was written

    def load(self) -> JournalState:
        """What the next supervisor makes of the journal."""
        damage, self.damage = self.damage, ""
        if damage:
            self.state = _read_damaged(self.state, damage)
        return self.state


def _read_damaged(state: JournalState, damage: str) -> JournalState:
    data = msgspec.json.encode(state)
    with tempfile.TemporaryDirectory(prefix="sim-journal-") as folder:
        path = Path(folder) / FILE_NAME
        match damage:
            case "corrupt":
                path.write_bytes(bytes(byte ^ 0xFF for byte in data))
            case "torn":
                path.write_bytes(data[: len(data) // 2])
            case "empty":
                path.touch()
            case "foreign":
                other = msgspec.structs.replace(state, boot_id="another-boot")
                path.write_bytes(msgspec.json.encode(other))
            case "future":
                later = msgspec.structs.replace(state, version=VERSION + 1)
                path.write_bytes(msgspec.json.encode(later))
            case "gone":
                pass
            case _:
                raise AssertionError(damage)
        return Journal(Path(folder)).load()


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
        """While the disk is full."""
        return _NO_SPACE if self._disk.is_full else ""

    def of_this_life(self) -> list[Event]:
        """What this supervisor has appended."""
        return self._disk.events[self.first :]


class SimJournal(Journal):
    """The journal of one life: a state is on disk a few milliseconds after `save`."""

    def __init__(self, disk: SimDisk, clock: VirtualTime) -> None:
        self._disk = disk
        self._time = clock
        self._newest = disk.state
        self.is_gone = False

    @property
    def degraded(self) -> str:
        """While the disk is full."""
        return _NO_SPACE if self._disk.is_full else ""

    @property
    def is_behind(self) -> bool:
        """Whether the disk has not taken what was to be written."""
        return self._disk.is_full and self._newest != self._disk.state

    def save(self, state: JournalState) -> None:
        """Write soon; a crash before that loses it."""
        self._newest = state
        self._time.after(0.004, lambda: self._write(self._newest))

    def flush(self, *, timeout_s: float) -> bool:
        """At once: threads take no virtual time."""
        if not self._disk.is_full:
            self._write(self._newest)
        return not self.is_behind

    def _write(self, state: JournalState) -> None:
        if self.is_gone:
            return
        if self._disk.is_full:
            self._time.after(_RETRY_S, lambda: self._write(self._newest))
        else:
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
