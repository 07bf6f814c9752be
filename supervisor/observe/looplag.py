"""How late the event loop runs: a supervisor that was stalled must not judge others by its delay.

A ticker asks to be woken every `interval_s`; what it is late by is the lag. A stall is a lag of
`stall_s` or more: a blocking call, a starved machine, or a supervisor that was itself stopped
(CLOCK_MONOTONIC goes on meanwhile). `running_ns` is the clock for deadlines: it stands still during
a stall (beyond its first `stall_s`), because whoever was asked could not be heard either.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["LoopLag"]

_WINDOW_S: Final = 60.0
"""`max_lag_s` looks back so far: longer than any scrape interval worth having."""


class LoopLag:
    """Measures the lag of the loop that it was started on.

    `on_stall` is called once per stall with its length. `clock_ns` is CLOCK_MONOTONIC; tests pass
    their own.
    """

    def __init__(
        self,
        *,
        interval_s: float = 0.02,
        stall_s: float = 0.1,
        on_stall: Callable[[float], None] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._interval_ns = int(interval_s * 1e9)
        self._stall_ns = int(stall_s * 1e9)
        self._on_stall = on_stall
        self._clock_ns = clock_ns
        self._due_ns: int | None = None  # None: not running
        self._handle: asyncio.TimerHandle | None = None
        self._last_stall_end_ns = -1
        self._peaks: deque[tuple[int, int]] = deque()  # (when, lag), lags falling
        self._stalled_ns = 0  # all stalls so far
        self.stalls = 0

    def start(self) -> None:
        """Begin, on the running loop."""
        self._due_ns = self._clock_ns() + self._interval_ns
        self._handle = asyncio.get_running_loop().call_later(self._interval_ns / 1e9, self._tick)

    def stop(self) -> None:
        """End. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None
        self._due_ns = None

    @property
    def max_lag_s(self) -> float:
        """The largest lag of the last minute, one that is under way included."""
        now_ns = self._clock_ns()
        # A copy, and nothing is changed: the scrape reads this in another thread.
        recent = [lag for when, lag in tuple(self._peaks) if now_ns - when <= _WINDOW_S * 1e9]
        return max(*recent, self._overdue_ns(now_ns), 0) / 1e9

    def stalled_since(self, ns: int) -> bool:
        """Whether the loop was stalled at any time after `ns` (CLOCK_MONOTONIC).

        Called before a verdict is acted upon: what was measured before or across a stall says
        more about us than about the engine. True also in the first callback behind a stall,
        before the ticker itself had its turn.
        """
        now_ns = self._clock_ns()
        return self._last_stall_end_ns >= ns or self._overdue_ns(now_ns) >= self._stall_ns

    def stalled_within(self, seconds: float) -> bool:
        """Whether the loop was stalled within the last `seconds`, this moment included."""
        return self.stalled_since(self._clock_ns() - int(seconds * 1e9))

    def running_ns(self) -> int:
        """CLOCK_MONOTONIC without the time that the loop did not run; never goes back.

        Called for every deadline that somebody else must keep: also in the first callback behind a
        stall, before the ticker itself had its turn.
        """
        now_ns = self._clock_ns()
        overdue_ns = self._overdue_ns(now_ns)
        return now_ns - self._stalled_ns - max(0, overdue_ns - self._stall_ns)

    def tick(self) -> None:
        """Take one measurement; called by the timer, and by tests with their own clock."""
        now_ns = self._clock_ns()
        lag_ns = self._overdue_ns(now_ns)
        self._due_ns = now_ns + self._interval_ns
        self._forget(now_ns)
        while self._peaks and self._peaks[-1][1] <= lag_ns:
            self._peaks.pop()
        self._peaks.append((now_ns, lag_ns))
        if lag_ns >= self._stall_ns:
            self._last_stall_end_ns = now_ns
            self._stalled_ns += lag_ns - self._stall_ns
            self.stalls += 1
            if self._on_stall is not None:
                self._on_stall(lag_ns / 1e9)

    def _tick(self) -> None:
        try:
            self.tick()
        finally:  # on_stall is not ours: whatever it does, the ticker goes on
            if self._due_ns is not None:
                loop = asyncio.get_running_loop()
                self._handle = loop.call_later(self._interval_ns / 1e9, self._tick)

    def _overdue_ns(self, now_ns: int) -> int:
        return 0 if self._due_ns is None else max(0, now_ns - self._due_ns)

    def _forget(self, now_ns: int) -> None:
        while self._peaks and now_ns - self._peaks[0][0] > _WINDOW_S * 1e9:
            self._peaks.popleft()
