"""The engine's registration at the cache daemon, kept up behind its back.

The daemon may die and come back; the engine goes on with the memory it maps and registers again,
by itself with a growing pause, or at once when the supervisor says `cache.rejoin`. Nothing here
is on the path of a promotion: roles are announced to the daemon afterwards.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from cache.client import AttachedWeights
from cache.errors import UnderstudyError

__all__ = ["CacheLink"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_REJOIN_TIMEOUT_S: Final = 2.0


class CacheLink:
    """Used by the event loop; blocking calls run one after another in one worker thread."""

    def __init__(self, weights: AttachedWeights, on_change: Callable[[], None]) -> None:
        self._weights = weights
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cache-link")
        self._watched: int | None = None
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_registered = weights.connection is not None
        self._watch()

    def announce(self, role: str, epoch: int) -> None:
        """Tell the daemon our role, some time soon."""
        if self._weights.socket_path is not None:
            self._spawn(self._announce(role, epoch))

    def rejoin_now(self) -> None:
        """The daemon was restarted: do not wait for the pause to end."""
        self._hurry.set()
        if self._watched is not None:
            self._readable()

    def close(self) -> None:
        """Stop watching; the registration ends with the process."""
        self._unwatch()
        for task in self._tasks:
            task.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self) -> None:
        connection = self._weights.connection
        if connection is not None and self._watched is None:
            self._watched = connection.fileno()
            self._loop.add_reader(self._watched, self._readable)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None

    def _readable(self) -> None:
        # Events are read in the worker: it alone uses the connection, so answers cannot mix.
        self._unwatch()
        self._spawn(self._poll())

    async def _poll(self) -> None:
        if await self._loop.run_in_executor(self._worker, self._weights.poll):
            self._watch()
        else:
            await self._lost()

    async def _announce(self, role: str, epoch: int) -> None:
        self._unwatch()
        try:
            await self._loop.run_in_executor(self._worker, self._weights.announce, role, epoch)
        except UnderstudyError as error:
            log.info("the cache daemon was not told the role: %s", error)
        await self._poll()

    async def _lost(self) -> None:
        if not self.is_registered:
            return  # somebody is at it already
        self.is_registered = False
        log.warning("the cache daemon is gone; its memory stays, registering again")
        self._on_change()
        pause_s = _FIRST_PAUSE_S
        while not await self._try_rejoin():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), pause_s)
            pause_s = _FIRST_PAUSE_S if self._hurry.is_set() else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._hurry.clear()
        self.is_registered = True
        self._on_change()
        self._watch()

    async def _try_rejoin(self) -> bool:
        try:
            same = await self._loop.run_in_executor(
                self._worker, lambda: self._weights.rejoin(timeout_s=_REJOIN_TIMEOUT_S)
            )
        except (UnderstudyError, OSError) as error:
            log.info("not registered yet: %s", error)
            return False
        if same:
            log.info("registered again at the cache daemon")
        else:
            log.warning("the cache daemon serves another copy; this engine keeps its own")
        return True
