"""A real gateway worker process, the real OpenAI client, and engines that play scripts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from cache.rpc import Hello, RpcClient
from cache.wire import Event, encode_frame, listen_unix
from engines.contract import Accepted, Delta, End, Generate, GenerateError, Usage
from supervisor.gateway.protocol import (
    PROTOCOL,
    VERSION,
    FirstToken,
    GatewayLimits,
    GatewaySpec,
    GatewayStatus,
    GroupCounters,
    GroupRoute,
    Routes,
    RoutesAck,
    RouteTarget,
)
from tests.harness.lines import read_line
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

ROOT = Path(__file__).parents[2]
MESSAGES: Any = [{"role": "user", "content": "tell me"}]


@dataclass
class Gateway:
    """One listening socket, the worker process on it, and the supervisor's connection to it."""

    folder: Path
    stack: AsyncExitStack
    listener: socket.socket
    limits: GatewayLimits
    story: Story = field(default_factory=lambda: Story(24))
    process: subprocess.Popen[bytes] | None = None
    control: RpcClient | None = None
    first_tokens: list[FirstToken] = field(default_factory=list)
    sequence: int = 0
    starts: int = 0
    groups: list[GroupRoute] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def spawn(self) -> None:
        """Start a worker on the socket."""
        self.starts += 1
        instance = f"gateway-0-{self.starts:08x}"
        spec = GatewaySpec(
            instance, str(self.folder / f"{instance}.sock"), self.listener.fileno(), self.limits
        )
        spec_path = self.folder / f"{instance}.json"
        spec_path.write_bytes(msgspec.json.encode(spec))
        with (self.folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "supervisor.gateway", str(spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self.listener.fileno(),),
                start_new_session=True,
                cwd=ROOT,
            )

    async def connect(self) -> GatewayStatus:
        """Connect as the supervisor does."""
        path = self.folder / f"gateway-0-{self.starts:08x}.sock"
        async with asyncio.timeout(20):
            while True:
                try:
                    self.control, raw = await RpcClient.connect(
                        path, Hello(PROTOCOL, VERSION), timeout_s=5, on_event=self._event
                    )
                    break
                except OSError:
                    assert self.process is not None
                    assert self.process.poll() is None, self.log
                    await asyncio.sleep(0.02)
        return msgspec.json.decode(raw, type=GatewayStatus)

    def _event(self, event: Event, _fds: list[int]) -> None:
        if event.name == "first_token":
            self.first_tokens.append(msgspec.json.decode(event.params, type=FirstToken))

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text()

    async def call(self, verb: str, params: object = None) -> msgspec.Raw:
        assert self.control is not None
        raw, fds = await self.control.call(verb, params, timeout_s=5)
        for fd in fds:
            os.close(fd)
        return raw

    async def push(self, *groups: GroupRoute) -> RoutesAck:
        self.sequence += 1
        self.groups = list(groups)
        raw = await self.call("routes", Routes(self.sequence, self.groups))
        return msgspec.json.decode(raw, type=RoutesAck)

    async def route(self, engine: Path | ScriptedEngine | None, epoch: int) -> RoutesAck:
        """Point group `chat` at an engine."""
        return await self.push(GroupRoute("chat", epoch, 2048, target_of(engine, epoch)))

    async def status(self) -> GatewayStatus:
        return msgspec.json.decode(await self.call("status"), type=GatewayStatus)

    async def counters(self, model: str = "chat") -> GroupCounters:
        status = await self.status()
        return next(group for group in status.groups if group.model == model)

    async def until(self, condition: Callable[[GatewayStatus], bool]) -> GatewayStatus:
        async with asyncio.timeout(10):
            while True:
                status = await self.status()
                if condition(status):
                    return status
                await asyncio.sleep(0.01)

    async def engine(self, name: str, script: Script = tell, **settings: float) -> ScriptedEngine:
        path = self.folder / f"{name}.gen"
        engine = ScriptedEngine(path, self.story, script, **settings)
        return await self.stack.enter_async_context(engine)

    def client(self, **settings: Any) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **settings
        )

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


