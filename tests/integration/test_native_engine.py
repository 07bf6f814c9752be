"""One native engine as supervisor and gateway meet it: roles, requests, cuts, health, shutdown."""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cache.errors import RemoteError
from cache.protocol import PROTOCOL as CACHE_PROTOCOL
from cache.protocol import VERSION as CACHE_VERSION
from cache.protocol import CacheStatus, Donate
from cache.rpc import Hello
from cache.wire import Connection
from engines.command.api import HttpEngine
from engines.contract import (
    Assume,
    CanaryResult,
    Cancel,
    Descriptors,
    EngineStatus,
    GenerateBody,
    GenerateError,
    ProgressPage,
    ReleaseGateway,
    Resume,
)
from tests.integration.engines_support import (
    ROOT,
    Engine,
    Spawned,
    cache_daemon,
    cache_status,
    cold_engine,
    engine_spec,
    environment,
    wait_for,
    wait_until,
    without_descriptors,
)

SLOTS, QUEUE, MAX_LENGTH, GRACE_S, MAX_UNSENT = 4, 2, 512, 1.0, 32
_EPOCHS = itertools.count(10)


def body(tokens: int = 8, **changes: Any) -> GenerateBody:
    made = GenerateBody(
        "completion", prompt="The lantern", max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    return msgspec.structs.replace(made, **changes)


@dataclass
class Running:
    spec: Any
    spawned: Spawned
    run_dir: Path
    daemon: Spawned


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One engine for all tests here. It leaves in order at the end, and nothing stays behind."""
    run_dir = tmp_path_factory.mktemp("run")
    spec = engine_spec(
        run_dir,
        "chat-a",
        slots=SLOTS,
        max_length=MAX_LENGTH,
        max_queue=QUEUE,
        adopt_grace_s=GRACE_S,
        max_unsent_tokens=MAX_UNSENT,
        ballast_bytes=64 << 20,
    )
    with cache_daemon(run_dir) as daemon:
        spawned = cold_engine(spec, run_dir)
        made = Running(spec, spawned, run_dir, daemon)
        try:
            wait_for((run_dir / f"{spec.instance}.gen").exists, timeout_s=60)
            yield made
            assert spawned.terminate() == 0
            assert not list(run_dir.glob(f"{spec.instance}.[sgh]*"))
            assert "Traceback" not in spawned.log.read_text()
        finally:
            spawned.kill()


@pytest.fixture
async def engine(running: Running) -> AsyncIterator[Engine]:
    """The engine as primary of a new epoch, with no stream left over."""
    made = Engine(running.spec)
    await made.ready()
    await made.assume("primary", next(_EPOCHS))
    yield made
    made.close()
    await idle(made)


async def idle(engine: Engine) -> None:
    async def is_idle() -> bool:
        status = await engine.status()
        return status.active == status.parked == status.queued == 0

    await wait_until(is_idle)


async def status_when(engine: Engine, **wanted: int) -> EngineStatus:
    async def holds() -> bool:
        status = await engine.status()
        return all(getattr(status, name) == value for name, value in wanted.items())

    await wait_until(holds)
    return await engine.status()


async def refused(engine: Engine, request: GenerateBody, **options: Any) -> GenerateError:
    stream = await engine.complete(request, **options)
    assert isinstance(stream.end, GenerateError)
    return stream.end


async def metric(engine: Engine, name: str) -> float:
    _, text = await http(engine, "/metrics")
    line = next(li for li in text.splitlines() if li.startswith(f"understudy_native_{name}{{"))
    return float(line.rpartition(" ")[2])


async def http(engine: Engine, path: str) -> tuple[int, str]:
    file = engine.run_dir / f"{engine.spec.instance}.http"
    reader, writer = await asyncio.open_unix_connection(str(file))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, text = answer.partition("\r\n\r\n")
    return int(head.split()[1]), text


# ------------------------------------------------------------------------ requests


async def test_a_greedy_completion_and_its_usage(engine: Engine) -> None:
    stream = await engine.complete(body(8))

    assert stream.finish_reason == "length"
    assert stream.accepted is not None
    assert stream.accepted.source == "fresh"
    assert stream.accepted.exact
    assert stream.accepted.epoch == engine.epoch
    assert len(stream.token_ids) == 8
    assert stream.end is not None
    assert msgspec.to_builtins(stream.end)["usage"] == {
        "prompt_tokens": len(stream.accepted.prompt_ids),
        "completion_tokens": 8,
    }
    by_ids = await engine.complete(body(8, prompt=stream.accepted.prompt_ids))
    assert (by_ids.token_ids, by_ids.text) == (stream.token_ids, stream.text)


async def test_completions_end_after_16_tokens_and_chats_at_the_end_of_the_slot(
    engine: Engine,
) -> None:
    short = await engine.complete(body(1, max_tokens=None))
    chat = await engine.complete(
        GenerateBody(
            "chat", messages=[{"role": "user", "content": "Hello"}], temperature=0.0,
            ignore_eos=True,
        )
    )  # fmt: skip

    assert len(short.token_ids) == 16
    assert chat.accepted is not None
    assert len(chat.accepted.prompt_ids) + len(chat.token_ids) == MAX_LENGTH
    assert chat.finish_reason == "length"


async def test_a_stop_string_ends_the_stream_and_is_not_sent(engine: Engine) -> None:
    whole = await engine.complete(body(40))
    stop = whole.text[10:13]
    stream = await engine.complete(body(40, stop=[stop]))

    assert stream.finish_reason == "stop"
    assert stream.text == whole.text[: whole.text.index(stop)]
    assert len(stream.token_ids) < 40


async def test_parts_of_messages_are_joined(engine: Engine) -> None:
    plain = [{"role": "user", "content": "What is a lantern?"}]
    parts = [{"role": "user", "content": [
        {"type": "text", "text": "What is "}, {"type": "text", "text": "a lantern?"}]}]  # fmt: skip
    first, second = [
        await engine.complete(GenerateBody("chat", messages=m, max_tokens=4, temperature=0.0))
        for m in (plain, parts)
    ]
    assert first.accepted is not None
    assert second.accepted is not None
    assert first.accepted.prompt_ids == second.accepted.prompt_ids


@pytest.mark.parametrize(
    ("request_body", "code", "words"),
    [
        (body(8, prompt="x " * 2000), "context_length_exceeded", ["512 tokens", "8 more"]),
        (body(8, prompt="word " * 500_000), "context_length_exceeded", ["at least"]),
        (body(511), "context_length_exceeded", ["512", "511 more"]),
        (body(8, prompt=""), "invalid_request", ["empty"]),
        (body(0), "invalid_request", ["max_tokens"]),
        (body(8, prompt=[1, 999_999]), "invalid_request", ["token ids"]),
        (body(8, prompt=None), "invalid_request", ["exactly one"]),
        (body(8, temperature=-1.0), "invalid_request", ["temperature"]),
        (body(8, top_p=0.0), "invalid_request", ["top_p"]),
        (body(8, stop=["x" * 20_000]), "invalid_request", ["stop strings"]),
        (body(8, kind="chat", prompt=None, messages=[]), "invalid_request", ["messages"]),
        (
            body(8, kind="chat", prompt=None, messages=[{"role": "user", "content": [{"a": 1}]}]),
            "invalid_request",
            ["text parts"],
        ),
    ],
)
async def test_a_bad_request_is_refused_with_a_reason(
    engine: Engine, request_body: GenerateBody, code: str, words: list[str]
) -> None:
    error = await refused(engine, request_body)
    assert (error.code, error.status, error.resumable) == (code, 400, False)
    for word in words:
        assert word in error.message


async def test_more_requests_than_slots_and_queue_are_told_to_come_later(engine: Engine) -> None:
    streams = [await engine.open(body(450)) for _ in range(SLOTS + QUEUE)]
    for stream in streams:
        await stream.next()
        assert stream.accepted is not None
    await status_when(engine, queued=QUEUE)
    error = await refused(engine, body(450))

    assert (error.code, error.status, error.resumable) == ("queue_full", 429, False)
    assert error.retry_after_s is not None
    for stream in streams:
        stream.send(Cancel())
    await idle(engine)


# ------------------------------------------------------------------ cuts and ends


async def test_cancel_frees_the_slot_at_once(engine: Engine) -> None:
    stream = await engine.open(body(450))
    await stream.read_tokens(3)
    stream.send(Cancel())

    await status_when(engine, active=0, parked=0)
    again = await engine.open(body(450), request_id=stream.request_id, resume=stream.as_resume())
    await again.next()
    assert again.accepted is not None
    assert again.accepted.source == "replay"
    again.send(Cancel())


async def test_end_of_file_parks_the_row_until_the_grace_is_over(engine: Engine) -> None:
    expired = await metric(engine, "expired_slots_total")
    stream = await engine.open(body(450))
    await stream.read_tokens(3)
    stream.close()

    parked = await status_when(engine, active=0, parked=1)
    assert parked.queued == 0
    await status_when(engine, active=0, parked=0)
    assert await metric(engine, "expired_slots_total") == expired + 1


async def test_a_dead_gateway_frees_its_rows_and_no_others(engine: Engine) -> None:
    dead = await engine.open(body(450), gateway="gateway-dead")
    alive = await engine.open(body(200), gateway="gateway-alive")
    await dead.read_tokens(2)
    await alive.read_tokens(2)
    dead.close()
    await status_when(engine, parked=1)

    await engine.call("release_gateway", ReleaseGateway("gateway-dead"))

    await status_when(engine, parked=0)
    await alive.finish()
    assert alive.finish_reason == "length"


async def test_a_second_request_with_the_same_id_supersedes_the_first(engine: Engine) -> None:
    whole = await engine.complete(body(100))
    first = await engine.open(body(100))
    await first.read_tokens(5)
    second = await engine.open(body(100), request_id=first.request_id, resume=first.as_resume())
    await second.finish()
    await first.finish()

    assert isinstance(first.end, GenerateError)
    assert (first.end.code, first.end.resumable) == ("superseded", False)
    assert second.accepted is not None
    assert second.accepted.source == "slot"
    assert second.token_ids == whole.token_ids
    delivered = whole.token_ids[: len(first.token_ids)]
    assert first.token_ids == delivered


async def test_a_retry_that_has_received_nothing_finds_its_slot(engine: Engine) -> None:
    whole = await engine.complete(body(60))
    first = await engine.open(body(60))
    await first.read_tokens(5)
    first.close()
    retry = await engine.complete(body(60), request_id=first.request_id)

    assert retry.accepted is not None
    assert retry.accepted.source == "slot"
    assert (retry.token_ids, retry.text) == (whole.token_ids, whole.text)


async def test_a_slot_that_contradicts_the_client_is_replayed(engine: Engine) -> None:
    first = await engine.open(body(60))
    await first.read_tokens(5)
    first.close()
    assert first.accepted is not None
    other = [(token_id + 1) % 2000 for token_id in first.token_ids]
    resume = Resume(first.accepted.prompt_ids, other, 0)
    differences = await metric(engine, "replay_differences_total")
    again = await engine.complete(body(60), request_id=first.request_id, resume=resume)

    assert again.accepted is not None
    assert again.accepted.source == "replay"
    assert again.token_ids[: len(other)] == other
    assert len(again.token_ids) == 60
    assert await metric(engine, "replay_differences_total") > differences


async def test_a_client_that_lacks_only_the_end_gets_it(engine: Engine) -> None:
    whole = await engine.complete(body(12))
    resume = whole.as_resume()
    again = await engine.complete(body(12), request_id=whole.request_id, resume=resume)

    assert again.token_ids == whole.token_ids
    assert again.text == ""
    assert again.end == whole.end


async def test_a_slow_reader_stops_its_own_row_only(engine: Engine) -> None:
    slow = await engine.open(body(490))

    async def is_paused() -> bool:
        return await metric(engine, "paused") == 1

    await wait_until(is_paused)
    tokens = await metric(engine, "tokens_total")
    quick = await engine.complete(body(100))
    assert quick.finish_reason == "length"
    assert await metric(engine, "tokens_total") == tokens + 100

    await slow.finish()
    assert slow.finish_reason == "length"
    assert len(slow.token_ids) == 490


async def test_rubbish_on_the_generation_socket_closes_that_connection(engine: Engine) -> None:
    stream = await engine.open(body(5), epoch=engine.epoch)
    await stream.finish()
    path = engine.run_dir / f"{engine.spec.instance}.gen"
    for data in (b"\x00\x00\x00\x04nope", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}"):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b"invalid_request" in answer
        writer.close()
        await writer.wait_closed()


# ------------------------------------------------------------------ roles, control


async def test_only_the_exact_epoch_is_served(engine: Engine) -> None:
    for epoch in (engine.epoch - 1, engine.epoch + 1):
        error = await refused(engine, body(4), epoch=epoch)
        assert (error.code, error.resumable) == ("stale_epoch", True)


async def test_orders_of_the_past_and_impossible_roles_are_refused(engine: Engine) -> None:
    with pytest.raises(RemoteError) as stale:
        await engine.call("assume", Assume("primary", engine.epoch - 1))
    assert stale.value.stable_code == "stale_epoch"
    with pytest.raises(RemoteError) as impossible:
        await engine.call("assume", Assume("batch", engine.epoch + 1))
    assert impossible.value.stable_code == "role_not_possible"
    assert (await engine.status()).role == "primary"


async def test_primary_to_standby_and_back_keeps_every_stream(engine: Engine) -> None:
    whole = await engine.complete(body(300))
    streams = [await engine.open(body(300)) for _ in range(SLOTS)]
    waiting = await engine.open(body(300))
    await asyncio.gather(*[s.read_tokens(4) for s in streams])

    await engine.assume("standby", engine.epoch)
    for stream in (*streams, waiting):
        await stream.finish()
        assert isinstance(stream.end, GenerateError)
        assert (stream.end.code, stream.end.resumable) == ("not_serving", True)
    assert (await refused(engine, body(4))).code == "not_serving"
    status = await engine.status()
    assert (status.state, status.role, status.parked) == ("standby", "standby", 0)

    assumed = await engine.assume("primary", next(_EPOCHS))
    assert sorted(assumed.adopted) == sorted(s.request_id for s in streams)
    resumed = [
        await engine.open(body(300), request_id=s.request_id, resume=s.as_resume()) for s in streams
    ]
    for stream, again in zip(streams, resumed, strict=True):
        await again.finish()
        assert again.accepted is not None
        assert again.accepted.source == "slot"
        assert again.token_ids == whole.token_ids
        assert stream.text + again.text == whole.text


async def test_the_canary_is_the_same_in_every_role_and_under_load(engine: Engine) -> None:
    async def canary() -> CanaryResult:
        return msgspec.json.decode(await engine.call("canary"), type=CanaryResult)

    quiet = await canary()
    streams = [await engine.open(body(400)) for _ in range(SLOTS)]
    await streams[0].read_tokens(3)
    busy = await canary()
    await engine.assume("standby", engine.epoch)
    as_standby = await canary()
    for stream in streams:
        await stream.finish()
    await engine.assume("primary", next(_EPOCHS))

    assert quiet.token_ids == busy.token_ids == as_standby.token_ids
    assert len(quiet.token_ids) == 2
    assert quiet.duration_ms > 0
    assert quiet.monotonic_ns < busy.monotonic_ns <= time.monotonic_ns()
    await engine.call("release_gateway", ReleaseGateway("gateway-1"))


async def test_control_answers_while_the_model_runs(engine: Engine) -> None:
    streams = [await engine.open(body(480)) for _ in range(SLOTS)]
    readers = [asyncio.create_task(s.finish()) for s in streams]
    took_ms: list[float] = []
    async with engine.control() as client:
        while not all(r.done() for r in readers) and len(took_ms) < 150:
            started = time.perf_counter()
            await client.call("status", timeout_s=5)
            took_ms.append((time.perf_counter() - started) * 1e3)
    await asyncio.gather(*readers)

    assert len(took_ms) > 20
    assert sorted(took_ms)[len(took_ms) // 2] < 20  # a loaded test machine; alone it is below 1


async def test_progress_is_visible_in_shared_memory(engine: Engine) -> None:
    async with engine.control() as client:
        _, (fd,) = await client.call("progress.open", timeout_s=5)
    with mmap.mmap(fd, ProgressPage.SIZE_BYTES, prot=mmap.PROT_READ) as memory:
        with pytest.raises(OSError, match="not permitted"):
            os.truncate(fd, 0)
        page = ProgressPage(memoryview(memory))
        before = {name: page.get(name) for name in ProgressPage.FIELDS}
        await engine.complete(body(20))
        after = {name: page.get(name) for name in ProgressPage.FIELDS}
        assert page.is_valid
        page.release()
    os.close(fd)

    assert after["steps"] >= before["steps"] + 20
    assert after["tokens"] == before["tokens"] + 20
    assert after["epoch"] == engine.epoch
    assert before["step_finished_ns"] < after["step_started_ns"] < after["step_finished_ns"]
    assert after["step_finished_ns"] <= time.monotonic_ns()


async def test_without_a_descriptor_connections_wait_and_the_loop_does_not_spin(
    engine: Engine, running: Running
) -> None:
    before = running.spawned.log.read_text().count("cannot accept")
    with without_descriptors(running.spawned.pid):
        waiting = asyncio.create_task(engine.complete(body(5)))
        await asyncio.sleep(1.0)
        told = running.spawned.log.read_text().count("cannot accept") - before
        assert 0 < told <= 30
        assert not waiting.done()
    stream = await waiting
    assert stream.finish_reason == "length"


async def test_health_and_metrics(engine: Engine) -> None:
    code, text = await http(engine, "/health")
    assert code == 200
    assert json.loads(text) == {"state": "serving", "role": "primary", "epoch": engine.epoch}
    code, text = await http(engine, "/metrics")
    assert code == 200
    assert 'understudy_native_slots{engine="chat-a",group="chat"} 4.0' in text
    assert 'understudy_native_step_seconds_bucket{engine="chat-a",group="chat",le="+Inf"}' in text
    assert (await http(engine, "/else"))[0] == 404


async def test_the_page_tells_its_progress_as_that_of_any_http_engine(engine: Engine) -> None:
    socket = engine.run_dir / f"{engine.spec.instance}.http"
    outside = HttpEngine("http://engine", socket)
    before = await outside.counters(timeout_s=5.0)
    assert before is not None
    await engine.complete(body(5))
    after = await outside.counters(timeout_s=5.0)
    assert after is not None
    assert after.work > before.work


async def test_status_tells_what_start_up_found(engine: Engine, running: Running) -> None:
    status = await engine.status()
    assert status.exact
    assert status.pid == running.spawned.pid
    assert status.slots == SLOTS
    assert status.attach_ms is not None
    assert status.start_ms is not None
    assert status.attach_ms < status.start_ms


async def test_the_engine_outlives_its_cache_daemon_and_donates_to_the_next(
    engine: Engine, running: Running
) -> None:
    """No stream notices, and the new daemon serves the same memory without a load."""
    whole = await engine.complete(body(480))
    stream = await engine.open(body(480))
    await stream.read_tokens(3)
    running.daemon.kill()

    async def registered(*, wanted: bool) -> bool:
        return (await engine.status()).cache_registered is wanted

    await wait_until(lambda: registered(wanted=False))
    with cache_daemon(running.run_dir, load=False):
        async with engine.control() as client:
            raw, fds = await client.call("descriptors", timeout_s=5)
            offer = msgspec.json.decode(raw, type=Descriptors)
            await asyncio.to_thread(donate, running.run_dir, offer, fds)
            await client.call("cache.rejoin", timeout_s=5)
        await wait_until(lambda: registered(wanted=True))
        status = await cache_status(running.run_dir)
        await stream.finish()

        assert (status.state, status.loads, status.donations) == ("serving", 0, 1)
        assert stream.token_ids == whole.token_ids

        async def is_known() -> bool:
            attached = (await cache_status(running.run_dir)).attached
            return [c.instance for c in attached] == [engine.spec.instance]

        await wait_until(is_known)


def donate(run_dir: Path, offer: Descriptors, fds: list[int]) -> CacheStatus:
    connection = Connection.open(run_dir / "cache-chat.sock")
    try:
        connection.call("hello", Hello(CACHE_PROTOCOL, CACHE_VERSION, "tests"), timeout_s=5)
        donation = Donate(offer.manifest, offer.spec, offer.kv)
        raw, _ = connection.call("donate", donation, fds=fds, timeout_s=10)
        return msgspec.json.decode(raw, type=CacheStatus)
    finally:
        connection.close()
        for fd in fds:
            os.close(fd)


# ------------------------------------------------------------------- other processes


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_path": "/absent"}, "unsupported_model"),
        (
            {"dtype": "float31"},
            "AttributeError",
        ),  # nobody foresaw it
        pytest.param(
            {"device": "cuda:0"},
            "torch_without_cuda",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA"),
        ),
    ],
    ids=["model", "dtype", "device"],
)
def test_a_start_that_cannot_work_is_one_line_and_status_1(
    tmp_path: Path, change: dict[str, str], code: str
) -> None:
    spec = engine_spec(tmp_path, "broken", cache_socket=None)
    broken = msgspec.structs.replace(spec, load=msgspec.structs.replace(spec.load, **change))
    spawned = cold_engine(broken, tmp_path)

    assert spawned.process.wait(60) == 1
    lines = spawned.log.read_text().splitlines()
    assert [line.split(": ")[:2] for line in lines if line.startswith("error")] == [["error", code]]


READER = """
import os, sys, torch
from cache.errors import StaleEpochError
from cache.protocol import KvGeometry, KvOpened
from cache.slots import SlotTable
from cache.mapping import Mapping
from engines.native.memory import SharedMemory

g = KvGeometry(layers=2, slots=2, kv_heads=2, max_length=64, head_dim=32, dtype="float32")
table_bytes = -(-SlotTable.size_bytes(2, 64) // 4096) * 4096
kv, table = os.memfd_create("kv"), os.memfd_create("table")
os.ftruncate(kv, g.total_bytes)
os.ftruncate(table, table_bytes)
with Mapping([table], [table_bytes], writable=True) as formatted:
    SlotTable.format(formatted.view(), 2, 64)
memory = SharedMemory(KvOpened(g, [g.total_bytes], table_bytes), [kv], table)
inactive = memory.kv.decode_rows(torch.zeros(2, dtype=torch.int64), torch.tensor([False, False]))
active = memory.kv.decode_rows(torch.zeros(2, dtype=torch.int64), torch.tensor([True, False]))
values = torch.ones(4, 32)
for layer in range(2):
    for part in range(2):
        memory.kv.flat.index_copy_(0, inactive[layer, part], values)
assert float(memory.kv.slots.sum()) == 0.0
if sys.argv[1] == "writer":
    memory.raise_to_writer(3)
    memory.kv.flat.index_copy_(0, active[0, 0], values)
    assert float(memory.kv.slots.sum()) == 64.0
    memory.drop_to_reader()
print("so far", flush=True)
if sys.argv[1] == "table":
    memory.raise_to_writer(9)
    memory.drop_to_reader()
    try:
        memory.raise_to_writer(8)
    except StaleEpochError:
        memory.table.free(0)
    print("never", flush=True)
memory.kv.flat.index_copy_(0, active[0, 0], values)
print("never", flush=True)
"""


@pytest.mark.parametrize("what", ["reader", "writer", "table"])
def test_a_standby_that_writes_shared_memory_dies_of_it(what: str) -> None:
    """Inactive rows go to the tail and are harmless; one active row is SIGSEGV."""
    found = subprocess.run(
        [sys.executable, "-c", READER, what],
        env=environment("reader"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == -signal.SIGSEGV, found.stderr
    assert found.stdout == "so far\n"
