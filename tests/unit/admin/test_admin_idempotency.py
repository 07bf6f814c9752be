"""Idempotency keys: once, for ten minutes, within bounds."""

import asyncio

import pytest

from supervisor.admin.controller import Operation
from supervisor.admin.idempotency import IdempotencyStore
from supervisor.admin.problems import BadRequestError, IdempotencyKeyReusedError, LimitReachedError
from supervisor.errors import PreconditionError, StartFailedError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Work:
    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def __call__(self) -> Operation:
        self.runs += 1
        number = self.runs
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Operation(id=f"op-{number}", kind="promote")


async def test_a_key_is_forgotten_after_ten_minutes() -> None:
    clock, work = Clock(), Work()
    store = IdempotencyStore(clock=clock)
    assert (await store.run("k", "f", work)).id == "op-1"
    clock.now += 599
    assert (await store.run("k", "f", work)).id == "op-1"
    clock.now += 2
    assert (await store.run("k", "f", work)).id == "op-2"


async def test_without_a_key_everything_runs() -> None:
    store, work = IdempotencyStore(), Work()
    await store.run(None, "f", work)
    await store.run(None, "f", work)
    assert work.runs == 2


async def test_a_refusal_is_tried_again_and_a_failure_is_not() -> None:
    store, work = IdempotencyStore(), Work()
    work.error = PreconditionError("not now")
    for _ in range(2):
        with pytest.raises(PreconditionError):
            await store.run("refused", "f", work)
    assert work.runs == 2
    work.error = StartFailedError("halfway")
    for _ in range(2):
        with pytest.raises(StartFailedError):
            await store.run("failed", "f", work)
    assert work.runs == 3


async def test_another_request_with_the_same_key_is_refused() -> None:
    store, work = IdempotencyStore(), Work()
    await store.run("k", "promote", work)
    with pytest.raises(IdempotencyKeyReusedError):
        await store.run("k", "evict", work)


@pytest.mark.parametrize("key", ["", "x" * 256, "ümlaut", "a\x00b"])
async def test_odd_keys_are_refused(key: str) -> None:
    store, work = IdempotencyStore(), Work()
    with pytest.raises(BadRequestError):
        await store.run(key, "f", work)
    assert work.runs == 0


async def test_the_oldest_finished_key_makes_room_and_a_running_one_does_not() -> None:
    store, work = IdempotencyStore(max_keys=2), Work()
    await store.run("a", "f", work)
    await store.run("b", "f", work)
    await store.run("c", "f", work)
    assert (await store.run("b", "f", work)).id == "op-2"
    assert (await store.run("a", "f", work)).id == "op-4"

    work.gate = asyncio.Event()
    running = [asyncio.ensure_future(store.run(key, "f", work)) for key in ("x", "y")]
    await asyncio.sleep(0)
    with pytest.raises(LimitReachedError):
        await store.run("z", "f", work)
    work.gate.set()
    await asyncio.gather(*running)


async def test_closing_waits_for_what_runs_then_cancels_it() -> None:
    store, work = IdempotencyStore(), Work()
    work.gate = asyncio.Event()
    waiting = asyncio.ensure_future(store.run("k", "f", work))
    await asyncio.sleep(0)
    await store.close(timeout_s=0.05)
    with pytest.raises(asyncio.CancelledError):
        await waiting
