"""Two threads that look at a running system and write down what they see, and do nothing else.

One asks for the status; the other looks at the processes themselves, every few milliseconds,
because whether an old primary was really dead when the new one began is not the supervisor's to
say.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from cache.errors import UnderstudyError
from chaos.client import AdminClient, StatusView
from chaos.history import Clock, EngineSample, Process, Recorder, Sample
from chaos.machine import cpu_wait_ns
from chaos.system import RunningSystem
from supervisor.process import ExitProbe, ProcessId

__all__ = ["ProcessWatcher", "StatusWatcher", "is_whole", "missing", "pids_of", "sample_of"]

_STATUS_INTERVAL_S: Final = 0.1
_LOOK_INTERVAL_S: Final = 0.005
_SCAN_INTERVAL_S: Final = 0.1


class _Loop:
    """A thread that does one step again and again until it is stopped."""

    def __init__(self, name: str, step: Callable[[], None], interval_s: float) -> None:
        self._step = step
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step."""
        self._stop.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - told by whoever ends the run
                self.failure = error
                return
            self._stop.wait(self._interval_s)


class StatusWatcher:
    """Samples `GET /v1/status`, and both clocks beside it."""

    def __init__(self, system: RunningSystem, recorder: Recorder) -> None:
        self._system = system
        self._admin = AdminClient(system.state_dir)
        self._recorder = recorder
        self._loop = _Loop("status", self._look, _STATUS_INTERVAL_S)
        self.last: StatusView | None = None  # the newest that anybody answered
        self.last_ns = 0
        self.clocks: list[Clock] = []
        self._offset_s = 0.0
        self._anchoring = threading.Lock()

    def start(self) -> None:
        """Begin."""
        self._loop.start()

    def stop(self) -> Exception | None:
        """End; what went wrong, if anything did."""
        self._loop.stop()
        return self._loop.failure

    def shift_clock(self, offset_s: float, shift: Callable[[], None]) -> int:
        """Let the system's wall clock jump, with an anchor on both sides; the moment of it."""
        with self._anchoring:
            self._anchor()
            shift()
            self._offset_s = offset_s
            return self._anchor()

    def _anchor(self) -> int:
        clock = Clock(time.monotonic_ns(), time.time(), self._offset_s, cpu_wait_ns())
        self.clocks.append(clock)
        self._recorder.add(clock)
        return clock.at_ns

    def _look(self) -> None:
        with self._anchoring:
            self._anchor()
        began_ns = time.monotonic_ns()
        try:
            status = self._admin.status(timeout_s=1.0)
        except (OSError, UnderstudyError):
            status = None
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
        self._recorder.add(sample_of(status, began_ns, took_ms, self._system))
        if status is not None:
            self.last, self.last_ns = status, began_ns


def sample_of(
    status: StatusView | None, at_ns: int, took_ms: float, system: RunningSystem
) -> Sample:
    """A status, or the lack of one, as the record keeps it."""
    if status is None:
        return Sample(at_ns, took_ms, is_up=False)
    group = status.group
    return Sample(
        at_ns=at_ns,
        took_ms=took_ms,
        is_up=True,
        is_paused=status.paused,
        state=group.state,
        epoch=group.epoch,
        primary=group.primary,
        is_whole=not missing(status, system),
        engines=[
            EngineSample(e.name, e.state, e.verdict, e.pid, e.instance, e.restarts)
            for e in group.engines
        ],
        pids=pids_of(status),
    )


def pids_of(status: StatusView | None) -> dict[str, int | None]:
    """Pids by role; of several gateway workers the first."""
    if status is None:
        return dict.fromkeys(
            ("primary", "standby", "batch", "zygote", "cache", "gateway", "supervisor")
        )
    group = status.group
    engines = {role: group.engine(role) for role in ("primary", "standby", "batch")}
    return {
        **{role: engine.pid if engine else None for role, engine in engines.items()},
        "zygote": group.zygote.pid if group.zygote else None,
        "cache": group.cache[0].pid if group.cache else None,
        "gateway": status.gateway[0].pid if status.gateway else None,
        "supervisor": status.supervisor.pid,
    }


def missing(status: StatusView, system: RunningSystem) -> list[str]:
    """What keeps the system from being whole: everything that the topology names, at work."""
    group, found = status.group, list[str]()
    primary = group.engine("primary")
    if primary is None or primary.state != "primary":
        found.append("no primary serves")
    if system.options.standby and not group.is_redundant:
        found.append("no standby is verified")
    batch = [e for e in group.engines if e.configured_role == "batch"]
    found += [f"{e.name} is {e.state}" for e in batch if e.state not in ("batch", "frozen")]
    if group.zygote is None or group.zygote.pid is None or not group.zygote.ready:
        found.append("no zygote is ready")
    found += [f"the cache of {c.device} is {c.state}" for c in group.cache if c.state != "serving"]
    found += [f"{w.name} is {w.state}" for w in status.gateway if w.state != "ready"]
    return found


def is_whole(status: StatusView | None, system: RunningSystem) -> bool:
    """Whether nothing is missing."""
    return status is not None and not missing(status, system)


class ProcessWatcher:
    """Looks at every process that carries the system's marker, and at its supervisors."""

    def __init__(self, system: RunningSystem, recorder: Recorder) -> None:
        self._system = system
        self._recorder = recorder
        self._lives: dict[ProcessId, _Life] = {}
        self._ended: set[ProcessId] = set()  # the marker of a dying process can still be read
        self._next_scan_s = 0.0
        self._loop = _Loop("processes", self._look, _LOOK_INTERVAL_S)

    def start(self) -> None:
        """Begin."""
        self._loop.start()

    def stop(self) -> Exception | None:
        """End, and write down the lives of those that still live."""
        self._loop.stop()
        for life in self._lives.values():
            life.close(self._recorder)
        self._lives.clear()
        return self._loop.failure

    def _look(self) -> None:
        if time.monotonic() >= self._next_scan_s:
            self._scan()
            self._next_scan_s = time.monotonic() + _SCAN_INTERVAL_S
        for life in [life for life in self._lives.values() if life.has_ended()]:
            life.close(self._recorder)
            self._ended.add(life.process)
            del self._lives[life.process]

    def _scan(self) -> None:
        for process, instance in self._system.marked():
            life = self._lives.get(process)
            if process in self._ended:
                continue
            if life is None:
                self._lives[process] = _Life(process, instance)
            else:
                life.instance = instance  # a fork carries its zygote's name for a moment


class _Life:
    def __init__(self, process: ProcessId, instance: str) -> None:
        self.process = process
        self.instance = instance
        self.seen_ns = self.last_alive_ns = time.monotonic_ns()
        self.dead_ns = 0
        self._probe = ExitProbe(process)

    def has_ended(self) -> bool:
        look_ns = time.monotonic_ns()
        evidence = self._probe.poll()
        if evidence is None:
            self.last_alive_ns = look_ns
            return False
        self.dead_ns = evidence.detected_ns
        return True

    def close(self, recorder: Recorder) -> None:
        self._probe.close()
        recorder.add(
            Process(
                self.instance,
                self.process.pid,
                self.process.start_ticks,
                self.seen_ns,
                self.last_alive_ns,
                self.dead_ns,
            )
        )
