"""Taking stock of a system: descriptors, strays, counters, events, and the engines' own words.

Everything here only reads: /proc, the metrics page, `events.jsonl`, the engines' logs.
"""

import datetime
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Final

from chaos.history import Event, Held, Metrics, Recorder, Role, WallClock
from chaos.system import RunningSystem
from chaos.watching import StatusWatcher, pids_of

__all__ = ["EventTail", "Stock"]

_ROLE_LINE: Final = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<ms>\d{3}) INFO engines\.native\.scheduler"
    r"\[(?P<pid>\d+)\]: role (?P<role>\w+) at epoch (?P<epoch>\d+)"
)
_COUNTERS: Final = re.compile(r"understudy_\w+_(?:total|count)(?:\{|$)")
_TASKS: Final = re.compile(r"understudy_(?:gateway_)?tasks(?:\{|$)")


class EventTail:
    """The events on disk, read on as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._events: list[dict[str, Any]] = []

    def all(self) -> list[dict[str, Any]]:
        """Every complete line so far."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return self._events
        end = data.rfind(b"\n") + 1
        self._offset += end
        self._events += [json.loads(line) for line in data[:end].splitlines() if line.strip()]
        return self._events

    def last_seq(self) -> int:
        """Number of the newest."""
        events = self.all()
        return int(events[-1]["seq"]) if events else 0

    def has(self, kind: str, after_seq: int) -> bool:
        """Whether one of this kind came behind that number."""
        return any(e["kind"] == kind and int(e["seq"]) > after_seq for e in self.all())


class Stock:
    """Writes what it finds into the record."""

    def __init__(
        self, system: RunningSystem, recorder: Recorder, watcher: StatusWatcher, events: EventTail
    ) -> None:
        self._system = system
        self._recorder = recorder
        self._watcher = watcher
        self._events = events

    def take(self, label: str) -> None:
        """In a quiet moment: descriptors and tasks of all processes, strays, counters."""
        marked = self._system.marked()
        held = {f"{name}:{process.pid}": _descriptors(process.pid) for process, name in marked}
        page = str(self._system.admin.get("/metrics"))
        tasks = _values(page, _TASKS)
        self._recorder.add(Held(time.monotonic_ns(), label, held, self._strays(), tasks))
        self._recorder.add(
            Metrics(
                time.monotonic_ns(),
                self._system.supervisor.pid,
                self._events.last_seq(),
                _values(page, _COUNTERS),
            )
        )

    def _strays(self) -> list[str]:
        """Leaders of a session that the status does not name."""
        status = self._system.admin.status()
        named = {self._system.supervisor.pid, *(w.pid for w in status.gateway)}
        named |= {engine.pid for engine in status.group.engines}
        named |= set(pids_of(status).values())
        return [
            f"{instance} (pid {process.pid})"
            for process, instance in self._system.marked()
            if process.pid not in named and os.getsid(process.pid) == process.pid
        ]

    def record_events(self) -> None:
        """All events, once the system has stopped."""
        clock = WallClock(self._watcher.clocks)
        for event in self._events.all():
            self._recorder.add(Event(clock.monotonic_ns(float(event.get("time", 0.0))), event))

    def record_roles(self) -> None:
        """Which roles the engines took, by their logs, once the system has stopped."""
        clock = WallClock(self._watcher.clocks)
        for path in sorted((self._system.state_dir / "logs").glob("*.log")):
            for line in path.read_text("utf-8", errors="replace").splitlines():
                if (found := _ROLE_LINE.match(line)) is None:
                    continue
                stamp = datetime.datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S").astimezone()
                at_ns = clock.monotonic_ns(stamp.timestamp() + int(found["ms"]) / 1000)
                self._recorder.add(
                    Role(at_ns, path.stem, int(found["pid"]), found["role"], int(found["epoch"]))
                )


def _values(page: str, wanted: re.Pattern[str]) -> dict[str, float]:
    values = {}
    for line in page.splitlines():
        sample, _, value = line.rpartition(" ")
        if not line.startswith("#") and wanted.match(sample):
            values[sample] = float(value)
    return values


def _descriptors(pid: int) -> dict[str, int]:
    """Open descriptors by kind; empty when the process is gone."""
    counts: dict[str, int] = {}
    try:
        paths = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return counts
    for path in paths:
        try:
            kind = _kind_of(str(path.readlink()))
        except OSError:
            continue  # closed while we looked
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _kind_of(target: str) -> str:
    """`socket:[7]` is a socket, `anon_inode:[pidfd]` a [pidfd], `/memfd:x` a memfd, else a file."""
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:")
    if target.startswith("/"):
        return "memfd" if target.startswith("/memfd:") else "file"
    return target.partition(":")[0]
