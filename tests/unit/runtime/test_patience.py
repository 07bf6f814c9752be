"""Deadlines of a supervisor that did not run do not pass."""

import asyncio
import time

import pytest

from supervisor.observe.looplag import LoopLag
from supervisor.runtime.patience import Patience


@pytest.fixture
async def patience() -> Patience:
    lag = LoopLag()
    lag.start()
    return Patience(lag)


async def test_a_deadline_passes_in_running_time(patience: Patience) -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with patience.within(0.1):
            await asyncio.Event().wait()
    assert 0.09 < time.monotonic() - began_s < 0.6


async def test_an_answer_in_time_is_no_timeout(patience: Patience) -> None:
    async with patience.within(0.5):
        await asyncio.sleep(0.01)


async def test_a_deadline_that_passed_during_a_stall_has_not_passed(patience: Patience) -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ends = asyncio.create_task(_answer_behind_a_stall(answer))
    async with patience.within(0.3):
        assert await answer == "late"
    await ends


async def _answer_behind_a_stall(answer: "asyncio.Future[str]") -> None:
    await asyncio.sleep(0.05)
    time.sleep(0.6)  # noqa: ASYNC251 - the supervisor does not run
    await asyncio.sleep(0.1)
    answer.set_result("late")


async def test_behind_a_stall_the_rest_of_the_time_is_left(patience: Patience) -> None:
    deadline = patience.deadline(0.4)
    await asyncio.sleep(0.05)
    time.sleep(0.7)  # noqa: ASYNC251 - likewise
    assert not deadline.has_passed
    await asyncio.sleep(0.7)
    assert deadline.has_passed


async def test_a_cancelled_wait_is_cancelled(patience: Patience) -> None:
    async def wait() -> None:
        async with patience.within(5):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
