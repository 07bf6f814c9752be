"""What a running system owns on this machine, and what of it is still there after a stop.

Invariant: everything is attributed by identity (a marker in the environment, an inode, a path
inside the state directory), so that other systems on the same machine are never accused.
"""

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.process.identity import ProcessId, find_marked, read_process_id, state_id_of

__all__ = [
    "Inode",
    "Inventory",
    "find_leftovers",
    "marked_processes",
    "memory_of",
    "take_inventory",
]

_MEMFD_PREFIX: Final = "/memfd:"
_SHM_PREFIX: Final = "/dev/shm/"  # noqa: S108 -- the place itself is what we look at


@dataclass(frozen=True, slots=True, order=True)
class Inode:
    """One memory file, whoever holds it."""

    device: int
    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the processes of one state directory own."""

    state_dir: Path
    processes: tuple[tuple[ProcessId, str], ...]  # with the instance names
    memory: frozenset[Inode]
    shm_paths: frozenset[str]
    ports: tuple[int, ...]


def marked_processes(state_dir: Path) -> list[tuple[ProcessId, str]]:
    """Every live process that carries the marker of this state directory."""
    return find_marked(state_id_of(state_dir))


def memory_of(pid: int) -> frozenset[Inode]:
    """The memory files that a process holds by descriptor or by mapping; empty when it is gone."""
    found = set(_memory_descriptors(pid))
    for line in _map_lines(pid):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(_MEMFD_PREFIX):
            major, minor = (int(part, 16) for part in fields[3].split(":"))
            name = fields[5].removeprefix(_MEMFD_PREFIX).removesuffix(" (deleted)")
            found.add(Inode(os.makedev(major, minor), int(fields[4]), name))
    return frozenset(found)


def take_inventory(
    state_dir: Path, *, supervisor_pid: int | None = None, ports: tuple[int, ...] = ()
) -> Inventory:
    """What the system of `state_dir` owns now. Take it while everything runs."""
    processes = marked_processes(state_dir)
    if supervisor_pid is not None:
        processes.append((read_process_id(supervisor_pid), "supervisor"))
    memory: set[Inode] = set()
    shm_paths: set[str] = set()
    for process, _instance in processes:
        memory |= memory_of(process.pid)
        shm_paths |= _shm_paths_of(process.pid)
    return Inventory(state_dir, tuple(processes), frozenset(memory), frozenset(shm_paths), ports)


def find_leftovers(before: Inventory) -> list[str]:
    """One sentence for each thing of `before` that is still there; empty when all is gone."""
    found = [
        f"process {instance} ({process}) still lives"
        for process, instance in marked_processes(before.state_dir)
    ]
    found += [
        f"process {instance} ({process}) still lives"
        for process, instance in before.processes
        if instance == "supervisor" and _lives(process)
    ]
    found += [f"socket {path} is still there" for path in _sockets_below(before.state_dir)]
    found += [
        f"shared memory {path} is still there" for path in before.shm_paths if Path(path).exists()
    ]
    found += [f"port {port} is still taken" for port in before.ports if _is_taken(port)]
    if before.memory:
        found += _memory_holders(before.memory)
    return found


def _memory_holders(memory: frozenset[Inode]) -> list[str]:
    return [
        f"memory {inode.name} is still held by pid {pid}"
        for pid in _pids()
        for inode in sorted(memory_of(pid) & memory)
    ]


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _lives(process: ProcessId) -> bool:
    """Whether it runs; a zombie that its parent has not reaped yet counts as gone."""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return False
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) == process.start_ticks and fields[0] != "Z"


def _memory_descriptors(pid: int) -> Iterator[Inode]:
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)  # noqa: PTH208 -- names only
    except OSError:
        return  # gone, or not ours to read
    for number in numbers:
        path = f"{directory}/{number}"
        try:
            target = os.readlink(path)  # noqa: PTH115 -- not a path: "/memfd:name (deleted)"
            if target.startswith(_MEMFD_PREFIX):
                status = os.stat(path)  # noqa: PTH116 -- follows the link to the memory itself
                name = target.removeprefix(_MEMFD_PREFIX).removesuffix(" (deleted)")
                yield Inode(status.st_dev, status.st_ino, name)
        except OSError:
            continue  # closed while we looked


def _map_lines(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []  # gone, or not ours to read


def _shm_paths_of(pid: int) -> set[str]:
    paths = {line.split(maxsplit=5)[5] for line in _map_lines(pid) if _SHM_PREFIX in line}
    return {path for path in paths if not path.endswith(" (deleted)")}


def _sockets_below(directory: Path) -> list[Path]:
    found: list[Path] = []
    for path in directory.rglob("*"):
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                found.append(path)
        except FileNotFoundError:
            continue  # removed while we looked
    return sorted(found)


def _is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
