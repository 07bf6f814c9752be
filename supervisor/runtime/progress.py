"""The progress page of an engine, mapped read-only: what it does now, without asking it."""

import contextlib
import mmap

from engines.contract import ProgressPage
from supervisor.runtime.machine import CpuLook

__all__ = ["MappedProgress"]


class MappedProgress:
    """One mapping of one instance's page. It outlives the engine, and shows its last step."""

    def __init__(self, fd: int) -> None:
        """The mapping keeps the page; the descriptor stays the caller's."""
        self._map = mmap.mmap(fd, ProgressPage.SIZE_BYTES, prot=mmap.PROT_READ)
        self._page = ProgressPage(memoryview(self._map))

    @property
    def steps(self) -> int:
        """Finished model steps."""
        return self._page.get("steps")

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return self._page.get("queued")

    @property
    def active(self) -> int:
        """Rows that decode."""
        return self._page.get("active")

    @property
    def has_work(self) -> bool:
        """Whether rows decode or orders wait."""
        return self._page.has_work

    @property
    def is_stopped_below(self) -> bool:
        """Whether a process that does the engine's work, as a server does, is in state `T`."""
        return bool(self._page.get("tree_stopped"))

    def with_processes_below(self, own: CpuLook) -> CpuLook:
        """The engine's own account and that of the processes that do its work."""
        page = self._page
        return CpuLook(
            on_cpu_ns=own.on_cpu_ns + page.get("tree_on_cpu_ns"),
            run_delay_ns=own.run_delay_ns + page.get("tree_run_delay_ns"),
            is_runnable=own.is_runnable or bool(page.get("tree_runnable")),
        )

    def close(self) -> None:
        """Unmap it."""
        self._page.release()
        with contextlib.suppress(BufferError):  # somebody reads it in this moment: then later
            self._map.close()
