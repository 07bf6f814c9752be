"""The server's processes as the kernel shows them: who they are, how they do, what they listen on.

The adapter is a subreaper, so whoever loses its parent becomes the adapter's child: the tree below
it is complete, also where a process has left the session.

Invariants
    1. Only looks and, in `kill_all`, signals descendants through a checked pidfd.
    2. The accounts only grow: a process that ends takes nothing away from them.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ServerTree", "TreeLook", "listeners_on", "signal_checked", "sockets_of"]

_RESCAN_S: Final = 1.0
_GONE: Final = (FileNotFoundError, ProcessLookupError)
_NOT_OURS: Final = (*_GONE, PermissionError)
_LISTEN: Final = "0A"
_LOOPBACK: Final = frozenset({
    "0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F",
})  # fmt: skip
"""Local addresses, as /proc/net/tcp writes them, that a connection to 127.0.0.1 may reach."""


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    ppid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class TreeLook:
    """All processes together; times since the adapter began to look."""

    on_cpu_ns: int
    run_delay_ns: int
    is_runnable: bool
    is_stopped: bool  # one of them is in state `T`


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _stat(path: str) -> _Stat | None:
    try:
        data = _read(path)
    except _NOT_OURS:  # /proc may be mounted so that processes of others are hidden
        return None
    fields = data[data.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return _Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]))


class ServerTree:
    """Everything below this process."""

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._members: dict[int, int] = {}  # pid -> start ticks
        self._scanned_s = float("-inf")
        self._last: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._on_cpu_ns = 0
        self._run_delay_ns = 0

    def scan(self) -> dict[int, int]:
        """All descendants now, as pid and start time; zombies are left out."""
        parents: dict[int, list[tuple[int, _Stat]]] = defaultdict(list)
        for name in os.listdir("/proc"):  # noqa: PTH208 - names only
            if name.isdigit() and (stat := _stat(f"/proc/{name}/stat")) is not None:
                parents[stat.ppid].append((int(name), stat))
        found: dict[int, int] = {}
        todo = [self._root_pid]
        while todo:
            for pid, stat in parents.get(todo.pop(), ()):
                if stat.state not in "ZX":
                    found[pid] = stat.start_ticks
                    todo.append(pid)
        self._members, self._scanned_s = found, time.monotonic()
        return found

    def look(self) -> TreeLook:
        """How they do now. Which ones there are is looked up at most once a second."""
        if time.monotonic() - self._scanned_s > _RESCAN_S:
            self.scan()
        is_stopped = is_runnable = False
        seen: dict[tuple[int, int, int], tuple[int, int]] = {}
        for pid, start_ticks in self._members.items():
            stat = _stat(f"/proc/{pid}/stat")
            if stat is None or stat.start_ticks != start_ticks:
                continue
            is_stopped = is_stopped or stat.state == "T"
            is_runnable = self._threads(pid, start_ticks, seen) or is_runnable
        self._last = seen
        return TreeLook(self._on_cpu_ns, self._run_delay_ns, is_runnable, is_stopped)

    def _threads(
        self, pid: int, start_ticks: int, seen: dict[tuple[int, int, int], tuple[int, int]]
    ) -> bool:
        """Add up the threads of one process; whether one of them is in state `R`."""
        is_runnable = False
        try:
            tids = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names only
        except _GONE:
            return False
        for tid in tids:
            try:
                fields = _read(f"/proc/{pid}/task/{tid}/schedstat").split()
                stat = _stat(f"/proc/{pid}/task/{tid}/stat")
            except _GONE:
                continue
            if len(fields) < 2 or stat is None:
                continue
            key, now = (pid, start_ticks, int(tid)), (int(fields[0]), int(fields[1]))
            before = self._last.get(key, (0, 0))
            self._on_cpu_ns += max(0, now[0] - before[0])
            self._run_delay_ns += max(0, now[1] - before[1])
            seen[key] = now
            is_runnable = is_runnable or stat.state == "R"
        return is_runnable

    def owns_listeners(self, port: int) -> bool | None:
        """Whether all that listen on the port belong to the tree; None while nobody does.

        Raises:
            OSError: we could not look.
        """
        listeners = listeners_on(port)  # first: a socket that is listed has a descriptor by now
        if not listeners:
            return None
        strange = listeners - sockets_of(self.scan())
        if strange:  # or the server has closed it just now
            strange &= listeners_on(port)
        return not strange

    def ports(self) -> list[int]:
        """Where the tree listens.

        Raises:
            OSError: we could not look.
        """
        ours = sockets_of(self.scan())
        return sorted({port for inode, port in _listeners() if inode in ours})

    def kill_all(self) -> None:
        """SIGKILL every descendant, until a scan finds nobody new. Proves nothing."""
        done: set[tuple[int, int]] = set()
        while new := set(self.scan().items()) - done:
            for pid, start_ticks in new:
                signal_checked(pid, start_ticks, signal.SIGKILL)
            done |= new


def signal_checked(pid: int, start_ticks: int, sig: signal.Signals) -> None:
    """Signal the process that had this pid and start time, and no later owner of the pid."""
    with suppress(ProcessLookupError, PermissionError):
        pidfd = os.pidfd_open(pid)
        try:
            stat = _stat(f"/proc/{pid}/stat")
            if stat is not None and stat.start_ticks == start_ticks:
                signal.pidfd_send_signal(pidfd, sig)
        finally:
            os.close(pidfd)


def listeners_on(port: int) -> set[int]:
    """Inodes of the TCP sockets that a connection to this port of 127.0.0.1 may reach.

    Raises:
        OSError: we could not look.
    """
    return {inode for inode, at in _listeners() if at == port}


def _listeners() -> Iterator[tuple[int, int]]:
    """Inode and port of each TCP socket that a connection to 127.0.0.1 may reach."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(table).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                address, _, port = fields[1].partition(":")
                if fields[3] == _LISTEN and address in _LOOPBACK:
                    yield int(fields[9]), int(port, 16)


def sockets_of(pids: dict[int, int]) -> set[int]:
    """Inodes of all sockets that these processes hold; who has gone or is not ours holds none.

    Raises:
        OSError: we could not look, as where no descriptor is left.
    """
    found: set[int] = set()
    for pid in pids:
        with suppress(*_NOT_OURS):
            for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names only
                with suppress(*_NOT_OURS):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115 - plain text
                    if target.startswith("socket:["):
                        found.add(int(target[8:-1]))
    return found
