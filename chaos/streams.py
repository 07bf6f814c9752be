"""Many streaming requests at once: each chunk with the moment it arrived, as a client saw it.

A fleet runs in a thread of its own with its own event loop, so that a script can kill processes
in the middle. Two transports: `sse` reads the bytes and parses them afterwards (the load must
not disturb what it measures); `openai` is the official client, as users run it.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

import aiohttp
import openai

from cache.errors import DeadlineExceededError, UnderstudyError

__all__ = [
    "BrokenStreamError",
    "StreamFleet",
    "StreamRecord",
    "StreamRequest",
    "Transport",
    "make_requests",
    "parse_sse",
    "read_openai",
]

Transport = Literal["sse", "openai"]

_TIMEOUT_S: Final = 180.0
_OPENINGS: Final = (
    "Once upon a time there was",
    "The capital of the old kingdom",
    "She opened the letter and read",
    "In the middle of the night",
    "It is a truth that everybody knows",
    "The captain looked at the sea",
    "Nobody in the village remembered",
    "Early in the spring they went",
)


class BrokenStreamError(UnderstudyError):
    """A client noticed something: an error, a missing end, or a text that is not the right one."""

    code = "chaos_broken_stream"


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One completion request that gives the same text whenever it is run."""

    name: str
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    model: str = "chat"
    top_k: int = 0  # 0: off

    def body(self) -> dict[str, Any]:
        """The request as the OpenAI API takes it; `ignore_eos` and `top_k` are extensions."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "top_k": self.top_k,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


@dataclass(slots=True)
class StreamRecord:
    """What one client saw. Filled by the fleet's thread; read it when the fleet is done."""

    request: StreamRequest
    started_ns: int = 0
    arrivals_ns: list[int] = field(default_factory=list)  # CLOCK_MONOTONIC, one per chunk of text
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    has_end_mark: bool = False
    ended_ns: int = 0
    error: str | None = None

    @property
    def text(self) -> str:
        """All text that arrived."""
        return "".join(self.texts)

    def add(self, payload: dict[str, Any], arrived_ns: int) -> None:
        """Take one SSE payload or client chunk."""
        if "error" in payload:
            self.error = json.dumps(payload["error"])
        usage = payload.get("usage")
        if usage:
            self.completion_tokens = usage["completion_tokens"]
        for choice in payload.get("choices", ()):
            if choice.get("text"):
                self.texts.append(choice["text"])
                self.arrivals_ns.append(arrived_ns)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def make_requests(count: int, *, max_tokens: int, seed: int = 1) -> list[StreamRequest]:
    """Half greedy, half at temperature 1 with seeds of their own."""
    return [
        StreamRequest(
            name=f"{'greedy' if index % 2 == 0 else 'sampled'}-{index}",
            prompt=f"{_OPENINGS[index % len(_OPENINGS)]} {index + 1}",
            max_tokens=max_tokens,
            temperature=0.0 if index % 2 == 0 else 1.0,
            seed=seed * 1000 + index,
        )
        for index in range(count)
    ]


class StreamFleet:
    """Runs requests at once and records what arrives. A context manager around one run."""

    def __init__(
        self,
        base_url: str,
        requests: Iterable[StreamRequest],
        *,
        transport: Transport = "sse",
        spacing_s: float = 0.0,
    ) -> None:
        """`spacing_s` is the time between the starts of two streams."""
        self.records = [StreamRecord(request) for request in requests]
        self._base_url = base_url
        self._transport = transport
        self._spacing_s = spacing_s
        self._received = dict.fromkeys((r.request.name for r in self.records), 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stream-fleet", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(timeout=10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._main is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout=30)

    @property
    def is_done(self) -> bool:
        """Whether every stream has ended, well or not."""
        return not self._thread.is_alive()

    def wait_tokens(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Wait until every stream has got `count` chunks.

        Raises:
            DeadlineExceededError: some stream is slower.
            BrokenStreamError: some stream has already failed.
        """
        deadline = time.monotonic() + timeout_s
        while min(self._received.values()) < count:
            broken = [r for r in self.records if r.error is not None]
            if self._failure is not None:
                raise self._failure
            if broken or self.is_done:
                reasons = "; ".join(f"{r.request.name}: {r.error}" for r in broken)
                raise BrokenStreamError(f"streams ended before {count} chunks: {reasons}")
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"{count} chunks on every stream", timeout_s=timeout_s)
            time.sleep(0.002)

    def wait_done(self, *, timeout_s: float = _TIMEOUT_S) -> list[StreamRecord]:
        """Wait for the end of all streams and return their records.

        Raises:
            DeadlineExceededError: some stream has not ended.
        """
        self._thread.join(timeout=timeout_s)
        if not self.is_done:
            raise DeadlineExceededError("the end of every stream", timeout_s=timeout_s)
        if self._failure is not None:
            raise self._failure
        return self.records

    def _run(self) -> None:
        try:
            asyncio.run(self._run_all())
        except asyncio.CancelledError:
            pass  # left early, by __exit__
        except BaseException as error:  # noqa: BLE001 -- raised again by wait_done, in the caller
            self._failure = error

    async def _run_all(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._started.set()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        client = openai.AsyncOpenAI(
            base_url=self._base_url, api_key="unused", max_retries=0, timeout=_TIMEOUT_S
        )
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        async with client, session, asyncio.TaskGroup() as group:
            for record in self.records:
                if self._transport == "sse":
                    group.create_task(self._read_sse(session, record))
                else:
                    group.create_task(self._read_openai(client, record))
                if self._spacing_s:
                    await asyncio.sleep(self._spacing_s)

    async def _read_sse(self, session: aiohttp.ClientSession, record: StreamRecord) -> None:
        raw: list[tuple[int, bytes]] = []
        record.started_ns = time.monotonic_ns()
        name = record.request.name
        try:
            url = f"{self._base_url}/completions"
            async with session.post(url, json=record.request.body()) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {await response.text()}"
                    return
                async for data in response.content.iter_any():
                    raw.append((time.monotonic_ns(), data))
                    self._received[name] += data.count(b"data:")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            record.error = repr(error)
        finally:
            record.ended_ns = time.monotonic_ns()
            parse_sse(record, raw)

    async def _read_openai(self, client: openai.AsyncOpenAI, record: StreamRecord) -> None:
        record.started_ns = time.monotonic_ns()
        name = record.request.name

        def count() -> None:
            self._received[name] += 1

        try:
            await read_openai(client, record, on_chunk=count)
        finally:
            record.ended_ns = time.monotonic_ns()


async def read_openai(
    client: openai.AsyncOpenAI, record: StreamRecord, *, on_chunk: Callable[[], None]
) -> None:
    """Run one request with the official client; what it raises becomes the record's error."""
    body = record.request.body()
    extra = {name: body.pop(name) for name in ("ignore_eos", "top_k")}
    try:
        stream = await client.completions.create(**body, extra_body=extra)
        async for chunk in stream:
            record.add(chunk.model_dump(), time.monotonic_ns())
            on_chunk()
        record.has_end_mark = True  # the client hides `[DONE]`; it ends at it
    except Exception as error:  # noqa: BLE001 -- it lets errors of its transport library through
        record.error = repr(error)


def parse_sse(record: StreamRecord, raw: Sequence[tuple[int, bytes]]) -> None:
    """Cut what arrived into events; an event's moment is that of its last byte."""
    buffer = b""
    for arrived_ns, data in raw:
        buffer += data
        *events, buffer = buffer.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue
                payload = line.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    record.has_end_mark = True
                else:
                    record.add(json.loads(payload), arrived_ns)
