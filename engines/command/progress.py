"""What the adapter knows of the server's progress, written to the page that the supervisor reads.

Invariants
    1. Work is there when one of our own requests waits for it: a server may not count what its HTTP
       side has not handed on, and nobody else asks it. What it says itself counts only while it
       takes nothing more. Some set their gauges every so many steps, and leave them as they were
       when the last request has ended: such a server has nothing to do, and does not hang.
    2. Any change of the server's counters is a step, and so is every piece of text that we have
       read: one that has no counters, or hangs in its `/metrics` only, still shows progress.
    3. A page that does not come keeps what was known last: the server has not moved since.
    4. A slow client is no work: what the server has sent is taken at once (see `relay`).
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engines.command.counters import EngineCounters
from engines.command.processes import TreeLook
from engines.contract import ProgressPage

__all__ = ["Progress"]


class Progress:
    """The page, and what it is made from."""

    def __init__(self) -> None:
        self.fd, self._memory = _page_file()
        self.page = ProgressPage(memoryview(self._memory))
        self.page.format()
        self._counters: EngineCounters | None = None
        self._steps = 0
        self.waiting = 0  # questions to the server, canaries included, that are not answered
        self.is_refusing = False  # said so to the last canary, and nothing has come since
        self.pieces = 0

    @property
    def requests(self) -> int:
        """Requests that the server owes us something for, or is so full of that it refuses."""
        known = self._counters.requests if self._counters is not None and self.is_refusing else 0
        return max(known, self.waiting)

    @property
    def queued(self) -> int:
        """Those of them that the server says it has not begun."""
        return min(self._counters.waiting, self.requests) if self._counters is not None else 0

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """While the server owes us something."""
        self.waiting += 1
        self._publish()
        try:
            yield
        finally:
            self.waiting -= 1
            self._publish()

    def piece(self) -> None:
        """The server has sent text: more than a refusal, or a sign of life of its HTTP side."""
        self.pieces += 1
        self.is_refusing = False
        self._step()

    def look(self, counters: EngineCounters | None, tree: TreeLook) -> None:
        """One look at its counters (None: no page came) and its processes."""
        before, self._counters = self._counters, counters or self._counters
        if before is not None and self._counters is not None and before.work != self._counters.work:
            self._step()
        page = self.page
        page.set("tree_on_cpu_ns", tree.on_cpu_ns)
        page.set("tree_run_delay_ns", tree.run_delay_ns)
        page.set("tree_runnable", int(tree.is_runnable))
        page.set("tree_stopped", int(tree.is_stopped))
        self._publish()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the role."""
        self.page.set("epoch", epoch)

    def _step(self) -> None:
        self._steps += 1
        self.page.set("tokens", self.pieces)
        self.page.set("step_finished_ns", time.monotonic_ns())
        self.page.set("steps", self._steps)

    def _publish(self) -> None:
        self.page.set("active", self.requests - self.queued)
        self.page.set("queued", self.queued)
        self.page.set("runnable", self.requests)


def _page_file() -> tuple[int, mmap.mmap]:
    """A page of shared memory: descriptor and mapping. Sealed: a truncated one would be SIGBUS."""
    fd = os.memfd_create("understudy-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ProgressPage.SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd, mmap.mmap(fd, ProgressPage.SIZE_BYTES)
