"""Open-loop load: streams arrive at their own rate, however slow the system is.

Closed-loop clients hide an outage by not asking; here an arrival never waits for an answer. Each
stream is a real HTTP client that reads Server-Sent Events; every eighth is the official `openai`
package. Which request arrives when follows from the seed alone.
"""

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import openai

from cache.errors import DeadlineExceededError
from chaos.history import Stream
from chaos.streams import StreamRecord, StreamRequest, Transport, parse_sse, read_openai

__all__ = ["LoadProfile", "OpenLoad"]

_TIMEOUT_S: Final = 240.0
_OPENAI_EVERY: Final = 8
_MAX_OPEN: Final = 400
"""A bound for this process. More streams than that mean that nobody is served: see the record."""


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """How many streams arrive."""

    streams_per_s: float
    seed: int = 1


class _Client:
    """One stream under way."""

    def __init__(self, name: str, request: StreamRequest, transport: Transport) -> None:
        self.record = StreamRecord(request)
        self.name = name
        self.transport = transport
        self.raw: list[tuple[int, bytes]] = []
        self.chunks = 0
        self.last_ns = 0
        self.left_ns = 0
        self.task: asyncio.Task[None] | None = None
        self.response: aiohttp.ClientResponse | None = None

    def entry(self) -> Stream:
        """As the record keeps it."""
        record = self.record
        if self.raw and not record.texts:
            parse_sse(record, self.raw)
        return Stream(
            name=self.name,
            request=record.request.name,
            transport=self.transport,
            started_ns=record.started_ns,
            ended_ns=record.ended_ns,
            arrivals_ns=record.arrivals_ns,
            texts=record.texts,
            finish_reason=record.finish_reason,
            completion_tokens=record.completion_tokens,
            has_end_mark=record.has_end_mark,
            error=record.error,
            left_ns=self.left_ns,
        )


