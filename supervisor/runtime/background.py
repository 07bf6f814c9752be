"""Work of a unit that nobody waits for: burials, calls whose answer does not matter.

Invariants
    1. A failure is logged, never lost.
    2. The loop holds tasks weakly; here each is held until it has ended.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from cache.errors import UnderstudyError

__all__ = ["Background"]

log = logging.getLogger(__name__)


class Background:
    """The tasks of one unit that run beside everything else."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, UnderstudyError):
            log.warning("%s: %s", self._owner, error)
        else:
            log.error("%s: background work failed", self._owner, exc_info=error)

    def cancel(self) -> None:
        """End all of it; waits for nothing."""
        for task in tuple(self._tasks):
            task.cancel()

    async def settle(self, *, timeout_s: float) -> None:
        """Wait until all of it is done; what takes longer is given up."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
