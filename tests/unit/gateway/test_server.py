"""Client connections: deadlines for heads and bodies, and counters that add up."""

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cache.wire import listen_unix
from supervisor.gateway.app import Worker
from supervisor.gateway.counters import Counters, Histogram
from supervisor.gateway.errors import EngineLostError
from supervisor.gateway.protocol import (
    TTFT_BUCKETS_S,
    GatewayLimits,
    GatewaySpec,
    GroupRoute,
    Routes,
    RouteTarget,
)
from supervisor.gateway.server import connections_within
from supervisor.gateway.upstream import EngineConnection

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A worker in this process, with short deadlines; answers its port."""
    monkeypatch.setattr("supervisor.gateway.server.HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr("supervisor.gateway.server.KEEPALIVE_S", 0.5)
    monkeypatch.setattr("supervisor.gateway.server.LINGER_S", 0.1)
    monkeypatch.setattr("supervisor.gateway.endpoints.BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("supervisor.gateway.app.FIRST_TABLE_GRACE_S", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    limits = GatewayLimits(1 << 16, 100, 10, 0.3, 1.0, 1.0)
    worker = Worker(GatewaySpec("w", str(tmp_path / "w.sock"), listener.detach(), limits))
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    worker.apply_routes(Routes(1, [GroupRoute("chat", 1, 2048, None)]))
    yield port
    worker.terminate()
    await asyncio.wait_for(running, 10)


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@pytest.mark.parametrize("data", [b"", b"GET /v1/models HTTP/1.1\r\nHost"])
async def test_a_head_that_never_ends_is_cut_off(port: int, data: bytes) -> None:
    assert await exchange(port, data) == b""


async def test_a_torn_second_head_is_cut_off_too(port: int) -> None:
    answer = await exchange(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/mod")

    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_a_body_that_never_ends_is_answered_with_408(port: int) -> None:
    answer = await exchange(port, _POST + b'Content-Length: 100\r\n\r\n{"model"')

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


async def test_a_compressed_body_is_refused(port: int) -> None:
    answer = await exchange(
        port, _POST + b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: 2\r\n\r\nxx"
    )

    assert answer.startswith(b"HTTP/1.1 415 ")


async def test_a_bug_of_ours_is_a_500_without_a_traceback(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_data: bytes) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("supervisor.gateway.endpoints.decode_object", broken)
    answer = await exchange(port, _POST + b"Content-Length: 2\r\n\r\n{}")

    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in answer
    assert b"secret" not in answer


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    answer = await exchange(
        port,
        b"GET /v1/models/chat HTTP/1.1\r\nHost: x\r\n\r\n"
        b"GET /none HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    )

    assert answer.index(b" 200 OK") < answer.index(b" 404 Not Found")


async def test_connecting_to_an_engine_waits_while_its_backlog_is_full(tmp_path: Path) -> None:
    path = tmp_path / "e.gen"
    target = RouteTarget("e", str(path), 1)
    loop = asyncio.get_running_loop()
    with pytest.raises(EngineLostError):
        await EngineConnection.open(target, deadline=loop.time() + 1)
    with listen_unix(path, backlog=0) as listener:
        first = await EngineConnection.open(target, deadline=loop.time() + 1)
        with pytest.raises(TimeoutError):
            await EngineConnection.open(target, deadline=loop.time() + 0.1)
        listener.accept()[0].close()
        second = await EngineConnection.open(target, deadline=loop.time() + 1)
        with pytest.raises(EngineLostError):
            await first.next_frame()
        second.cut()


def test_clients_leave_descriptors_for_engines() -> None:
    assert connections_within(1 << 20, 10_000) == 10_000
    assert connections_within(20_000, 10_000) == 10_000
    assert connections_within(1024, 10_000) == 448
    assert connections_within(16, 10_000) == 1


def test_histograms_count_at_or_below_each_bound() -> None:
    histogram = Histogram((0.1, 1.0, math.inf))
    for value_s in (0.05, 0.1, 0.5, 70.0):
        histogram.observe(value_s)

    assert histogram.cumulative == [2, 3, 4]
    assert histogram.sum_s == pytest.approx(70.65)


def test_counters_start_at_zero_with_all_buckets() -> None:
    counters = Counters()
    counters.of("chat")

    none, chat = counters.snapshot()
    assert (none.model, chat.model) == ("", "chat")
    assert chat.ttft_buckets == [0] * len(TTFT_BUCKETS_S)