def target_of(engine: Path | ScriptedEngine | None, epoch: int) -> RouteTarget | None:
    if engine is None:
        return None
    path = engine if isinstance(engine, Path) else engine.path
    return RouteTarget(path.stem, str(path), epoch)


def spawn_engine(path: Path, *, tokens: int, delay_s: float) -> subprocess.Popen[bytes]:
    """A scripted engine that can be killed."""
    module = "tests.unit.gateway.scripted"
    return subprocess.Popen(
        [sys.executable, "-m", module, str(path), str(tokens), str(delay_s)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        yield sock


@pytest.fixture
async def gateway(
    tmp_path: Path, listener: socket.socket, request: pytest.FixtureRequest
) -> AsyncIterator[Gateway]:
    bounds = {
        "max_body_bytes": 64 << 10,
        "max_connections": 1000,
        "max_parked": 8,
        "park_timeout_s": 5.0,
        "resume_deadline_s": 5.0,
        "client_timeout_s": 5.0,
        **getattr(request, "param", {}),
    }
    async with AsyncExitStack() as stack:
        gateway = Gateway(tmp_path, stack, listener, GatewayLimits(**bounds))
        stack.callback(gateway.stop)
        gateway.spawn()
        await gateway.connect()
        yield gateway
        if gateway.control is not None:
            gateway.control.close()


async def chat_text(client: AsyncOpenAI, on_chunk: Callable[[int], object] | None = None) -> str:
    """Stream a chat with the real client; returns the text."""
    stream = await client.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
    pieces: list[str] = []
    async for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        if on_chunk is not None:
            on_chunk(len(pieces))
    return "".join(pieces)


# ------------------------------------------------------------------ the API


async def test_the_openai_client_works_unchanged(gateway: Gateway) -> None:
    engine = await gateway.engine("a")
    await gateway.route(engine, 1)
    story = gateway.story
    async with gateway.client() as client:
        models = await client.models.list()
        assert [(model.id, model.object) for model in models.data] == [("chat", "model")]
        assert (await client.models.retrieve("chat")).id == "chat"

        chat = await client.chat.completions.create(model="chat", messages=MESSAGES)
        assert chat.object == "chat.completion"
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].message.content == story.whole
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.total_tokens) == (3, 27)
        assert chat.id.startswith("chatcmpl-")
        assert chat.model == "chat"

        completion = await client.completions.create(model="chat", prompt="tell me")
        assert completion.object == "text_completion"
        assert completion.choices[0].text == story.whole
        assert completion.id.startswith("cmpl-")

        stream = await client.chat.completions.create(
            model="chat", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert {chunk.created for chunk in chunks} == {chunks[0].created}
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == story.whole
        assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 24

        plain = await client.completions.create(
            model="chat", prompt=[1, 2, 3], stream=True, stop=["x"], seed=-1, max_tokens=5
        )
        texts = [chunk.choices[0].text async for chunk in plain]
        assert "".join(texts) == story.whole
        assert all(texts[:-1])
        sent = engine.requests[-1]
        assert (sent.body.prompt, sent.body.stop, sent.body.max_tokens) == ([1, 2, 3], ["x"], 5)
        assert sent.seed == (1 << 63) - 1


async def test_errors_have_openais_shape_and_types(gateway: Gateway) -> None:
    engine = await gateway.engine("a")
    await gateway.route(engine, 1)
    async with gateway.client() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="chat", messages=MESSAGES, n=2)
        assert bad.value.param == "n"

        engine.script = refuse(GenerateError("context_length_exceeded", "too long", 400))
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model="chat", messages=MESSAGES)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")

        engine.script = refuse(GenerateError("queue_full", "busy", 429, retry_after_s=7))
        with pytest.raises(openai.RateLimitError) as busy:
            await client.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        assert busy.value.response.headers["retry-after"] == "7"
    counters = await gateway.counters()
    assert counters.refused == {"400": 2, "429": 1}
    assert (await gateway.counters("")).refused == {"404": 1}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/health", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/chat", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_only_listed_paths_are_served(
    gateway: Gateway, method: str, path: str, status: int, code: str
) -> None:
    await gateway.route(None, 1)
    async with gateway.http() as http:
        response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["content-type"].startswith("application/json")
    assert ("allow" in response.headers) == (status == 405)


