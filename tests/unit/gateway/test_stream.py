"""One request over cuts, deaths and misbehaving engines, over the real generation socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cache.wire import encode_frame
from engines.contract import Accepted, Delta, End, Generate, GenerateBody, GenerateError
from supervisor.gateway.counters import ModelCounters
from supervisor.gateway.errors import ApiError
from supervisor.gateway.limits import Parking
from supervisor.gateway.protocol import GatewayLimits, GroupRoute, Routes, RouteTarget
from supervisor.gateway.routes import RouteTable
from supervisor.gateway.stream import EngineStream, LiveConnections, StreamContext
from tests.unit.gateway.scripted import (
    PROMPT_IDS,
    Line,
    Script,
    ScriptedEngine,
    Story,
    die_after,
    refuse,
    tell,
)

BODY = GenerateBody(kind="completion", prompt="tell me")


class Client:
    """A sink that remembers, and may be slow."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.on_text: Callable[[int], object] = lambda _count: None
        self.keeps_to_the_end = False  # as a client without streaming

    async def text(self, text: str) -> None:
        assert text
        self.pieces.append(text)
        self.on_text(len(self.pieces))
        await self.may_take.wait()

    def restart(self) -> bool:
        if self.keeps_to_the_end:
            self.pieces.clear()
        return not self.pieces

    @property
    def whole(self) -> str:
        return "".join(self.pieces)


@dataclass
class Stage:
    """A gateway without HTTP, and engines."""

    folder: Path
    stack: AsyncExitStack
    limits: GatewayLimits
    story: Story = field(default_factory=lambda: Story(24))
    table: RouteTable = field(default_factory=RouteTable)
    live: LiveConnections = field(default_factory=LiveConnections)
    counters: ModelCounters = field(default_factory=lambda: ModelCounters("chat"))
    client: Client = field(default_factory=Client)
    first_tokens: list[tuple[str, int, str]] = field(default_factory=list)
    sequence: int = 0
    parking: Parking = field(default_factory=lambda: Parking(4))

    async def engine(self, name: str, script: Script = tell, **settings: float) -> ScriptedEngine:
        path = self.folder / f"{name}.gen"
        engine = ScriptedEngine(path, self.story, script, **settings)
        return await self.stack.enter_async_context(engine)

    def route(self, engine: ScriptedEngine | None, epoch: int) -> int:
        """Push a table; returns how many streams it cut."""
        target = None if engine is None else RouteTarget(engine.path.stem, str(engine.path), epoch)
        self.sequence += 1
        self.table.apply(Routes(self.sequence, [GroupRoute("chat", epoch, 2048, target)]))
        return self.live.cut_stale(self.table)

    def stream(self) -> EngineStream:
        context = StreamContext(
            instance="gateway-0-test",
            limits=self.limits,
            table=self.table,
            parking=self.parking,
            live=self.live,
            on_first_token=lambda *what: self.first_tokens.append(what),
        )
        model = self.table.find("chat")
        assert model is not None
        return EngineStream(
            context, model=model, body=BODY, seed=7, counters=self.counters, sink=self.client
        )

    async def run(self) -> End:
        async with asyncio.timeout(20):
            return await self.stream().run()

    def assert_exact(self) -> None:
        assert self.client.whole == self.story.whole


LIMITS = GatewayLimits(
    max_body_bytes=1 << 20,
    max_connections=100,
    max_parked=4,
    park_timeout_s=3.0,
    resume_deadline_s=3.0,
    client_timeout_s=5.0,
)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(tmp_path, stack, LIMITS)


