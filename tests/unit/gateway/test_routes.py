"""The routing table: what is in force, and who waits for what."""

import asyncio

import pytest

from supervisor.gateway.errors import StaleEpochError
from supervisor.gateway.protocol import GroupRoute, Routes, RouteTarget
from supervisor.gateway.routes import RouteTable

A1 = RouteTarget("a", "/run/a.gen", 1)
A2 = RouteTarget("a", "/run/a.gen", 2)
B2 = RouteTarget("b", "/run/b.gen", 2)


def routes(sequence: int, epoch: int, primary: RouteTarget | None) -> Routes:
    return Routes(sequence, [GroupRoute("chat", epoch, 2048, primary)])


def table(epoch: int = 1, primary: RouteTarget | None = A1) -> RouteTable:
    table = RouteTable()
    table.apply(routes(1, epoch, primary))
    return table


async def wait(
    table: RouteTable, avoid: RouteTarget | None, *, same_after_s: float = 9, timeout_s: float = 5
) -> RouteTarget:
    return await table.wait_target(
        "chat",
        avoid=avoid,
        same_after_s=same_after_s,
        deadline=asyncio.get_running_loop().time() + timeout_s,
    )


def test_only_the_named_engine_is_in_force() -> None:
    routing = table()

    assert routing.is_in_force("chat", A1)
    assert not routing.is_in_force("chat", A2)
    assert not routing.is_in_force("other", A1)
    routing.apply(routes(2, 1, None))
    assert not routing.is_in_force("chat", A1)


def test_the_batch_engine_is_a_model_of_its_own() -> None:
    routing = RouteTable()
    routing.apply(
        Routes(1, [GroupRoute("chat", 1, 64, A1, has_batch=True), GroupRoute("x", 1, 64, None)])
    )

    assert [model.id for model in routing.models] == ["chat", "chat:batch", "x"]
    assert routing.target("chat:batch") is None
    assert routing.find("x:batch") is None


def test_an_older_epoch_changes_nothing() -> None:
    routing = table(2, A2)

    with pytest.raises(StaleEpochError):
        routing.apply(routes(2, 1, A1))

    assert (routing.sequence, routing.target("chat")) == (1, A2)


def test_an_epoch_is_remembered_while_its_group_is_gone() -> None:
    routing = table(2, A2)
    routing.apply(Routes(2, []))
    assert routing.find("chat") is None

    with pytest.raises(StaleEpochError):
        routing.apply(routes(3, 1, A1))


def test_a_table_of_a_dead_supervisor_that_is_read_late_changes_nothing() -> None:
    routing = RouteTable()
    routing.apply(routes(1900, 5, A1))

    assert not routing.apply(routes(900, 5, None))

    assert (routing.sequence, routing.target("chat")) == (1900, A1)


async def test_a_route_in_force_is_taken_at_once() -> None:
    assert await wait(table(), None) == A1


async def test_another_engine_or_another_epoch_ends_the_wait() -> None:
    for successor in (A2, B2):
        routing = table()
        waiting = asyncio.create_task(wait(routing, A1))
        await asyncio.sleep(0)
        routing.apply(routes(2, 1, None))
        await asyncio.sleep(0)
        assert not waiting.done()
        routing.apply(routes(3, 2, successor))
        assert await waiting == successor


async def test_the_same_engine_is_tried_again_only_after_a_while() -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()

    assert await wait(table(), A1, same_after_s=0.1) == A1

    assert loop.time() - before >= 0.099


async def test_the_wait_has_a_deadline() -> None:
    with pytest.raises(TimeoutError):
        await wait(table(), A1, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        await wait(table(1, None), None, same_after_s=0, timeout_s=0.05)


async def test_the_first_table_is_waited_for() -> None:
    routing = RouteTable()
    with pytest.raises(TimeoutError):
        await routing.wait_known(timeout_s=0.02)
    waiting = asyncio.create_task(routing.wait_known(timeout_s=5))
    await asyncio.sleep(0)
    routing.apply(routes(1, 1, None))
    await waiting
