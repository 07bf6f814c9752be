"""On a GPU no engine is started while streams wait for their first token behind a failover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from supervisor.runtime.chores import GroupChores
from supervisor.runtime.operations import OpenOperation, OperationLog


class FakeGroup:
    """As much of a group as the question needs."""

    name = "chat"
    epoch = 4

    def __init__(self, device: str) -> None:
        self.load = SimpleNamespace(device=device)
        self.lock = asyncio.Lock()
        self.operations = OperationLog(cast("Any", time))
        self.services = SimpleNamespace(clock=time)
        self.changed = asyncio.Event()

    def failover(self, *, adopted: int) -> OpenOperation:
        operation = self.operations.open("failover", group="chat", engine="b", cause="dead")
        operation.epoch, operation.adopted = self.epoch, adopted
        return operation

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()
        return True


async def is_held_back(group: FakeGroup) -> bool:
    waiting = GroupChores(cast("Any", group))._let_streams_go_on()
    task = asyncio.create_task(waiting)
    for _ in range(3):
        await asyncio.sleep(0)
    held = not task.done()
    task.cancel()
    return held


async def test_a_start_waits_for_the_recovery_and_for_the_first_token() -> None:
    group = FakeGroup("cuda:0")
    chores = GroupChores(cast("Any", group))
    await group.lock.acquire()
    task = asyncio.create_task(chores._let_streams_go_on())
    await asyncio.sleep(0)
    operation = group.failover(adopted=8)
    group.lock.release()
    group.changed.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    operation.first_token(time.monotonic_ns())
    group.changed.set()
    async with asyncio.timeout(1.0):
        await task


@pytest.mark.parametrize(("device", "adopted", "held"), [
    ("cuda:0", 8, True), ("cuda:0", 0, False), ("cpu", 8, False),
])  # fmt: skip
async def test_only_streams_on_a_gpu_hold_a_start_back(
    device: str, adopted: int, held: bool
) -> None:
    group = FakeGroup(device)
    group.failover(adopted=adopted)
    assert await is_held_back(group) is held


async def test_nothing_is_held_back_without_a_failover() -> None:
    assert not await is_held_back(FakeGroup("cuda:0"))