async def test_request_ids_are_echoed_but_never_reach_the_engine(gateway: Gateway) -> None:
    engine = await gateway.engine("a")
    await gateway.route(engine, 1)
    body = {"model": "chat", "prompt": "x"}
    async with gateway.http() as http:
        mine = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
        odd = await http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "a b", "Connection": "close"}
        )
    assert mine.headers["x-request-id"] == "mine-1"
    assert odd.headers["x-request-id"] != "a b"
    assert odd.headers["connection"] == "close"
    assert odd.headers["server"] == "understudy"
    ids = {request.request_id for request in engine.requests}
    assert len(ids) == 2
    assert "mine-1" not in ids
    assert odd.headers["x-request-id"] not in ids


async def test_the_batch_engine_has_its_own_model_id(gateway: Gateway) -> None:
    primary, batch = await gateway.engine("a"), await gateway.engine("c")
    await gateway.push(
        GroupRoute(
            "chat", 3, 2048, target_of(primary, 3), has_batch=True, batch=target_of(batch, 1)
        )
    )
    async with gateway.client() as client:
        assert [model.id async for model in client.models.list()] == ["chat", "chat:batch"]
        assert (await client.models.retrieve("chat:batch")).id == "chat:batch"
        answer = await client.completions.create(model="chat:batch", prompt="x")
    assert answer.model == "chat:batch"
    assert (len(primary.requests), len(batch.requests)) == (0, 1)
    assert batch.requests[0].epoch == 1


async def _raw(gateway: Gateway, data: bytes, *, timeout_s: float = 10) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), timeout_s)
    finally:
        writer.close()


async def test_oversized_bodies_are_refused(gateway: Gateway) -> None:
    await gateway.route(None, 1)
    big = b'{"model":"chat","prompt":"' + b"x" * (70 << 10) + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 1000):
            yield big[start : start + 1000]

    async with gateway.http() as http:
        whole = await http.post("/v1/completions", content=big)
        chunked = await http.post("/v1/completions", content=chunks())
    for response in (whole, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on(gateway: Gateway) -> None:
    engine = await gateway.engine("a")
    await gateway.route(engine, 1)
    body = b'{"model":"chat","prompt":"x"}'
    answer = await _raw(
        gateway,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
    )
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"rubbish\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_malformed_requests_get_a_400_and_the_worker_lives(
    gateway: Gateway, data: bytes
) -> None:
    await gateway.route(None, 1)
    answer = await _raw(gateway, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.split(b"\r\n")[0]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    async with gateway.http() as http:
        assert (await http.get("/v1/models")).status_code == 200
    assert "Traceback" not in gateway.log


async def test_old_http_gets_a_plain_body_and_a_closed_connection(gateway: Gateway) -> None:
    engine = await gateway.engine("a")
    await gateway.route(engine, 1)
    body = b'{"model":"chat","prompt":"x","stream":true}'
    answer = await _raw(
        gateway,
        b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body),
    )
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in answer


# ------------------------------------------------------------------ failover


async def test_an_engine_process_killed_in_mid_stream_costs_no_text(gateway: Gateway) -> None:
    gateway.story = Story(400)
    a_path = gateway.folder / "a.gen"
    a = spawn_engine(a_path, tokens=400, delay_s=0.005)
    gateway.stack.callback(a.kill)
    assert a.stdout is not None
    with a, a.stdout:
        assert await asyncio.to_thread(read_line, a.stdout, timeout_s=20) == "ready"
        b = await gateway.engine("b")
        await gateway.route(a_path, 1)
        async with gateway.client() as client:
            killing = chat_text(client, lambda count: a.kill() if count == 20 else None)
            others = [chat_text(client), chat_text(client)]
            tasks = [asyncio.create_task(text) for text in (killing, *others)]
            await asyncio.to_thread(a.wait, 20)
            ack = await gateway.route(b, 2)
            texts = await asyncio.gather(*tasks)
            whole = await client.completions.create(model="chat", prompt="x")

    assert texts == [gateway.story.whole] * 3
    assert whole.choices[0].text == gateway.story.whole
    assert ack.streams_cut <= 3
    assert [(event.group, event.epoch) for event in gateway.first_tokens] == [("chat", 2)]
    counters = await gateway.counters()
    assert (counters.resumed_slot, counters.failed, counters.completed) == (3, 0, 4)


