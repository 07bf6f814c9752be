"""One task per key; what fails is said and does not end the others."""

import asyncio
import logging

import pytest

from supervisor.errors import ConflictError
from supervisor.runtime.keyedtasks import KeyedTasks


async def test_a_second_task_of_a_key_is_dropped() -> None:
    begun: list[str] = []
    gate = asyncio.Event()

    async def work(name: str) -> None:
        begun.append(name)
        await gate.wait()

    ended = asyncio.Event()
    tasks = KeyedTasks("chat", on_end=ended.set)
    tasks.run("a", work("first"))
    tasks.run("a", work("second"))
    tasks.run("b", work("other"))
    await asyncio.sleep(0)
    assert begun == ["first", "other"]
    assert sorted(tasks) == ["a", "b"]
    gate.set()
    async with asyncio.timeout(5):
        await ended.wait()
    assert tasks.is_free("a")


@pytest.mark.parametrize("error", [ConflictError("busy"), ValueError("a bug")])
async def test_a_failure_is_said_and_the_key_is_free_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    ended = asyncio.Event()
    tasks = KeyedTasks("chat", on_end=ended.set)
    with caplog.at_level(logging.WARNING):
        tasks.run("a", fail())
        async with asyncio.timeout(5):
            await ended.wait()
    assert tasks.is_free("a")
    assert "chat: a" in caplog.text


async def test_what_is_under_way_is_cancelled() -> None:
    tasks = KeyedTasks("chat", on_end=lambda: None)
    tasks.run("begun", asyncio.sleep(60))
    await asyncio.sleep(0)
    tasks.run("not begun", asyncio.sleep(60))
    await tasks.cancel()
    assert tasks.is_free("begun")
