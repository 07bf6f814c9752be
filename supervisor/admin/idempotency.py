"""Idempotency keys: a command that was sent twice happens once.

A client that lost the answer sends the command again with the same `Idempotency-Key` and gets the
same operation, for ten minutes. A second request that comes while the first is under way waits
for it. A refusal (status below 500) is not remembered: it changed nothing, and may not be true
any more at the next try.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from supervisor.admin.controller import Operation
from supervisor.admin.problems import BadRequestError, IdempotencyKeyReusedError, LimitReachedError
from supervisor.errors import UnderstudyError

__all__ = ["IdempotencyStore"]

KEEP_S: Final = 600.0
MAX_KEYS: Final = 1000
MAX_KEY_CHARS: Final = 255


@dataclass(slots=True)
class _Entry:
    fingerprint: str  # what was asked: a key stands for one request
    task: asyncio.Task[Operation]
    expires: float  # on the store's clock; renewed when the operation ends


class IdempotencyStore:
    """Runs operations and remembers them by key. Not thread-safe: one event loop."""

    def __init__(
        self,
        *,
        keep_s: float = KEEP_S,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s = keep_s
        self._max_keys = max_keys
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._running: set[asyncio.Task[Operation]] = set()

    async def run(
        self, key: str | None, fingerprint: str, work: Callable[[], Awaitable[Operation]]
    ) -> Operation:
        """The operation of `work`, which runs once per key, also when the caller goes away.

        Raises:
            BadRequestError: the key is empty, too long or not plain ASCII.
            IdempotencyKeyReusedError: the key stands for another request.
            LimitReachedError: too many keys have an operation under way.
        """
        if key is None:
            return await asyncio.shield(self._start(work))
        if not 0 < len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
            raise BadRequestError(f"an Idempotency-Key is 1 to {MAX_KEY_CHARS} ASCII characters")
        self._forget_expired()
        entry = self._entries.get(key)
        if entry is None:
            self._make_room()
            task = self._start(work)
            entry = _Entry(fingerprint, task, self._clock() + self._keep_s)
            self._entries[key] = entry
            task.add_done_callback(lambda done: self._finished(key, done))
        elif entry.fingerprint != fingerprint:
            raise IdempotencyKeyReusedError(
                "this Idempotency-Key was used for another request",
                hint="make a new key for every command",
            )
        return await asyncio.shield(entry.task)

    async def close(self, *, timeout_s: float) -> None:
        """Let running operations finish for at most `timeout_s`, then cancel them."""
        if not self._running:
            return
        _, unfinished = await asyncio.wait(self._running, timeout=timeout_s)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=timeout_s)

    def _start(self, work: Callable[[], Awaitable[Operation]]) -> asyncio.Task[Operation]:
        async def run() -> Operation:
            return await work()

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # Whoever waited may be gone: the exception counts as seen, the controller has logged it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _finished(self, key: str, task: asyncio.Task[Operation]) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.task is not task:
            return
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (isinstance(error, UnderstudyError) and error.http_status < 500):
            del self._entries[key]
            return
        entry.expires = self._clock() + self._keep_s

    def _forget_expired(self) -> None:
        now = self._clock()
        for key in [k for k, e in self._entries.items() if e.expires <= now and e.task.done()]:
            del self._entries[key]

    def _make_room(self) -> None:
        if len(self._entries) < self._max_keys:
            return
        for key, entry in self._entries.items():  # oldest first
            if entry.task.done():
                del self._entries[key]
                return
        raise LimitReachedError(f"{self._max_keys} commands are under way")
