"""Exit evidence: proof that no thread of a process can run user code again.

The memory of a killed engine takes the kernel up to a second to free, and pidfd, EOF and wait
come after that. The flags in /proc/P/task/T/stat show the end within a millisecond.

Invariants
    1. Descriptors opened while the identity was checked are tied to that process, so nothing
       here can ever read a later owner of the pid.
    2. A live process is never called dead: the leader must show its end, then two full passes
       over all threads must both find everyone dead, then the leader is read once more. One
       pass is not enough: `exec` from another thread moves that thread into the leader's place,
       and a pass that straddles the move sees a dead leader and a vanished thread.
    3. A vanished thread counts as dead within a pass and is never proof by itself. ESRCH on the
       leader is: its entry stays until the whole process is reaped, through every `exec`.
    4. A callback that raises stops neither the timer nor the other callbacks.

WARNING: the evidence is about user code on the CPU. The kernel still closes files and frees
memory afterwards, and GPU kernels already queued may still run.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supervisor.process.errors import ProcessGoneError, ProcessNotReadableError
from supervisor.process.identity import ProcessId, is_same
from supervisor.process.reserve import spare
from supervisor.process.stat import (
    STAT_BYTES,
    StatHead,
    is_dead,
    parse_stat_head,
    read_bytes,
)

__all__ = [
    "DEFAULT_INTERVAL_S",
    "EvidenceKind",
    "ExitEvidence",
    "ExitProbe",
    "ExitWatcher",
    "Watch",
]

DEFAULT_INTERVAL_S: Final = 0.005
_GONE_ERRORS: Final = (FileNotFoundError, ProcessLookupError)


class EvidenceKind(StrEnum):
    """What proves that a process is dead."""

    FLAGS = "flags"  # every thread carries an exit flag
    GONE = "gone"  # the process is reaped, its /proc entry is empty


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """Proof that no thread of `process` runs user code again, and when it was seen."""

    process: ProcessId
    kind: EvidenceKind
    detected_ns: int  # time.monotonic_ns


class ExitProbe:
    """The kept descriptors of one process; every `poll` is one look, without any waiting.

    Opening never fails for a process that has ended: then the first `poll` is the proof.
    """

    def __init__(self, process: ProcessId) -> None:
        """Open the leader's `stat` and the thread directory.

        Raises:
            ProcessNotReadableError: no descriptor left, or /proc hides the process.
        """
        self.process = process
        self.evidence: ExitEvidence | None = None
        self.state = ""
        self._stat_fd = -1
        self._task_fd = -1
        try:
            self._open()
        except (ProcessGoneError, *_GONE_ERRORS):
            self.close()
            self._conclude(EvidenceKind.GONE)
        except OSError as error:
            self.close()
            raise ProcessNotReadableError(process.pid, error) from error

    def _open(self) -> None:
        task = f"/proc/{self.process.pid}/task"
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._task_fd = spare(lambda: os.open(task, flags | os.O_DIRECTORY))
        stat = f"{self.process.pid}/stat"
        self._stat_fd = spare(lambda: os.open(stat, flags, dir_fd=self._task_fd))
        if not is_same(self.process):  # after the opens, see invariant 1
            raise ProcessGoneError(self.process)

    @property
    def is_stopped(self) -> bool:
        """True if the last look found state `T` (a tracer shows `t`, which is no stop of ours)."""
        return self.state == "T"

    def poll(self) -> ExitEvidence | None:
        """Look once: 4 us for a living process, two full passes for one whose leader ends."""
        if self.evidence is not None:
            return self.evidence
        head = self._leader()
        if head is None:
            return self._conclude(EvidenceKind.GONE)
        self.state = head.state
        if not is_dead(head.flags):
            return None
        if self._pass_finds_all_dead() and self._pass_finds_all_dead() and self._leader_is_dead():
            return self._conclude(EvidenceKind.FLAGS)
        return None

    def live_threads(self) -> int:
        """How many threads may still run user code; for error messages."""
        if self.evidence is not None:
            return 0
        return sum(not self._thread_is_dead(tid) for tid in self._thread_ids())

    def close(self) -> None:
        """Give the descriptors back. Safe to call twice; evidence already found stays."""
        for fd in (self._stat_fd, self._task_fd):
            if fd >= 0:
                os.close(fd)
        self._stat_fd = self._task_fd = -1

    def _conclude(self, kind: EvidenceKind) -> ExitEvidence:
        self.evidence = ExitEvidence(self.process, kind, time.monotonic_ns())
        self.close()
        return self.evidence

    def _leader(self) -> StatHead | None:
        """State and flags of the leader; None once the process is reaped."""
        try:
            return parse_stat_head(os.pread(self._stat_fd, STAT_BYTES, 0))
        except ProcessLookupError:
            return None

    def _leader_is_dead(self) -> bool:
        head = self._leader()
        return head is None or is_dead(head.flags)

    def _thread_ids(self) -> list[str]:
        try:
            return spare(lambda: os.listdir(self._task_fd))  # noqa: PTH208 -- a descriptor, not a path
        except _GONE_ERRORS:
            return []  # reaped between two looks; the leader's ESRCH is what counts

    def _thread_is_dead(self, tid: str) -> bool:
        try:
            data = read_bytes(f"{tid}/stat", dir_fd=self._task_fd)
        except _GONE_ERRORS:
            return True  # within a pass only, see invariant 3
        return is_dead(parse_stat_head(data).flags)

    def _pass_finds_all_dead(self) -> bool:
        """One pass. Lists the threads before it reads any, and stops at the first living one."""
        tids = self._thread_ids()
        return self._leader_is_dead() and all(self._thread_is_dead(tid) for tid in tids)


class Watch:
    """One watched process: its newest state, and the way to stop watching."""

    def __init__(
        self,
        probe: ExitProbe,
        on_dead: Callable[[ExitEvidence], None],
        on_stopped: Callable[["Watch"], None] | None,
    ) -> None:
        self._probe = probe
        self._on_dead = on_dead
        self._on_stopped = on_stopped
        self.stopped_since_ns: int | None = None
        self.last_alive_ns: int | None = None
        """When a look last found the process alive: a death is at most one interval younger."""
        self.is_cancelled = False
        self.is_failing = False
        """Whether the last look ended in an error, which was reported when it began."""

    @property
    def process(self) -> ProcessId:
        """The process that is watched."""
        return self._probe.process

    @property
    def evidence(self) -> ExitEvidence | None:
        """The proof of death, once there is one."""
        return self._probe.evidence

    @property
    def is_stopped(self) -> bool:
        """True while the process is in state `T`."""
        return self.stopped_since_ns is not None

    def cancel(self) -> None:
        """Stop watching. No callback runs afterwards; safe to call twice, also from a callback."""
        self.is_cancelled = True
        self._probe.close()

    def look(self, now_ns: int) -> None:
        """One look, with the callbacks that follow from it. Called by the watcher's timer."""
        evidence = self._probe.poll()
        if evidence is not None:
            self.cancel()
            self._on_dead(evidence)
            return
        self.last_alive_ns = now_ns
        was_stopped = self.is_stopped
        if not self._probe.is_stopped:
            self.stopped_since_ns = None
        elif self.stopped_since_ns is None:
            self.stopped_since_ns = now_ns
        if self._on_stopped is not None and was_stopped != self.is_stopped:
            self._on_stopped(self)


