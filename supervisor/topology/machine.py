"""What the checks ask about this machine: ports, GPUs, memory, who runs already.

`Machine` is the port, `LocalMachine` the real one; tests answer the questions themselves.
Nothing here starts, changes or keeps anything.
"""

import contextlib
import errno
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from supervisor.process.identity import find_marked, read_marker, state_id_of
from supervisor.process.stat import read_stat
from supervisor.topology.schema import ListenAddress

__all__ = ["LocalMachine", "Machine", "Memory", "PortState", "is_alive"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that new processes can have, and all there is."""

    available_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PortState:
    """Why an address cannot be listened on."""

    reason: str
    is_taken: bool = False


class Machine(Protocol):
    """Questions about the machine; every answer is cheap and none has a side effect."""

    def memory(self) -> Memory:
        """Main memory, or the limit of our control group when that is lower."""

    def gpu_indices(self) -> frozenset[int]:
        """Indices N for which `cuda:N` names a GPU; empty without a driver."""

    def port_state(self, address: ListenAddress) -> PortState | None:
        """Why the address cannot be listened on, or None. Binds and closes a socket."""

    def held_by_us(self, state_dir: Path, address: ListenAddress) -> bool:
        """Whether the supervisor of `state_dir`, or a process it left behind, listens there."""

    def is_in_use(self, state_dir: Path) -> bool:
        """Whether a supervisor of `state_dir` runs, or processes that one left behind."""


def is_alive(pid: int, start_ticks: int | None = None) -> bool:
    """Whether the process that had `pid` since `start_ticks` still runs; a zombie does not."""
    stat = read_stat(pid)
    if stat is None or stat.state in ("Z", "X"):
        return False
    return start_ticks in (None, stat.start_ticks)


class LocalMachine:
    """The machine that we run on."""

    def memory(self) -> Memory:
        """From /proc/meminfo and the control group."""
        figures = dict(_meminfo())
        available, total = figures.get("MemAvailable", 0), figures.get("MemTotal", 0)
        for limit, used in _cgroup_limits():
            available, total = min(available, max(0, limit - used)), min(total, limit)
        return Memory(available, total)

    def gpu_indices(self) -> frozenset[int]:
        """From /dev/nvidiaN; the driver makes them when it finds the card."""
        names = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
        return frozenset(int(name) for name in names if name.isdecimal())

    def port_state(self, address: ListenAddress) -> PortState | None:
        """Bind as the supervisor would, and close again."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the real socket does it: connections in TIME_WAIT do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address.host, address.port))
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return PortState("another process listens there", is_taken=True)
            if error.errno == errno.EADDRNOTAVAIL:
                return PortState(f"this machine has no address {address.host}")
            return PortState(error.strerror or str(error))
        return None

    def held_by_us(self, state_dir: Path, address: ListenAddress) -> bool:
        """Find the listener's processes and look for our lock or our instance marker.

        A gateway worker that outlived its supervisor still holds the port, and is adopted at the
        next start: its marker names our state directory.
        """
        supervisor, state_id = self.running_pid(state_dir), state_id_of(state_dir)
        for pid in _pids_with_sockets(set(_listening_inodes(address.port))):
            marker = read_marker(pid)
            if pid == supervisor or (marker is not None and marker.state_id == state_id):
                return True
        return False

    def is_in_use(self, state_dir: Path) -> bool:
        """By the lock, and by the marker that every child carries."""
        return self.running_pid(state_dir) is not None or bool(find_marked(state_id_of(state_dir)))

    def running_pid(self, state_dir: Path) -> int | None:
        """Process id of the supervisor that holds the lock, if it is alive.

        From `state_dir/lock`: `{"pid": ..., "start_ticks": ...}`.
        """
        try:
            lock = json.loads((state_dir / "lock").read_bytes()[:4096])
        except (OSError, ValueError):
            return None
        pid = lock.get("pid") if isinstance(lock, dict) else None
        if not isinstance(pid, int):
            return None
        return pid if is_alive(pid, lock.get("start_ticks")) else None


def _meminfo() -> Iterator[tuple[str, int]]:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            yield key, int(value.removesuffix(" kB")) * 1024


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and use of each memory control group around us (version 2 only), page cache apart."""
    try:
        line = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1]
    except (OSError, IndexError):
        return
    hierarchy, _, name = line.partition("::")
    if hierarchy != "0":
        return
    root = Path("/sys/fs/cgroup")
    group = root / name.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        with contextlib.suppress(OSError, ValueError):  # "max" or no such file: no limit here
            limit = int((folder / "memory.max").read_bytes())
            used = int((folder / "memory.current").read_bytes())
            yield limit, used - _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":
            return int(value)
    return 0


def _listening_inodes(port: int) -> Iterator[str]:
    listening = "0A"  # TCP_LISTEN
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # no IPv6
        for line in lines:
            fields = line.split()
            if fields[3] == listening and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _pids_with_sockets(inodes: set[str]) -> Iterator[int]:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if any(_target(fd) in wanted for fd in (process / "fd").iterdir()):
                yield int(process.name)


def _target(descriptor: Path) -> str:
    """What a descriptor refers to; a busy process may have closed it since it was listed."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""