async def torn(engine: ScriptedEngine, line: Line, request: Generate) -> None:
    """End in the middle of a frame."""
    await line.send(
        Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True), engine.story.delta(0, 1, 0)
    )
    frame = encode_frame(engine.story.delta(1, 1, len(engine.story.text(1))))
    await line.send_bytes(frame[:-4])
    await asyncio.sleep(0.02)
    line.drop()


@pytest.mark.parametrize("script", [die_after(5), torn], ids=["end-of-file", "torn-frame"])
async def test_an_end_of_file_without_a_last_frame_is_no_end(
    gateway: Gateway, script: Script
) -> None:
    a, b = await gateway.engine("a", script), await gateway.engine("b")
    await gateway.route(a, 1)
    async with gateway.client() as client:
        task = asyncio.create_task(chat_text(client))
        async with asyncio.timeout(10):
            await a.was_asked.wait()
            await a.lines[0].got_eof.wait()
        await gateway.route(b, 2)
        assert await task == gateway.story.whole
    assert b.requests[0].request_id == a.requests[0].request_id


async def test_a_connection_that_is_reset_in_mid_stream_costs_no_text(gateway: Gateway) -> None:
    """An engine that dies with bytes unread resets its connection instead of ending it."""
    path = gateway.folder / "a.gen"
    with listen_unix(path) as listening:
        listening.settimeout(10)
        b = await gateway.engine("b")
        await gateway.route(path, 1)
        async with gateway.client() as client:
            task = asyncio.create_task(chat_text(client))
            connection, _ = await asyncio.to_thread(listening.accept)
            frames = (Accepted(PROMPT_IDS, 1, "fresh", exact=True), gateway.story.delta(0, 3, 0))
            connection.sendall(b"".join(encode_frame(frame) for frame in frames))
            await gateway.until(lambda status: any(g.tokens for g in status.groups))
            connection.close()  # the request was never read
            await gateway.route(b, 2)
            assert await task == gateway.story.whole
    assert b.requests[0].resume is not None
    assert b.requests[0].resume.token_ids == gateway.story.ids[:3]


@pytest.mark.parametrize("told", [0, 3])
async def test_what_an_engine_ends_for_good_is_executed_once(gateway: Gateway, told: int) -> None:
    """An engine that says "not resumable" has the last word: nobody else is asked."""

    async def fail(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if told:
            accepted = Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True)
            await line.send(accepted, engine.story.delta(0, told, 0))
        await line.send(GenerateError("superseded", "it cannot be done again", status=500))

    a, b = await gateway.engine("a", fail), await gateway.engine("b")
    await gateway.route(a, 1)
    async with gateway.client() as client:
        with pytest.raises(openai.APIError):
            await chat_text(client)
        await gateway.route(b, 2)
        assert await chat_text(client) == gateway.story.whole, "the next request, not that one"
    await gateway.until(lambda status: not any(g.streams_open for g in status.groups))
    assert len(a.requests) == len(b.requests) == 1
    assert a.requests[0].request_id != b.requests[0].request_id


async def test_a_request_without_streaming_is_protected_too(gateway: Gateway) -> None:
    a, b = await gateway.engine("a", die_after(7)), await gateway.engine("b")
    await gateway.route(a, 1)
    async with gateway.client() as client:
        task = asyncio.create_task(client.completions.create(model="chat", prompt="x"))
        async with asyncio.timeout(10):
            await a.was_asked.wait()
            await a.lines[0].got_eof.wait()
        await gateway.route(b, 2)
        answer = await task
    assert answer.choices[0].text == gateway.story.whole
    assert b.requests[0].resume is not None


