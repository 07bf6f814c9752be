"""An engine that is known by its HTTP API only: health, counters, and a known answer.

Works with whatever serves `/health`, a Prometheus `/metrics` and OpenAI's `/v1/completions`, over
TCP or a Unix socket.

Invariants
    1. Every question has a deadline, and its answer a bound.
    2. No answer, 4xx, 429 and 503 are no statement about the engine: a full queue is not an
       illness. Only a 200 with another text than the known one is a wrong answer.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from cache.wire import unix_address
from engines.command.counters import EngineCounters, read_counters

__all__ = ["HttpEngine"]

_OK: Final = 200
_MAX_PAGE_BYTES: Final = 8 << 20
_CANARY_TOKENS: Final = 4
_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 600.0
"""As long as the gateway bears silence: a request may wait in a queue for minutes."""


@dataclass(frozen=True, slots=True)
class HttpEngine:
    """Where an engine answers."""

    base_url: str  # `http://127.0.0.1:8001`, or any host with `socket`
    socket: Path | None = None

    async def counters(self, *, timeout_s: float) -> EngineCounters | None:
        """Its counters now; None when no page came, or none that is understood."""
        answer = await self._ask("GET", "/metrics", None, timeout_s)
        if answer is None or answer[0] != _OK:
            return None
        return read_counters(answer[1].decode("utf-8", errors="replace"))

    async def is_healthy(self, *, timeout_s: float) -> bool | None:
        """True for 200, False for any other status, None when there was no answer in time."""
        answer = await self._ask("GET", "/health", None, timeout_s)
        return None if answer is None else answer[0] == _OK

    async def model_id(self, *, timeout_s: float) -> str | None:
        """The first model that it serves; None when it does not say."""
        answer = await self._ask("GET", "/v1/models", None, timeout_s)
        if answer is None or answer[0] != _OK:
            return None
        try:
            name = json.loads(answer[1])["data"][0]["id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) else None

    @asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer comes in pieces, for as long as it takes.

        Raises:
            aiohttp.ClientError, OSError: there is no answer, or it breaks off.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        with self._connector() as connector:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=limit) as session,
                session.post(self.base_url + path, json=body, allow_redirects=False) as response,
            ):
                yield response

    @contextmanager
    def _connector(self) -> Iterator[aiohttp.BaseConnector]:
        if self.socket is None:
            yield aiohttp.TCPConnector(force_close=True)
            return
        with unix_address(self.socket) as address:
            yield aiohttp.UnixConnector(path=address, force_close=True)

    async def ask(
        self, model: str, prompt: str, *, timeout_s: float
    ) -> tuple[int | None, str | None]:
        """Status and text of the greedy answer to a prompt.

        No status when no answer came, no text when it is none.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": _CANARY_TOKENS,
            "temperature": 0,
            "seed": 0,
        }
        answer = await self._ask("POST", "/v1/completions", body, timeout_s)
        if answer is None:
            return None, None
        status, data = answer
        return status, _text_of(data) if status == _OK else None

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes] | None:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            with self._connector() as connector:
                return await _request(connector, limit, method, self.base_url + path, body)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None


async def _request(
    connector: aiohttp.BaseConnector,
    limit: aiohttp.ClientTimeout,
    method: str,
    url: str,
    body: dict[str, Any] | None,
) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(connector=connector, timeout=limit) as session,
        session.request(method, url, json=body) as response,
    ):
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > _MAX_PAGE_BYTES:
                raise aiohttp.ClientPayloadError("the answer is too long")
        return response.status, bytes(data)


def _text_of(data: bytes) -> str | None:
    """The text of a completion; None when it is none."""
    try:
        answer = json.loads(data)
        text = answer["choices"][0]["text"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else None
