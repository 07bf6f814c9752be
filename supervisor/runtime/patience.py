"""Deadlines that do not run while the supervisor itself does not run.

A supervisor that is stopped for ten seconds (a debugger, a snapshot of the machine, a stalled loop)
finds every deadline passed when it goes on, and every answer that came meanwhile unread. A deadline
is what *somebody else* must keep, so it is measured on the running clock (`LoopLag.running_ns`),
and behind a stall there is a moment to read what has arrived.

See also `supervisor.observe.looplag` (the clock) and `supervisor.process.fence` (its own polls).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from supervisor.observe.looplag import LoopLag

__all__ = ["READING_S", "Deadline", "Patience"]

READING_S: Final = 0.25
"""Behind a stall: as long as it takes to read the answers that wait in the sockets."""


class Deadline:
    """One deadline in running time, for a loop that polls."""

    def __init__(self, lag: LoopLag, timeout_s: float) -> None:
        self._lag = lag
        self._end_ns = lag.running_ns() + int(timeout_s * 1e9)

    @property
    def left_s(self) -> float:
        """What is left; negative once it has passed."""
        return (self._end_ns - self._lag.running_ns()) / 1e9

    @property
    def wait_s(self) -> float:
        """For how long to wait before the next look."""
        return max(self.left_s, READING_S / 10)

    @property
    def has_passed(self) -> bool:
        """Whether time is up, and what arrived during a stall has been read."""
        return self.left_s <= 0 and not self._lag.stalled_within(READING_S)


class Patience:
    """Makes deadlines."""

    def __init__(self, lag: LoopLag) -> None:
        self._lag = lag

    def deadline(self, timeout_s: float) -> Deadline:
        """From now on."""
        return Deadline(self._lag, timeout_s)

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """Like `asyncio.timeout`, in running time.

        Raises:
            TimeoutError: time is up.
        """
        loop = asyncio.get_running_loop()
        deadline = self.deadline(timeout_s)
        async with asyncio.timeout(None) as scope:
            timer: asyncio.TimerHandle

            def due() -> None:
                nonlocal timer
                if deadline.has_passed:
                    scope.reschedule(loop.time())
                else:
                    timer = loop.call_later(deadline.wait_s, due)

            timer = loop.call_later(timeout_s, due)
            try:
                yield
            finally:
                timer.cancel()