async def test_a_stream_is_told_to_its_end(stage: Stage) -> None:
    engine = await stage.engine("a")
    stage.route(engine, 1)

    end = await stage.run()

    assert end == stage.story.end
    stage.assert_exact()
    request = engine.requests[0]
    assert (request.epoch, request.seed, request.gateway) == (1, 7, "gateway-0-test")
    assert request.resume is None
    assert len(request.request_id) == 32
    assert stage.counters.tokens == 24


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 23])
async def test_a_cut_stream_goes_on_at_the_next_route_without_a_seam(
    stage: Stage, tokens: int
) -> None:
    a, b = await stage.engine("a", delay_s=0.005), await stage.engine("b")
    stage.route(a, 1)
    cut: list[int] = []

    def cut_then(count: int) -> None:
        if count > tokens * 3 // 4 and not cut:
            cut.append(stage.route(None, 1))
            asyncio.get_running_loop().call_later(0.05, stage.route, b, 2)

    stage.client.on_text = cut_then
    await stage.run()

    stage.assert_exact()
    assert cut == [1]
    resume = b.requests[0].resume
    assert resume is not None
    assert (resume.prompt_ids, resume.prompt_tokens) == (None, len(PROMPT_IDS))
    assert resume.token_ids == stage.story.ids[: len(resume.token_ids)]
    assert resume.chars == len(stage.story.text(len(resume.token_ids)))
    assert b.requests[0].request_id == a.requests[0].request_id
    assert a.requests[0].body.prompt is not None
    assert b.requests[0].body.prompt is None  # its ids are in the resume
    assert stage.counters.resumed_slot == 1
    assert stage.first_tokens == [("chat", 2, "slot")]
    assert not a.lines[0].got_cancel


async def test_an_engine_without_the_slot_is_asked_again_with_the_prompt(stage: Stage) -> None:
    async def without_slots(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if request.resume is not None and request.resume.prompt_ids is None:
            await line.send(GenerateError("prompt_needed", "?", status=409, resumable=True))
            return
        await tell(engine, line, request)

    a = await stage.engine("a", die_after(6))
    b = await stage.engine("b", without_slots)
    stage.route(a, 1)
    stage.client.on_text = lambda count: stage.route(b, 2) if count else None

    await stage.run()

    stage.assert_exact()
    first, second = (request.resume for request in b.requests)
    assert first is not None
    assert second is not None
    assert (first.prompt_ids, second.prompt_ids) == (None, PROMPT_IDS)
    assert first.token_ids == second.token_ids


async def test_frames_that_were_not_read_before_a_cut_never_reach_the_client(
    stage: Stage,
) -> None:
    a, b = await stage.engine("a"), await stage.engine("b")
    stage.route(a, 1)
    stage.client.may_take.clear()
    stage.client.on_text = lambda count: (
        count == 1 and asyncio.get_running_loop().call_later(0.2, switch)
    )

    def switch() -> None:
        assert stage.route(b, 2) == 1
        stage.client.may_take.set()

    await stage.run()

    stage.assert_exact()
    resume = b.requests[0].resume
    assert resume is not None
    assert len(resume.token_ids) == 1


async def test_an_engine_that_dies_is_waited_out_until_its_successor_has_the_route(
    stage: Stage,
) -> None:
    a, b = await stage.engine("a", die_after(6)), await stage.engine("b")
    stage.route(a, 1)
    asyncio.get_running_loop().call_later(0.15, stage.route, b, 2)

    await stage.run()

    stage.assert_exact()
    assert len(a.requests) == 1


async def test_a_connection_that_breaks_alone_is_opened_again(stage: Stage) -> None:
    a = await stage.engine("a", die_after(6))
    stage.route(a, 1)

    await stage.run()

    stage.assert_exact()
    assert len(a.requests) == 2
    assert a.requests[1].resume is not None


async def test_a_torn_frame_is_not_delivered(stage: Stage) -> None:
    async def tear(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if request.resume is not None:
            await tell(engine, line, request)
            return
        first, second = engine.story.delta(0, 1, 0), engine.story.delta(1, 1, 8)
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True), first)
        await line.send_bytes(encode_frame(second)[:-3])
        line.writer.close()

    a, b = await stage.engine("a", tear), await stage.engine("b")
    stage.route(a, 1)
    asyncio.get_running_loop().call_later(0.1, stage.route, b, 2)

    await stage.run()

    stage.assert_exact()
    resume = b.requests[0].resume
    assert resume is not None
    assert len(resume.token_ids) == 1


def _bad_second_frame(bad: bytes) -> Script:
    async def script(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if request.resume is not None:
            await tell(engine, line, request)
            return
        first = engine.story.delta(0, 1, 0)
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True), first)
        await line.send_bytes(bad)

    return script


@pytest.mark.parametrize(
    "bad",
    [
        encode_frame(Delta(0, [100], "wörd0\n☃ ", 8)),
        encode_frame(Delta(5, [105], "x", 9)),
        encode_frame(Delta(1, [101], "x", 8)),
        encode_frame({"type": "song"}),
        encode_frame({"type": "delta", "index": "one"}),
        b"\x00\x00\x00\x03{]}",
        b"\xff\xff\xff\xff rubbish",
    ],
)
async def test_a_wrong_frame_drops_the_connection_and_the_stream_goes_on(
    stage: Stage, bad: bytes
) -> None:
    a = await stage.engine("a", _bad_second_frame(bad))
    stage.route(a, 1)

    await stage.run()

    stage.assert_exact()
    assert len(a.requests) == 2


