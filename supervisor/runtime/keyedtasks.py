"""At most one task per key: how a group does many things at once, and none of them twice.

Invariants
    1. A second task of a key that is under way is dropped, never queued: whatever ends looks anew,
       and what is still needed is decided again.
    2. A failure is logged, and the same is not tried again at once.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from supervisor.errors import UnderstudyError

__all__ = ["KeyedTasks"]

log = logging.getLogger(__name__)

_AFTER_FAILURE_S: Final = 0.1  # before the same is tried again


class KeyedTasks:
    """What is under way in one group. Iterating gives the keys."""

    def __init__(self, owner: str, *, on_end: Callable[[], None]) -> None:
        self._owner = owner
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def is_free(self, key: str) -> bool:
        """Whether nothing of that key is under way."""
        return key not in self._tasks

    def run(self, key: str, work: Coroutine[Any, Any, object]) -> None:
        """Begin it, unless one of the same key is under way."""
        if not self.is_free(key):
            work.close()
            return
        task = asyncio.get_running_loop().create_task(self._supervised(key, work))
        task.add_done_callback(lambda _: work.close())  # cancelled before it began
        self._tasks[key] = task

    async def _supervised(self, key: str, work: Coroutine[Any, Any, object]) -> None:
        pause_s = 0.0
        try:
            await work
        except UnderstudyError as error:
            log.warning("%s: %s: %s", self._owner, key, error)
            pause_s = _AFTER_FAILURE_S
        except Exception:
            log.exception("%s: %s failed", self._owner, key)
            pause_s = _AFTER_FAILURE_S
        finally:
            self._tasks.pop(key, None)
            asyncio.get_running_loop().call_later(pause_s, self._on_end)

    async def cancel(self) -> None:
        """Stop what is under way, and wait until it has ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
