"""The writer before us: fenced, but on a GPU perhaps not finished.

SIGKILL stops a process at once; kernels that it had queued run on until the driver has taken its
context down, 0.1 to 1 s later. They write where that process meant to write: for a stream that we
adopted these are the bits that are there already, but a slot that was freed and begun anew would
be spoilt. The end of a process (its pidfd turns readable) comes after its files are closed, and
with the last file of the driver its context is gone.
"""

import os
import select
from pathlib import Path
from typing import Self

__all__ = ["FencedWriter", "own_identity"]


def own_identity() -> tuple[int, int]:
    """Pid and start time of this process, as they go into the slot table."""
    ticks = _start_ticks(os.getpid())
    return os.getpid(), ticks if ticks is not None else 0


def _start_ticks(pid: int) -> int | None:
    """Field 22 of the stat file, counted behind the last bracket; None without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


class FencedWriter:
    """A killed predecessor that may still be being taken down."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    @classmethod
    def of(cls, writer: tuple[int, int] | None) -> Self | None:
        """Watch that process; None when it is gone, or was ourselves."""
        if writer is None or writer[0] == os.getpid():
            return None
        pid, ticks = writer
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if _start_ticks(pid) != ticks:  # gone, and its number belongs to another
            os.close(pidfd)
            return None
        return cls(pidfd)

    def is_gone(self) -> bool:
        """Whether it has ended, its device context with it. Costs one system call."""
        if self._pidfd >= 0 and self._poll.poll(0):
            os.close(self._pidfd)
            self._pidfd = -1
        return self._pidfd < 0
