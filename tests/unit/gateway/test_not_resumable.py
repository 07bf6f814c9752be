"""Streams that no other engine can go on with: begun anew while the client has nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from engines.contract import Accepted, Delta, End, Generate, GenerateError, Usage
from supervisor.gateway.errors import ApiError
from supervisor.gateway.limits import MAX_FRUITLESS_ATTEMPTS
from tests.unit.gateway.scripted import Line, Script, ScriptedEngine
from tests.unit.gateway.test_stream import LIMITS, Stage

WORDS = ("one ", "two ", "three")


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(tmp_path, stack, LIMITS)


def says(words: int, *, then: GenerateError | None = None, dies: bool = False) -> Script:
    """Accepts, says so many words without token ids, and ends in one of three ways."""

    async def script(_engine: ScriptedEngine, line: Line, request: Generate) -> None:
        await line.send(Accepted([], request.epoch, "fresh", exact=False, resumable=False))
        chars = 0
        for word in WORDS[:words]:
            chars += len(word)
            await line.send(Delta(0, [], word, chars))
        if dies:
            await asyncio.sleep(0.05)
            line.drop()
        elif then is not None:
            await line.send(then)
        else:
            await line.send(End("stop", Usage(5, 3)))

    return script


async def test_text_without_token_ids_is_an_answer_and_its_tokens_are_counted(stage: Stage) -> None:
    stage.route(await stage.engine("a", says(3)), 1)
    end = await stage.run()
    assert stage.client.whole == "one two three"
    assert end.usage.completion_tokens == 3
    assert stage.counters.tokens == 3


async def test_one_that_is_lost_before_its_first_text_is_asked_anew(stage: Stage) -> None:
    a, b = await stage.engine("a", says(0, dies=True)), await stage.engine("b", says(3))
    stage.route(a, 1)
    asyncio.get_running_loop().call_later(0.1, stage.route, b, 2)
    await stage.run()
    assert stage.client.whole == "one two three"
    (request,) = b.requests
    assert request.resume is None
    assert request.body.prompt == "tell me"
    assert stage.counters.retried == 1


async def test_one_that_is_lost_later_ends_with_a_typed_error_at_once(stage: Stage) -> None:
    a, b = await stage.engine("a", says(2, dies=True)), await stage.engine("b", says(3))
    stage.route(a, 1)
    stage.client.on_text = lambda count: stage.route(b, 2) if count == 2 else None
    with pytest.raises(ApiError) as caught:
        await stage.run()
    assert (caught.value.status, caught.value.api_code) == (502, "stream_lost")
    assert stage.client.whole == "one two "
    assert b.requests == []


async def test_a_client_that_waits_for_the_whole_answer_gets_that_of_the_next_engine(
    stage: Stage,
) -> None:
    a, b = await stage.engine("a", says(2, dies=True)), await stage.engine("b", says(3))
    stage.client.keeps_to_the_end = True
    stage.route(a, 1)
    asyncio.get_running_loop().call_later(0.2, stage.route, b, 2)
    await stage.run()
    assert stage.client.whole == "one two three"


@pytest.mark.parametrize(("code", "status"), [("queue_full", 429), ("server_busy", 503)])
async def test_a_refusal_behind_the_acceptance_is_the_clients(
    stage: Stage, code: str, status: int
) -> None:
    refusal = GenerateError(code, "full", status=status, retry_after_s=2.0)
    stage.route(await stage.engine("a", says(0, then=refusal)), 1)
    with pytest.raises(ApiError) as caught:
        await stage.run()
    assert (caught.value.status, caught.value.api_code) == (status, code)
    assert caught.value.headers["Retry-After"] == "2"


async def test_an_answer_that_breaks_off_is_never_taken_for_complete(stage: Stage) -> None:
    broken = GenerateError("engine_failed", "the answer broke off", resumable=True)
    stage.route(await stage.engine("a", says(1, then=broken)), 1)
    with pytest.raises(ApiError) as caught:
        await stage.run()
    assert caught.value.api_code == "stream_lost"


async def test_one_that_breaks_off_each_time_is_not_asked_for_ever(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.gateway.stream.SAME_ROUTE_FIRST_S", 0.01)
    monkeypatch.setattr("supervisor.gateway.stream.SAME_ROUTE_LONGEST_S", 0.01)
    broken = GenerateError("engine_failed", "no idea what this is", resumable=True)
    engine = await stage.engine("a", says(1, then=broken))
    stage.client.keeps_to_the_end = True
    stage.route(engine, 1)
    with pytest.raises(ApiError, match="no idea what this is") as caught:
        async with asyncio.timeout(10):
            await stage.run()
    assert (caught.value.status, caught.value.api_code) == (500, "stream_broken")
    assert len(engine.requests) == MAX_FRUITLESS_ATTEMPTS