@pytest.mark.parametrize("gateway", [{"resume_deadline_s": 0.3}], indirect=True)
async def test_a_stream_that_cannot_go_on_ends_with_an_error_event(gateway: Gateway) -> None:
    a = await gateway.engine("a", die_after(4))
    await gateway.route(a, 1)
    text = ""
    async with (
        gateway.http() as http,
        http.stream(
            "POST", "/v1/completions", json={"model": "chat", "prompt": "x", "stream": True}
        ) as response,
    ):
        async for line in response.aiter_lines():
            if not text:
                await gateway.route(None, 1)
            text += line + "\n"
    last = text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "resume_deadline_exceeded")
    assert "[DONE]" not in text
    assert (await gateway.counters()).failed == 1


async def test_the_openai_client_raises_on_the_error_event(gateway: Gateway) -> None:
    async def poison(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        await line.send(
            Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True),
            engine.story.delta(0, 1, 0),
            GenerateError("poison", "this request ended three engines", 500),
        )

    a = await gateway.engine("a", poison)
    await gateway.route(a, 1)
    async with gateway.client() as client:
        with pytest.raises(openai.APIError) as caught:
            await chat_text(client)
    assert caught.value.code == "poison"


async def test_requests_park_while_nobody_serves(gateway: Gateway) -> None:
    a = await gateway.engine("a")
    await gateway.route(None, 1)
    async with gateway.client() as client:
        task = asyncio.create_task(chat_text(client))
        await gateway.until(lambda status: status.groups[1].parked == 1)
        await gateway.route(a, 2)
        assert await task == gateway.story.whole
    assert (await gateway.counters()).parked == 0


@pytest.mark.parametrize("gateway", [{"max_parked": 1, "park_timeout_s": 0.5}], indirect=True)
async def test_parking_is_bounded_in_number_and_time(gateway: Gateway) -> None:
    await gateway.route(None, 1)
    body = {"model": "chat", "prompt": "x"}
    async with gateway.http() as http:
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        await gateway.until(lambda status: status.groups[1].parked == 1)
        second = await http.post("/v1/completions", json=body)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        answer = await first
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_table_with_an_older_epoch_is_refused(gateway: Gateway) -> None:
    a = await gateway.engine("a")
    await gateway.route(a, 5)
    with pytest.raises(Exception, match="epoch 4 is older"):
        await gateway.route(None, 4)
    status = await gateway.status()
    assert (status.epochs, status.sequence) == ({"chat": 5}, 1)


# ------------------------------------------------------------------- clients


async def test_a_client_that_hangs_up_cancels_at_the_engine(gateway: Gateway) -> None:
    a = await gateway.engine("a", delay_s=0.01)
    gateway.story.ids.extend(range(10_000, 12_000))
    await gateway.route(a, 1)
    async with (
        gateway.http() as http,
        http.stream(
            "POST", "/v1/completions", json={"model": "chat", "prompt": "x", "stream": True}
        ) as response,
    ):
        async for _line in response.aiter_lines():
            break
    await asyncio.wait_for(a.lines[0].got_eof.wait(), 5)
    assert a.lines[0].got_cancel
    counters = await gateway.counters()
    assert (counters.cancelled, counters.streams_open) == (1, 0)


async def test_a_client_that_hangs_up_while_parked_frees_its_place(gateway: Gateway) -> None:
    await gateway.route(None, 1)
    body = b'{"model":"chat","prompt":"x"}'
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    await gateway.until(lambda status: status.groups[1].parked == 1)
    writer.close()
    status = await gateway.until(lambda status: status.groups[1].parked == 0)
    assert status.groups[1].cancelled == 1


async def _flood(engine: ScriptedEngine, line: Line, request: Generate) -> None:
    await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True))
    piece = "x" * 1000
    for index in range(60_000):
        await line.send(Delta(index, [index], piece, 1000 * (index + 1)))
    await line.send(End("length", Usage(3, 60_000)))


