"""What /proc tells about a process: parsing is pure, reading is a thin shell over it.

Invariants
    1. Fields of `stat` are counted behind the *last* `)`: a command name may hold spaces,
       parentheses and newlines, and any process can choose its own.
    2. The `read_*` functions answer None (or leave the thread out) when it is gone; a process
       that ends while we read is the normal case here, never an error.

Kernel: proc(5); the flag values are `PF_*` of include/linux/sched.h.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.process.errors import ProcParseError
from supervisor.process.reserve import spare

__all__ = [
    "DEAD_FLAGS",
    "PF_DUMPCORE",
    "PF_EXITING",
    "PF_KTHREAD",
    "PF_POSTCOREDUMP",
    "STAT_BYTES",
    "ProcStat",
    "SchedDelta",
    "SchedStat",
    "StatHead",
    "is_dead",
    "parse_schedstat",
    "parse_stat",
    "parse_stat_head",
    "read_bytes",
    "read_sched",
    "read_stat",
    "read_threads",
    "sched_delta",
]

PF_EXITING: Final = 0x4
PF_POSTCOREDUMP: Final = 0x8
PF_DUMPCORE: Final = 0x200
PF_KTHREAD: Final = 0x200000
DEAD_FLAGS: Final = PF_EXITING | PF_POSTCOREDUMP | PF_DUMPCORE
"""A thread with any of these never runs user code again."""

STAT_BYTES: Final = 2048
"""Enough for one `stat` line: 52 numbers of at most 20 digits and a name of at most 64 bytes."""

_FIELDS_NEEDED: Final = 20  # state (field 3) up to and including start time (field 22)


@dataclass(frozen=True, slots=True)
class StatHead:
    """The two fields that the exit watcher reads two hundred times a second."""

    state: str
    flags: int


@dataclass(frozen=True, slots=True)
class ProcStat:
    """The fields of /proc/P/stat (or of one thread) that the supervisor uses."""

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    flags: int
    num_threads: int
    start_ticks: int

    @property
    def is_kernel_thread(self) -> bool:
        """True for threads of the kernel, which are never ours."""
        return bool(self.flags & PF_KTHREAD)


def is_dead(flags: int) -> bool:
    """True if a thread with these flags can never run user code again."""
    return bool(flags & DEAD_FLAGS)


def parse_stat_head(data: bytes) -> StatHead:
    """State letter and flags only; the cheap half of `parse_stat`.

    Raises:
        ProcParseError: the line is not what proc(5) describes.
    """
    end = data.rfind(b")")
    fields = data[end + 2 : end + 128].split(b" ", 7)
    try:
        return StatHead(fields[0].decode("ascii"), int(fields[6]))
    except (IndexError, ValueError):
        raise ProcParseError("stat", data) from None


def parse_stat(data: bytes) -> ProcStat:
    """One `stat` line, of a process or of a thread.

    Raises:
        ProcParseError: the line is not what proc(5) describes.
    """
    begin, end = data.find(b"("), data.rfind(b")")
    fields = data[end + 2 :].split()
    if begin < 0 or end < begin or len(fields) < _FIELDS_NEEDED:
        raise ProcParseError("stat", data)
    try:
        return ProcStat(
            pid=int(data[:begin]),
            comm=data[begin + 1 : end].decode("utf-8", "backslashreplace"),
            state=fields[0].decode("ascii"),
            ppid=int(fields[1]),
            session=int(fields[3]),
            flags=int(fields[6]),
            num_threads=int(fields[17]),
            start_ticks=int(fields[19]),
        )
    except ValueError:
        raise ProcParseError("stat", data) from None


def read_bytes(path: str, *, limit_bytes: int = STAT_BYTES, dir_fd: int | None = None) -> bytes:
    """One small file under /proc in one read, without a Python file object (8 us, not 25).

    Raises:
        OSError: FileNotFoundError or ProcessLookupError when the process is gone.
    """
    fd = spare(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd))
    try:
        return os.read(fd, limit_bytes)
    finally:
        os.close(fd)


def read_stat(pid: int) -> ProcStat | None:
    """/proc/PID/stat, or None when there is no such process (a zombie still has one)."""
    try:
        data = read_bytes(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parse_stat(data)


def _each_thread(pid: int, leaf: str) -> Iterator[tuple[int, bytes]]:
    """`leaf` of every thread that is there when its turn comes."""
    try:
        tids = spare(lambda: os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 -- a Path per thread is half the cost
    except (FileNotFoundError, ProcessLookupError):
        return
    for tid in tids:
        try:
            yield int(tid), read_bytes(f"/proc/{pid}/task/{tid}/{leaf}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread ended between the listing and now


def read_threads(pid: int) -> dict[int, ProcStat]:
    """`stat` of all threads by thread id; empty when the process is gone."""
    return {tid: parse_stat(data) for tid, data in _each_thread(pid, "stat")}


@dataclass(frozen=True, slots=True)
class SchedStat:
    """/proc/P/task/T/schedstat: how long a thread ran, and how long it waited for a CPU."""

    on_cpu_ns: int
    run_delay_ns: int


def parse_schedstat(data: bytes) -> SchedStat:
    """One `schedstat` line.

    Raises:
        ProcParseError: the line is not what the kernel documents.
    """
    fields = data.split()
    try:
        return SchedStat(int(fields[0]), int(fields[1]))
    except (IndexError, ValueError):
        raise ProcParseError("schedstat", data) from None


def read_sched(pid: int) -> dict[int, SchedStat]:
    """`schedstat` of all threads by thread id; empty when gone or the kernel has none.

    WARNING: the kernel adds to `run_delay` when the thread gets its CPU, not while it waits.
    A thread that is waiting right now shows state `R` in `read_threads` and no change here.
    """
    return {tid: parse_schedstat(data) for tid, data in _each_thread(pid, "schedstat")}


@dataclass(frozen=True, slots=True)
class SchedDelta:
    """What all threads of a process did between two samples."""

    on_cpu_ns: int
    run_delay_ns: int


def sched_delta(before: Mapping[int, SchedStat], after: Mapping[int, SchedStat]) -> SchedDelta:
    """The growth between two samples. Threads that ended in between count as nothing.

    Sums per thread, because a process total would go down when a thread ends.
    """
    nothing = SchedStat(0, 0)
    pairs = [(before.get(tid, nothing), now) for tid, now in after.items()]
    return SchedDelta(
        on_cpu_ns=sum(max(0, now.on_cpu_ns - old.on_cpu_ns) for old, now in pairs),
        run_delay_ns=sum(max(0, now.run_delay_ns - old.run_delay_ns) for old, now in pairs),
    )
