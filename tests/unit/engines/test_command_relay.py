"""Requests as a server hears them, and its answers as frames."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from engines.command.api import HttpEngine
from engines.command.progress import Progress
from engines.command.relay import EventReader, Relay, ServerLostError, request_of
from engines.contract import (
    Accepted,
    Delta,
    End,
    EngineFrame,
    Generate,
    GenerateBody,
    GenerateError,
    Usage,
)

DONE = b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":9}}\n\ndata: [DONE]\n\n'
)


def said(text: str) -> bytes:
    return f'data: {{"choices":[{{"text":"{text}","finish_reason":null}}]}}\n\n'.encode()


@asynccontextmanager
async def server(
    *pieces: bytes, status: int = 200, breaks: bool = False, content_type: str = "text/event-stream"
) -> AsyncIterator[Relay]:
    """A relay to a server that answers every request with these pieces."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Retry-After": "3"})
        response.content_type = content_type
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if breaks and request.transport is not None:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield Relay(HttpEngine(url), "m", Progress())
    finally:
        await runner.cleanup()


async def frames_of(relay: Relay) -> list[EngineFrame]:
    frames: list[EngineFrame] = []
    body = GenerateBody("completion", prompt="p", max_tokens=5)
    await relay.run(Generate(1, "00", 3, "gateway", body, 7), frames.append)
    assert frames[0] == Accepted([], 3, "fresh", exact=False, resumable=False)
    return frames[1:]


def test_only_what_is_asked_for_is_said_beyond_openais_api() -> None:
    body = GenerateBody("completion", prompt=[1, 2], temperature=0.0)
    path, plain = request_of(body, seed=1 << 40, model="m")
    assert path == "/v1/completions"
    assert plain["prompt"] == [1, 2]
    assert not {"seed", "top_k", "ignore_eos", "stop", "max_tokens"} & plain.keys()
    body = GenerateBody(
        "chat", messages=[{"role": "user", "content": "x"}], max_tokens=3, top_k=5, stop=["."],
        ignore_eos=True,
    )  # fmt: skip
    path, full = request_of(body, seed=(5 << 31) + 9, model="m")
    assert path == "/v1/chat/completions"
    assert (full["seed"], full["max_tokens"], full["top_k"], full["stop"]) == (9, 3, 5, ["."])
    assert full["stream"] is True


def test_events_are_cut_wherever_pieces_end() -> None:
    data = b": comment\r\nid: 1\ndata: one\r\n\r\ndata:two\n\ndata: three"
    reader = EventReader()
    cut = [d for i in range(len(data)) for d in reader.feed(data[i : i + 1])]
    assert cut == [b"one", b"two"]
    assert list(reader.feed(b"\n")) == [b"three"]


async def test_text_comes_in_order_with_its_characters_counted() -> None:
    async with server(said("wö"), said(""), said("rd"), DONE, USAGE) as relay:
        *deltas, end = await frames_of(relay)
    assert deltas == [Delta(0, [], "wö", 2), Delta(0, [], "rd", 4)]
    assert isinstance(end, End)
    assert (end.finish_reason, end.usage.prompt_tokens, end.usage.completion_tokens) == (
        "stop",
        4,
        9,
    )


async def test_without_usage_pieces_are_counted() -> None:
    async with server(said("a"), said("b"), DONE) as relay:
        *_, end = await frames_of(relay)
    assert isinstance(end, End)
    assert end.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (429, "queue_full", 429),
        (503, "server_busy", 503),
        (400, "invalid_request", 400),
        (404, "invalid_request", 400),
        (422, "invalid_request", 422),
        (500, "server_error", 500),
    ],
)
async def test_refusals_keep_their_meaning(status: int, code: str, told: int) -> None:
    async with server(b'{"error":{"message":"why"}}', status=status) as relay:
        (error,) = await frames_of(relay)
    assert isinstance(error, GenerateError)
    assert (error.code, error.status, error.message, error.resumable) == (code, told, "why", False)


async def test_a_prompt_that_is_too_long_is_told_apart() -> None:
    text = b'{"message":"This model\'s maximum context length is 8 tokens","object":"error"}'
    async with server(text, status=400) as relay:
        (error,) = await frames_of(relay)
    assert isinstance(error, GenerateError)
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "last",
    [
        b"data: [DONE]\n\n",
        b"data: {broken\n\n",
        b"data: 7\n\n",
        b"data: " + b"[" * 90_000 + b"\n\n",
        b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n',
        b"data: " + b"x" * (2 << 20),
    ],
)
async def test_an_answer_that_does_not_say_that_it_is_complete_is_none(last: bytes) -> None:
    async with server(said("a"), last) as relay:
        *_, error = await frames_of(relay)
    assert isinstance(error, GenerateError)
    assert error.code == "engine_failed"
    assert error.resumable


async def test_a_connection_that_breaks_is_as_the_death_of_the_engine() -> None:
    async with server(said("a"), breaks=True) as relay:
        with pytest.raises(ServerLostError):
            await frames_of(relay)


async def test_an_answer_that_just_ends_is_as_the_death_of_the_engine() -> None:
    async with server(said("a")) as relay:
        with pytest.raises(ServerLostError):
            await frames_of(relay)


@pytest.mark.parametrize(
    ("event", "code", "status"),
    [
        (b'{"error":{"message":"bad","code":400}}', "invalid_request", 400),
        (b'{"object":"error","message":"bad","code":422}', "invalid_request", 422),
        (b'{"error":{"message":"bad","code":"queue","type":"x"}}', "server_error", 502),
        (b'{"error":"bad"}', "server_error", 502),
    ],
)
async def test_an_error_within_the_answer_is_told_and_not_asked_for_again(
    event: bytes, code: str, status: int
) -> None:
    async with server(b"data: " + event + b"\n\n") as relay:
        assert await frames_of(relay) == [GenerateError(code, "bad", status=status)]
    async with server(event, content_type="application/json") as relay:
        (error,) = await frames_of(relay)
    assert isinstance(error, GenerateError)
    assert (error.code, error.message, error.resumable) == (code, "bad", False)


async def test_an_error_that_is_null_is_none() -> None:
    async with server(b'data: {"error":null,"choices":[{"text":"a"}]}\n\n', DONE, USAGE) as relay:
        assert await frames_of(relay) == [Delta(0, [], "a", 1), End("stop", Usage(4, 9))]


async def test_a_server_that_does_not_stream_is_told_so() -> None:
    answer = b'{"choices":[{"text":"a","finish_reason":"stop"}]}'
    async with server(answer, content_type="application/json") as relay:
        (error,) = await frames_of(relay)
    assert isinstance(error, GenerateError)
    assert (error.code, error.resumable) == ("server_error", False)
    assert "stream" in error.message