@pytest.mark.parametrize("gateway", [{"client_timeout_s": 2.0}], indirect=True)
async def test_a_slow_reader_costs_bounded_memory_and_is_cut_off_in_the_end(
    gateway: Gateway,
) -> None:
    a = await gateway.engine("a", _flood)
    await gateway.route(a, 1)
    worker = psutil.Process(gateway.pid)
    async with gateway.http() as http:
        await http.get("/v1/models")
    before_bytes = worker.memory_info().rss
    body = b'{"model":"chat","prompt":"x","stream":true}'
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    await asyncio.wait_for(reader.readline(), 10)
    await gateway.until(lambda status: status.groups[1].cancelled == 1)
    assert worker.memory_info().rss - before_bytes < 8 << 20
    assert (await gateway.counters()).tokens < 30_000
    await asyncio.wait_for(a.lines[0].got_eof.wait(), 5)
    assert a.lines[0].got_cancel
    writer.close()


async def test_idle_connections_do_not_disturb_others(gateway: Gateway) -> None:
    a = await gateway.engine("a")
    await gateway.route(a, 1)
    idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(500)]
    await gateway.until(lambda status: status.connections >= 500)
    async with gateway.client() as client:
        assert await chat_text(client) == gateway.story.whole
    for _, writer in idle:
        writer.close()
    await gateway.until(lambda status: status.connections == 0)


@pytest.mark.parametrize("gateway", [{"max_connections": 2}], indirect=True)
async def test_above_the_bound_connections_wait_instead_of_being_refused(
    gateway: Gateway,
) -> None:
    await gateway.route(None, 1)
    idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
    await gateway.until(lambda status: status.connections == 2)
    async with gateway.http() as http:
        task = asyncio.create_task(http.get("/v1/models"))
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done
        idle[0][1].close()
        assert (await task).status_code == 200
    idle[1][1].close()


# ---------------------------------------------------------------------- life


async def test_a_killed_worker_is_replaced_and_nobody_is_refused(gateway: Gateway) -> None:
    a = await gateway.engine("a")
    await gateway.route(a, 1)
    gateway.stop()

    async with gateway.client() as client:
        task = asyncio.create_task(chat_text(client))  # nobody accepts yet
        await asyncio.sleep(0.1)
        gateway.spawn()
        await gateway.connect()
        await gateway.route(a, 1)
        assert await task == gateway.story.whole


async def test_the_worker_serves_on_without_its_supervisor(gateway: Gateway) -> None:
    a = await gateway.engine("a")
    await gateway.route(a, 1)
    assert gateway.control is not None
    gateway.control.close()
    async with gateway.client() as client:
        assert await chat_text(client) == gateway.story.whole
    status = await gateway.connect()
    assert (status.sequence, status.epochs) == (1, {"chat": 1})


async def test_the_listening_socket_is_handed_out(gateway: Gateway) -> None:
    assert gateway.control is not None
    _, fds = await gateway.control.call("listener", timeout_s=5)
    with socket.socket(fileno=fds[0]) as copy:
        assert copy.getsockname() == gateway.listener.getsockname()


@pytest.mark.parametrize("way", ["drain", "sigterm"])
async def test_draining_finishes_streams_and_exits_with_0(gateway: Gateway, way: str) -> None:
    a = await gateway.engine("a", delay_s=0.02)
    await gateway.route(a, 1)
    assert gateway.process is not None
    async with gateway.client() as client, gateway.http() as idle:
        await idle.get("/v1/models")
        started = asyncio.Event()
        task = asyncio.create_task(chat_text(client, lambda _count: started.set()))
        await started.wait()
        if way == "drain":
            await gateway.call("drain")
        else:
            gateway.process.send_signal(signal.SIGTERM)
        assert await task == gateway.story.whole
        assert await asyncio.to_thread(gateway.process.wait, 10) == 0


async def test_a_second_sigterm_ends_at_once_and_tells_the_engine(gateway: Gateway) -> None:
    gateway.story = Story(5000)
    a = await gateway.engine("a", delay_s=0.02)
    await gateway.route(a, 1)
    assert gateway.process is not None
    async with gateway.client() as client:
        started = asyncio.Event()
        task = asyncio.create_task(chat_text(client, lambda _count: started.set()))
        await started.wait()
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.until(lambda status: status.draining)
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.process.wait, 10) == 0
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await task
    await asyncio.wait_for(a.lines[0].got_eof.wait(), 5)
    assert a.lines[0].got_cancel
