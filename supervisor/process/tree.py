"""Which processes belong to an instance, and how to kill all of them.

A process is a member of a tree if it is the root, a descendant of a member by parent, in the
session that the root leads, or if it carries the instance's marker. The last finds what left by
`setsid` and lost its parent.

Invariants
    1. A process with the marker of *another* instance is never a member by parent or session,
       and its children are not looked at through it: a zygote is the parent of engines that
       must survive it.
    2. A parent or session counts only while its number still belongs to the process it names.
    3. This process, its ancestors and pid 1 are never members.
    4. Members are named by `ProcessId` and signalled through a checked pidfd.

WARNING: a process that leaves the session, drops its environment *and* loses its parent before
a scan sees it can not be found without cgroups. Nothing that we start does this.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from supervisor.process.errors import ProcessNotReadableError
from supervisor.process.identity import Marker, ProcessId, own_boot_id, read_marker, signal_process
from supervisor.process.reserve import spare
from supervisor.process.stat import ProcStat, read_stat

__all__ = [
    "KillReport",
    "ProcessTree",
    "find_members",
    "kill_one",
    "kill_tree",
    "list_pids",
    "read_table",
    "select_members",
]


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """What to kill: the root, and the claim that all of its processes carry (None: unmarked)."""

    root: ProcessId
    marker: Marker | None


@dataclass(frozen=True, slots=True)
class KillReport:
    """What `kill_tree` did. Not complete: its time ran out before a pass found nobody new."""

    killed: tuple[ProcessId, ...]
    refused: tuple[ProcessId, ...]  # the kernel did not let us, or we had no descriptor left
    passes: int
    is_complete: bool


def list_pids() -> list[int]:
    """The pids that /proc shows now."""
    names = spare(lambda: os.listdir("/proc"))  # noqa: PTH208 -- names only
    return [int(name) for name in names if name.isdigit()]


def read_table(pids: Iterable[int]) -> dict[int, ProcStat]:
    """`stat` of each process that is still there; 8 us each. Kernel threads are left out."""
    stats = (read_stat(pid) for pid in pids)
    return {stat.pid: stat for stat in stats if stat is not None and not stat.is_kernel_thread}


def find_members(tree: ProcessTree, *, known: Collection[ProcessId] = ()) -> set[ProcessId]:
    """One scan of /proc for all members, zombies included. See `select_members`."""
    return select_members(tree, read_table(list_pids()), known=known)


def select_members(
    tree: ProcessTree,
    table: Mapping[int, ProcStat],
    *,
    known: Collection[ProcessId] = (),
    marker_of: Callable[[int], Marker | None] = read_marker,
    own_pid: int | None = None,
) -> set[ProcessId]:
    """The members among the processes of `table`.

    `known` are members of earlier scans: their children count too. Only processes that started
    with or after the root can be members, so the environment of older ones is never read.

    Raises:
        ValueError: the root is this process or one of its ancestors.
    """
    boot_id = own_boot_id()
    if tree.root.boot_id != boot_id:
        return set()  # nothing outlives a boot, and its start times mean nothing in this one
    never = _untouchable(table, os.getpid() if own_pid is None else own_pid)
    if tree.root.pid in never:
        raise ValueError(f"refusing to kill {tree.root}: it is this process or an ancestor of it")
    seeds = {process.pid for process in (tree.root, *known) if _is_in(table, process)}
    session = _session_led_by(tree.root, table)
    children: dict[int, list[int]] = defaultdict(list)
    for stat in table.values():
        if stat.start_ticks < tree.root.start_ticks or stat.pid in never or stat.pid in seeds:
            continue
        claim = marker_of(stat.pid) if tree.marker is not None else None
        if claim is not None and claim != tree.marker:
            continue  # another instance's, whoever its parent is
        children[stat.ppid].append(stat.pid)
        if claim is not None or stat.session == session:
            seeds.add(stat.pid)
    members = _closure(seeds, children)
    return {ProcessId(pid, table[pid].start_ticks, boot_id) for pid in members}


def _closure(seeds: set[int], children: Mapping[int, list[int]]) -> set[int]:
    """The seeds and everything below them."""
    members: set[int] = set()
    todo = list(seeds)
    while todo:
        pid = todo.pop()
        if pid not in members:
            members.add(pid)
            todo.extend(children.get(pid, ()))
    return members


def _is_in(table: Mapping[int, ProcStat], process: ProcessId) -> bool:
    stat = table.get(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks


def _session_led_by(root: ProcessId, table: Mapping[int, ProcStat]) -> int | None:
    """The session id that means "belongs to root", if there is one.

    A root that lives in somebody else's session (ours!) gives None. The kernel does not reuse
    the number of a session that still has members, so a reaped root keeps its session.
    """
    stat = table.get(root.pid)
    if stat is None:
        return root.pid
    return root.pid if stat.start_ticks == root.start_ticks and stat.session == root.pid else None


def _untouchable(table: Mapping[int, ProcStat], own_pid: int) -> set[int]:
    never = {0, 1}
    pid = own_pid
    while pid not in never:
        never.add(pid)
        stat = table.get(pid)
        pid = stat.ppid if stat is not None else 0
    return never


def kill_one(process: ProcessId) -> bool:
    """SIGKILL this very process. True also if it is gone; False if we are not allowed to."""
    try:
        signal_process(process, signal.SIGKILL)
    except (PermissionError, ProcessNotReadableError):
        return False
    return True


def kill_tree(tree: ProcessTree, *, timeout_s: float = 1.0) -> KillReport:
    """SIGKILL the root and every member, until a pass over /proc finds nobody new.

    For shutdown and the janitor. It blocks for the scans (some milliseconds), does not wait for
    any death and proves nothing: the promotion path uses `fence`.
    """
    deadline = time.monotonic() + timeout_s
    killed: list[ProcessId] = []
    refused: list[ProcessId] = []
    passes = 0
    while True:
        found = find_members(tree, known=killed) - {*killed, *refused}
        passes += 1
        # The root first: it is the one that starts others.
        for process in sorted(found, key=lambda member: member != tree.root):
            (killed if kill_one(process) else refused).append(process)
        if not found or time.monotonic() >= deadline:
            return KillReport(tuple(killed), tuple(refused), passes, is_complete=not found)
