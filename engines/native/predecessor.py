"""The writers before us: fenced, but on a GPU perhaps not finished.

SIGKILL stops a process at once; kernels that it had queued run on until the driver has taken its
context down, 0.1 to 1 s later. They write where that process meant to write: for a stream that we
adopted these are the bits that are there already, but a slot that was freed and begun anew would
be spoilt. The end of a process (its pidfd turns readable) comes after its files are closed, and
with the last file of the driver its context is gone.

Writers may die faster than that, one after the other, so the slot table names all that were not
seen to end. What cannot be found out counts as not ended: a request that waits is better than a
stream that is spoilt.
"""

import errno
import os
import select
from pathlib import Path
from typing import Final

from cache.slots import SlotTable

__all__ = ["FencedWriter", "FencedWriters", "own_identity"]

_NO_SUCH_PROCESS: Final = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
"""The last two, by kernel, where the number belongs to a thread by now."""


def own_identity() -> tuple[int, int]:
    """Pid and start time of this process, as they go into the slot table.

    Raises:
        OSError: `/proc` cannot be read.
    """
    return os.getpid(), _start_ticks(os.getpid()) or 0


def _start_ticks(pid: int) -> int | None:
    """Field 22 of the stat file, counted behind the last bracket; None without such a process.

    Raises:
        OSError: it cannot be read, which says nothing about the process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


class FencedWriter:
    """A killed predecessor that may still be being taken down."""

    def __init__(self, pid: int, ticks: int) -> None:
        self._pid: Final = pid
        self._ticks: Final = ticks
        self._pidfd = -1
        self._poll = select.poll()
        self._is_gone = False

    def is_gone(self) -> bool:
        """Whether it has ended, its device context with it. Costs one system call."""
        if self._is_gone:
            return True
        if self._pidfd < 0:
            self._is_gone = not self._find()
        if self._pidfd >= 0 and self._poll.poll(0):
            self._is_gone = True
            self.close()
        return self._is_gone

    def close(self) -> None:
        """Watch no more; idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _find(self) -> bool:
        """Watch the process; False if there is none of this pid and start time any more."""
        try:
            self._pidfd = os.pidfd_open(self._pid)
            ticks = _start_ticks(self._pid)
        except OverflowError:  # no number that a process could have
            return False
        except OSError as error:  # no descriptor, no memory: look again the next time
            self.close()
            return error.errno not in _NO_SUCH_PROCESS
        if ticks != self._ticks:  # gone, and its number belongs to another
            self.close()
            return False
        self._poll.register(self._pidfd, select.POLLIN)
        return True


class FencedWriters:
    """All predecessors of the one who has claimed a slot table."""

    def __init__(
        self, table: SlotTable, before: list[tuple[int, int]], own: tuple[int, int]
    ) -> None:
        """`before`: the writers that the table named when it was claimed by `own`."""
        self._table = table
        self._left = {writer: FencedWriter(*writer) for writer in before if writer != own}
        table.strike(own)
        self.are_gone()  # watched from now on: a number may be another's later

    def are_gone(self) -> bool:
        """Whether nobody but us can still write; strikes those out who have ended."""
        for writer in [writer for writer, one in self._left.items() if one.is_gone()]:
            del self._left[writer]
            self._table.strike(writer)
        return not self._left

    def close(self) -> None:
        """Watch no more: whoever claims the table next finds those that are left in it."""
        for writer in self._left.values():
            writer.close()