class OpenLoad:
    """Runs in a thread of its own; the scenario's thread tells it to begin and to end."""

    def __init__(
        self,
        base_url: str,
        pool: Sequence[StreamRequest],
        *,
        on_done: Callable[[Stream], None],
    ) -> None:
        self._base_url = base_url
        self.pool: Sequence[StreamRequest] = list(pool)  # what arrivals are drawn from
        self._on_done = on_done
        self._clients: dict[str, _Client] = {}
        self._count = 0
        self._arrivals: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def open(self) -> None:
        """Start the thread; nothing arrives before `start`.

        Raises:
            DeadlineExceededError: the thread did not come up.
        """
        self._thread.start()
        if not self._ready.wait(timeout=30):
            raise DeadlineExceededError("the load generator", timeout_s=30)

    def start(self, profile: LoadProfile) -> None:
        """Let streams arrive from now on, instead of what arrived before."""
        self._call(self._start, profile)

    def pause(self) -> None:
        """No new arrivals; what runs goes on."""
        self._call(self._pause)

    def submit(self, request: StreamRequest) -> str:
        """One stream now, beside all others; its name."""
        self._count += 1
        name = f"{request.name}#{self._count}"
        self._call(self._begin, name, request, "sse")
        return name

    def drain(self, *, timeout_s: float) -> None:
        """No new arrivals, and wait until every stream has ended.

        Raises:
            DeadlineExceededError: some stream has not ended.
        """
        self.pause()
        deadline = time.monotonic() + timeout_s
        while self.open_streams:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"the end of {self.open_streams} streams", timeout_s=timeout_s
                )
            time.sleep(0.01)

    def leave(self, share: float, *, how: str, seed: int) -> list[str]:
        """Clients go away in the middle: `fin` closes, `rst` resets. Names of those that left."""
        clients = [c for c in list(self._clients.values()) if c.chunks and c.transport == "sse"]
        chosen = [c for c in clients if random.Random(f"{seed}{c.name}").random() < share]
        for client in chosen:
            self._call(self._leave, client, how)
        return [client.name for client in chosen]

    def close(self) -> None:
        """End everything; streams under way are recorded as far as they came."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=30)

    @property
    def open_streams(self) -> int:
        """How many streams have not ended."""
        return len(self._clients)

    @property
    def flowing_streams(self) -> int:
        """How many streams have got a chunk and have not ended."""
        return sum(1 for client in list(self._clients.values()) if client.chunks)

    def local_ports(self) -> dict[str, int]:
        """TCP port of each stream's client, as far as it is known."""
        found = {}
        for client in list(self._clients.values()):
            connection = client.response.connection if client.response is not None else None
            transport = connection.transport if connection is not None else None
            if transport is not None:
                found[client.name] = int(transport.get_extra_info("sockname")[1])
        return found

    def longest_silence_s(self) -> float:
        """Longest time since the last chunk, over streams that have got one; 0 for none."""
        now_ns = time.monotonic_ns()
        lasts = [c.last_ns for c in list(self._clients.values()) if c.chunks]
        return max(((now_ns - last) / 1e9 for last in lasts), default=0.0)

    def chunks_of(self, name: str) -> int | None:
        """Chunks that a stream has got; None once it has ended."""
        client = self._clients.get(name)
        return client.chunks if client is not None else None

    # ------------------------------------------------------------- in the thread

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None  # noqa: S101 - `open` was called
        self._loop.call_soon_threadsafe(what, *arguments)

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        # No connection outlives its stream: idle ones would count as leaks of the gateway.
        self._official = openai.AsyncOpenAI(
            base_url=self._base_url, api_key="unused", max_retries=0, timeout=_TIMEOUT_S,
            default_headers={"Connection": "close"},
        )  # fmt: skip
        self._ready.set()
        async with self._session, self._official:
            await self._stop.wait()
            self._pause()
            tasks = [c.task for c in self._clients.values() if c.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, profile: LoadProfile) -> None:
        self._pause()
        self._arrivals = asyncio.get_running_loop().create_task(self._arrive(profile))

    def _pause(self) -> None:
        if self._arrivals is not None:
            self._arrivals.cancel()
            self._arrivals = None

    async def _arrive(self, profile: LoadProfile) -> None:
        """Poisson arrivals: exponential gaps, drawn from the seed."""
        chance = random.Random(profile.seed)
        next_s = time.monotonic()
        while True:
            next_s += chance.expovariate(profile.streams_per_s)
            request = chance.choice(self.pool)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            if len(self._clients) >= _MAX_OPEN:
                continue
            self._count += 1
            transport: Transport = "openai" if self._count % _OPENAI_EVERY == 0 else "sse"
            self._begin(f"{request.name}#{self._count}", request, transport)

    def _begin(self, name: str, request: StreamRequest, transport: Transport) -> None:
        client = _Client(name, request, transport)
        client.record.started_ns = time.monotonic_ns()
        self._clients[name] = client
        client.task = asyncio.get_running_loop().create_task(self._serve(client))

    async def _serve(self, client: _Client) -> None:
        record = client.record
        try:
            if client.transport == "openai":
                await read_openai(
                    self._official, record, on_chunk=lambda: self._count_chunk(client)
                )
            else:
                await self._read(client)
            record.ended_ns = time.monotonic_ns()
        except asyncio.CancelledError:
            if client.left_ns:
                record.ended_ns = client.left_ns
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            record.error = repr(error)
            record.ended_ns = time.monotonic_ns()
        finally:
            del self._clients[client.name]
            self._on_done(client.entry())

    async def _read(self, client: _Client) -> None:
        record = client.record
        url = f"{self._base_url}/completions"
        async with self._session.post(url, json=record.request.body()) as response:
            client.response = response
            if response.status != 200:
                record.error = f"HTTP {response.status}: {await response.text()}"
                return
            async for data in response.content.iter_any():
                client.raw.append((time.monotonic_ns(), data))
                self._count_chunk(client)

    @staticmethod
    def _count_chunk(client: _Client) -> None:
        client.chunks += 1
        client.last_ns = time.monotonic_ns()

    def _leave(self, client: _Client, how: str) -> None:
        if client.task is None or client.task.done():
            return
        connection = client.response.connection if client.response is not None else None
        if how == "rst" and connection is not None and connection.transport is not None:
            sock = connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.left_ns = time.monotonic_ns()
        if connection is not None:
            connection.close()
        client.task.cancel()