class ExitWatcher:
    """One timer that looks at all watched processes, every 5 ms.

    Belongs to one event loop; every method is called on it. Costs about 10 us per process and
    tick. The timer runs only while something is watched.
    """

    def __init__(self, *, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._watches: list[Watch] = []
        self._timer: asyncio.TimerHandle | None = None
        self.last_tick_ns: int | None = None
        """Monotonic time of the newest tick: if it is old, this process itself was stalled."""

    def watch(
        self,
        process: ProcessId,
        on_dead: Callable[[ExitEvidence], None],
        *,
        on_stopped: Callable[[Watch], None] | None = None,
    ) -> Watch:
        """Watch a process until it is dead, then call `on_dead` once, on the loop.

        `on_stopped` is called at every change into and out of state `T`. A process that is gone
        already is reported by the next tick, never from inside this call.

        Raises:
            ProcessNotReadableError: no descriptor left, or /proc hides the process.
        """
        entry = Watch(ExitProbe(process), on_dead, on_stopped)
        self._watches.append(entry)
        if self._timer is None:
            self._arm()
        return entry

    def close(self) -> None:
        """Stop the timer and cancel every watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in self._watches:
            entry.cancel()
        self._watches.clear()

    def _report(self, entry: Watch, error: Exception) -> None:
        """Once: a look that fails is tried again two hundred times a second."""
        if not entry.is_failing:
            entry.is_failing = True
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"watching {entry.process} failed", "exception": error}
            )

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.last_tick_ns = now_ns = time.monotonic_ns()
        for entry in tuple(self._watches):
            if entry.is_cancelled:
                continue
            try:
                entry.look(now_ns)
            except Exception as error:  # noqa: BLE001 -- one caller's bug must not blind us to the rest
                self._report(entry, error)
            else:
                entry.is_failing = False
        self._watches = [entry for entry in self._watches if not entry.is_cancelled]
        if self._watches and self._timer is None:
            self._arm()
