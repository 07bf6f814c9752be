"""Loop lag: a supervisor that was stalled knows it, before it judges anybody."""

import asyncio
import time

from supervisor.observe.looplag import LoopLag

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10_000 * MS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, ms: float) -> None:
        self.now_ns += int(ms * MS)


async def started(clock: Clock, **options: float) -> LoopLag:
    lag = LoopLag(interval_s=0.02, stall_s=0.1, clock_ns=clock, **options)  # type: ignore[arg-type]
    lag.start()
    return lag


async def test_a_punctual_loop_has_no_lag() -> None:
    clock = Clock()
    lag = await started(clock)
    before = clock()
    for _ in range(10):
        clock.advance(20)
        lag.tick()
    assert lag.max_lag_s == 0
    assert not lag.stalled_since(before)
    lag.stop()


async def test_a_stall_voids_what_was_measured_before_it_and_nothing_later() -> None:
    clock = Clock()
    lag = await started(clock)
    before = clock()
    clock.advance(20 + 150)
    lag.tick()
    clock.advance(1)
    after = clock()
    assert lag.stalled_since(before)
    assert not lag.stalled_since(after)
    assert lag.max_lag_s == 0.15
    assert lag.stalls == 1
    lag.stop()


async def test_a_stall_is_seen_before_the_ticker_had_its_turn() -> None:
    clock = Clock()
    lag = await started(clock)
    before = clock()
    clock.advance(20 + 101)
    assert lag.stalled_since(before)
    lag.stop()


async def test_old_lag_is_forgotten_after_a_minute() -> None:
    clock = Clock()
    lag = await started(clock)
    clock.advance(220)
    lag.tick()
    for _ in range(61):
        clock.advance(1000)
        lag._due_ns = clock()
        lag.tick()
    assert lag.max_lag_s == 0
    lag.stop()


async def test_the_running_clock_stands_still_during_a_stall() -> None:
    clock = Clock()
    lag = await started(clock)
    before = lag.running_ns()
    clock.advance(20)
    lag.tick()
    clock.advance(20 + 10_000)
    assert lag.running_ns() - before == 140 * MS, "before the ticker had its turn"
    lag.tick()
    assert lag.running_ns() - before == 140 * MS
    clock.advance(20)
    lag.tick()
    assert lag.running_ns() - before == 160 * MS
    lag.stop()


async def test_an_ordinary_delay_counts_as_running() -> None:
    clock = Clock()
    lag = await started(clock)
    before = lag.running_ns()
    clock.advance(20 + 90)
    lag.tick()
    assert lag.running_ns() - before == 110 * MS
    lag.stop()


async def test_a_blocking_call_on_a_real_loop_is_a_stall() -> None:
    stalls: list[float] = []
    lag = LoopLag(interval_s=0.01, stall_s=0.1, on_stall=stalls.append)
    lag.start()
    await asyncio.sleep(0.03)
    began = time.monotonic_ns()
    time.sleep(0.2)  # noqa: ASYNC251 -- the stall itself
    await asyncio.sleep(0.03)
    lag.stop()
    assert lag.stalled_since(began)
    assert lag.max_lag_s >= 0.1
    assert stalls
