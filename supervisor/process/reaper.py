"""Orphans: the supervisor inherits what its children leave behind, and must bury it.

Invariants
    1. A child that somebody owns is never reaped here: not one of the given pids, and not one in
       our own session, where a `Popen` of ours (nvidia-smi, a helper) waits for it. Children
       that we manage lead their own session, and so do their orphans.
    2. Nothing here blocks.
"""

import contextlib
import ctypes
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from supervisor.process.stat import ProcStat
from supervisor.process.tree import list_pids, read_table

__all__ = ["Reaped", "become_subreaper", "exit_status_of", "reap_orphans"]

_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, slots=True)
class Reaped:
    """An orphan that was buried, and how it ended (negative: the signal)."""

    pid: int
    exit_status: int


def become_subreaper() -> None:
    """Make orphans of our tree our children instead of init's. Called once, at start.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def exit_status_of(info: os.waitid_result) -> int:
    """The exit code, or the negative signal number, as `subprocess` reports it."""
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def reap_orphans(known: Collection[int]) -> list[Reaped]:
    """Reap every dead child that nobody owns. `known` are the pids of handles not ended.

    Called by the janitor about once a second and after a SIGCHLD. Costs one system call while
    no child is dead; a scan of /proc otherwise.
    """
    if not _has_dead_child():
        return []
    own_pid, own_session = os.getpid(), os.getsid(0)

    def is_orphan(stat: ProcStat) -> bool:
        is_dead_child = stat.ppid == own_pid and stat.state == "Z"
        return is_dead_child and stat.session != own_session and stat.pid not in known

    orphans = [stat.pid for stat in read_table(list_pids()).values() if is_orphan(stat)]
    reaped: list[Reaped] = []
    for pid in orphans:
        # It is ours and unreaped, so the pid can not have a new owner. ECHILD: reaped meanwhile.
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
            if info is not None:
                reaped.append(Reaped(pid, exit_status_of(info)))
    return reaped


def _has_dead_child() -> bool:
    """Peek without taking a status away from anybody."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # no children at all