async def test_an_engine_that_stays_wrong_ends_the_stream_with_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.gateway.stream.SAME_ROUTE_LONGEST_S", 0.01)

    async def repeat(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True))
        await line.send(engine.story.delta(0, 1, 0), engine.story.delta(0, 1, 0))

    a = await stage.engine("a", repeat)
    stage.route(a, 1)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert caught.value.api_code == "stream_broken"
    assert len(stage.client.pieces) == 1


async def test_frames_of_an_older_epoch_are_not_forwarded(stage: Stage) -> None:
    async def old(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        await line.send(Accepted(PROMPT_IDS, request.epoch - 1, "fresh", exact=True))
        await line.send(Delta(0, [1], "old text", 8))

    a, b = await stage.engine("a", old), await stage.engine("b")
    stage.route(a, 3)
    asyncio.get_running_loop().call_later(0.1, stage.route, b, 4)

    await stage.run()

    stage.assert_exact()
    assert b.requests[0].resume is None
    assert stage.counters.retried == 1


async def test_a_request_that_no_engine_accepted_starts_afresh_with_the_same_seed(
    stage: Stage,
) -> None:
    async def vanish(_engine: ScriptedEngine, line: Line, _request: Generate) -> None:
        line.drop()

    a, b = await stage.engine("a", vanish), await stage.engine("b")
    stage.route(a, 1)
    asyncio.get_running_loop().call_later(0.1, stage.route, b, 2)

    await stage.run()

    stage.assert_exact()
    assert b.requests[0].resume is None
    assert b.requests[0].seed == a.requests[0].seed
    assert b.requests[0].request_id == a.requests[0].request_id
    assert stage.counters.retried == 1


@pytest.mark.parametrize("code", ["not_serving", "stale_epoch", "engine_failed"])
async def test_a_refusal_for_now_waits_for_the_next_route(stage: Stage, code: str) -> None:
    error = GenerateError(code, "not me", status=503, resumable=True)
    a, b = await stage.engine("a", refuse(error)), await stage.engine("b")
    stage.route(a, 1)
    asyncio.get_running_loop().call_later(0.1, stage.route, b, 2)

    await stage.run()

    stage.assert_exact()


@pytest.mark.parametrize(
    ("code", "status"), [("context_length_exceeded", 400), ("queue_full", 429), ("poison", 500)]
)
async def test_a_final_refusal_is_the_clients_answer(stage: Stage, code: str, status: int) -> None:
    a = await stage.engine("a", refuse(GenerateError(code, "no", status, retry_after_s=2.5)))
    stage.route(a, 1)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert (caught.value.api_code, caught.value.status) == (code, status)
    assert caught.value.headers["Retry-After"] == "3"
    assert len(a.requests) == 1


async def test_a_full_queue_does_not_end_a_stream_that_had_begun(stage: Stage) -> None:
    async def full_then_tell(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if len(engine.requests) == 1:
            await line.send(GenerateError("queue_full", "full", 429))
        else:
            await tell(engine, line, request)

    a, b = await stage.engine("a", die_after(4)), await stage.engine("b", full_then_tell)
    stage.route(a, 1)
    stage.client.on_text = lambda count: count == 3 and stage.route(b, 2)

    await stage.run()

    stage.assert_exact()
    assert len(b.requests) == 2


async def test_a_request_without_a_route_is_parked_until_there_is_one(stage: Stage) -> None:
    a = await stage.engine("a")
    stage.route(None, 1)
    asyncio.get_running_loop().call_later(0.1, stage.route, a, 2)

    task = asyncio.create_task(stage.run())
    await asyncio.sleep(0)
    assert stage.counters.parked == 1
    await task

    stage.assert_exact()
    assert stage.counters.parked == 0


async def test_waiting_for_a_route_ends_with_a_503(stage: Stage) -> None:
    stage.limits = GatewayLimits(
        1, 1, 1, park_timeout_s=0.1, resume_deadline_s=1, client_timeout_s=1
    )
    stage.route(None, 1)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert (caught.value.status, caught.value.api_code) == (503, "no_engine")
    assert "Retry-After" in caught.value.headers


async def test_only_so_many_requests_may_wait(stage: Stage) -> None:
    stage.parking = Parking(1)
    stage.route(None, 1)
    first = asyncio.create_task(stage.run())
    await asyncio.sleep(0)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert caught.value.status == 429
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert stage.parking.count == 0


async def test_a_stream_without_a_successor_ends_with_a_typed_error(stage: Stage) -> None:
    stage.limits = GatewayLimits(
        1, 1, 1, park_timeout_s=9, resume_deadline_s=0.2, client_timeout_s=1
    )
    a = await stage.engine("a", die_after(5))
    stage.route(a, 1)
    stage.client.on_text = lambda count: count == 3 and stage.route(None, 1)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert caught.value.api_code == "resume_deadline_exceeded"
    assert stage.story.whole.startswith(stage.client.whole)


async def test_a_dead_engine_whose_route_stays_is_waited_out_until_the_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor died with it: nobody takes the route away, and every attempt is in vain."""
    monkeypatch.setattr("supervisor.gateway.stream.SAME_ROUTE_FIRST_S", 0.01)
    monkeypatch.setattr("supervisor.gateway.stream.SAME_ROUTE_LONGEST_S", 0.01)
    a, b = await stage.engine("a", die_after(6)), await stage.engine("b")
    stage.route(a, 1)

    def vanish(count: int) -> None:
        if count == 3:
            a.path.unlink()

    stage.client.on_text = vanish
    asyncio.get_running_loop().call_later(0.6, stage.route, b, 2)

    await stage.run()

    stage.assert_exact()


async def test_an_engine_that_never_answers_is_bounded_by_the_deadline(stage: Stage) -> None:
    stage.limits = GatewayLimits(
        1, 1, 1, park_timeout_s=0.2, resume_deadline_s=9, client_timeout_s=1
    )

    async def mute(_engine: ScriptedEngine, line: Line, _request: Generate) -> None:
        await line.got_eof.wait()

    a = await stage.engine("a", mute)
    stage.route(a, 1)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert caught.value.status == 503
    await asyncio.wait_for(a.lines[0].got_eof.wait(), 5)
    assert a.lines[0].got_cancel


async def test_an_engine_that_accepts_and_dies_for_ever_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.gateway.stream.SAME_ROUTE_LONGEST_S", 0.01)

    async def accept_and_die(_engine: ScriptedEngine, line: Line, request: Generate) -> None:
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True))
        await asyncio.sleep(0.01)
        line.drop()

    a = await stage.engine("a", accept_and_die)
    stage.route(a, 1)

    with pytest.raises(ApiError) as caught:
        await stage.run()

    assert caught.value.api_code == "stream_broken"
    assert len(a.requests) == 10


async def test_a_client_that_goes_away_cancels_at_the_engine(stage: Stage) -> None:
    a = await stage.engine("a", delay_s=0.01)
    stage.route(a, 1)
    task = asyncio.create_task(stage.run())
    stage.client.on_text = lambda count: count == 3 and task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    await asyncio.wait_for(a.lines[0].got_eof.wait(), 5)
    assert a.lines[0].got_cancel


async def test_a_slow_client_stops_the_engine_and_no_memory_grows(stage: Stage) -> None:
    """Given a client that takes nothing, the engine cannot write more than the buffers hold."""
    sent = 0

    async def flood(_engine: ScriptedEngine, line: Line, request: Generate) -> None:
        nonlocal sent
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True))
        for index in range(100_000):
            await line.send(Delta(index, [index], "x" * 100, 100 * (index + 1)))
            sent += 1
        await line.send(End("length", stage.story.end.usage))

    a = await stage.engine("a", flood)
    stage.route(a, 1)
    stage.client.may_take.clear()
    task = asyncio.create_task(stage.run())
    seen = -1
    async with asyncio.timeout(10):
        while seen != sent or not sent:
            seen = sent
            await asyncio.sleep(0.2)

    assert sent < 20_000
    assert len(stage.client.pieces) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_log_never_shows_text(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    a = await stage.engine("a", die_after(6))
    stage.route(a, 1)

    await stage.run()

    assert "an attempt failed" in caplog.text
    assert "wörd" not in caplog.text
    assert "tell me" not in caplog.text
