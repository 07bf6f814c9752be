"""Ticks of half a millisecond on any event loop.

`asyncio` rounds timers up to a millisecond and uvloop rounds them to the nearest one, half a
millisecond becoming a busy loop. A timerfd is exact on both, and costs nothing while waiting.
"""

import asyncio
import ctypes
import os
from types import TracebackType
from typing import Final, Self

from supervisor.process.reserve import spare

__all__ = ["Ticker"]

_CLOCK_MONOTONIC: Final = 1
_NANOSECONDS: Final = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Ticker:
    """An async context: `await ticker.next()` returns at the next tick; missed ones merge."""

    def __init__(self, interval_s: float) -> None:
        """Make a ticker that starts when its context is entered."""
        self._interval_s = interval_s
        self._fd = -1
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the timer.

        Raises:
            OSError: there is no descriptor left.
        """
        seconds, nanoseconds = divmod(max(1, round(self._interval_s * _NANOSECONDS)), _NANOSECONDS)
        every = _Timespec(seconds, nanoseconds)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = spare(lambda: _checked(_libc.timerfd_create(_CLOCK_MONOTONIC, flags)))
        spec = _Itimerspec(every, every)
        _checked(_libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None))
        asyncio.get_running_loop().add_reader(self._fd, self._fire)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the timer and give the descriptor back."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    async def next(self) -> None:
        """Wait for the next tick. One waiter at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # another wake-up of the loop read it
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
