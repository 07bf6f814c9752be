"""Virtual time: an event loop that jumps to the next thing that happens instead of waiting.

Two kinds of things happen. The *world* (fake processes, faults) has a heap of its own and runs
inside `select`, where a real loop would wait for the kernel: what it delivers to the supervisor is
therefore ready before timers that fall due at the same moment, as with real sockets. A *stall*
lets the world go on while no callback of the loop runs.

Nothing here reads a real clock, so a run depends on its seed alone.
"""

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["SimLoop", "SpinningError", "VirtualTime", "WorldTimer"]

_START_NS: Final = 1_000_000_000_000
_UNIX_OFFSET_S: Final = 1_700_000_000.0
_NS: Final = 1_000_000_000
_SPIN_TURNS: Final = 5000


class SpinningError(Exception):
    """The supervisor runs in a circle: time does not go on."""


class WorldTimer:
    """One thing that will happen in the world."""

    __slots__ = ("call", "is_cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        """It will not happen."""
        self.is_cancelled = True


class VirtualTime:
    """The one clock of a simulation; offers what the `time` module offers the runtime."""

    def __init__(self) -> None:
        self.now_ns = _START_NS
        self.unix_offset_s = _UNIX_OFFSET_S  # somebody may set the wall clock
        self.stalled_until_ns = 0
        self._heap: list[tuple[int, int, WorldTimer]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_ns / _NS

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return self.now_ns

    def time(self) -> float:
        """Seconds since 1970."""
        return self.unix_offset_s + self.now_ns / _NS

    @property
    def elapsed_s(self) -> float:
        """Seconds since the simulation began."""
        return (self.now_ns - _START_NS) / _NS

    def after(self, delay_s: float, call: Callable[[], None]) -> WorldTimer:
        """Let something happen in the world after `delay_s`."""
        timer = WorldTimer(call)
        at_ns = self.now_ns + max(0, int(delay_s * _NS))
        heapq.heappush(self._heap, (at_ns, next(self._order), timer))
        return timer

    def stall(self, length_s: float) -> None:
        """No callback of the loop runs for so long."""
        self.stalled_until_ns = max(self.stalled_until_ns, self.now_ns + int(length_s * _NS))

    def advance(self, limit_ns: int | None) -> None:
        """Go to the next moment at which something happens in the world, or to `limit_ns`."""
        while self.now_ns < self.stalled_until_ns:
            self._step(self.stalled_until_ns)
        if limit_ns is None and not self._heap:
            raise RuntimeError("nothing will ever happen again in this simulation")
        self._step(limit_ns)

    def _step(self, limit_ns: int | None) -> None:
        if not self._heap or (limit_ns is not None and self._heap[0][0] > limit_ns):
            assert limit_ns is not None
            self.now_ns = max(self.now_ns, limit_ns)
            return
        self.now_ns = max(self.now_ns, self._heap[0][0])
        while self._heap and self._heap[0][0] <= self.now_ns:
            timer = heapq.heappop(self._heap)[2]
            if not timer.is_cancelled:
                timer.call()


class _WorldSelector(selectors.BaseSelector):
    """Where a real selector waits for the kernel, this one moves the virtual clock."""

    def __init__(self, clock: VirtualTime) -> None:
        self._clock = clock
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self._last_ns = self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        clock = self._clock
        self._turns = self._turns + 1 if clock.now_ns == self._last_ns else 0
        self._last_ns = clock.now_ns
        if self._turns > _SPIN_TURNS:
            self._turns = 0
            raise SpinningError(f"the loop spins at {clock.elapsed_s:.4f} s")
        if timeout is None:
            clock.advance(None)
        elif timeout > 0 or clock.now_ns < clock.stalled_until_ns:
            clock.advance(clock.now_ns + int(timeout * _NS) + 1)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual. Threads are run inline, sockets are never polled."""

    def __init__(self, clock: VirtualTime) -> None:
        self.clock = clock
        super().__init__(_WorldSelector(clock))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual CLOCK_MONOTONIC."""
        return self.clock.now_ns / _NS

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Inline: a thread would bring real time in."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the waiter
            future.set_exception(error)
        return future
