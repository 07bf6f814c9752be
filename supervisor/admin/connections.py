"""Bounds on connections: how many there may be, and how long one may stay silent.

aiohttp limits neither the number of connections nor the time that a client takes for its headers.
This stands between the transport and aiohttp's own protocol, passes everything through, and closes
a connection that is in no request for `idle_timeout_s`: that is also the time for the headers of a
request, and for a client to take its answer.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import msgspec
from aiohttp import web

from supervisor.admin.problems import CONTENT_TYPE, LimitReachedError, problem_of

__all__ = ["Connections"]

Factory = Callable[[], asyncio.Protocol]


class Connections:
    """All connections of one listener."""

    def __init__(self, *, limit: int, idle_timeout_s: float) -> None:
        self._limit = limit
        self._idle_timeout_s = idle_timeout_s
        self._open: dict[asyncio.BaseProtocol, _Guarded] = {}  # by aiohttp's protocol

    def __len__(self) -> int:
        return len(self._open)

    def factory(self, make_inner: Factory) -> Factory:
        """A protocol factory for `create_server` around aiohttp's."""
        return lambda: _Guarded(self, make_inner)

    def request_started(self, request: web.Request) -> None:
        """The headers are complete: the handler's own deadlines count now."""
        if (guarded := self._open.get(request.protocol)) is not None:
            guarded.stop_clock()

    def request_finished(self, request: web.Request) -> None:
        """The answer is made: time runs for taking it, and for the next request."""
        if (guarded := self._open.get(request.protocol)) is not None:
            guarded.start_clock(self._idle_timeout_s)

    def admit(self, inner: asyncio.BaseProtocol, guarded: "_Guarded") -> bool:
        """Whether there is room; if so, the clock of the first request starts."""
        if len(self._open) >= self._limit:
            return False
        self._open[inner] = guarded
        guarded.start_clock(self._idle_timeout_s)
        return True

    def forget(self, inner: asyncio.BaseProtocol) -> None:
        """The connection is closed."""
        self._open.pop(inner, None)


class _Guarded(asyncio.Protocol):
    """One connection: passes everything to aiohttp's protocol, if it was admitted."""

    def __init__(self, connections: Connections, make_inner: Factory) -> None:
        self._connections = connections
        self._inner = make_inner()
        self._is_admitted = False
        self._transport: asyncio.Transport | None = None
        self._clock: asyncio.TimerHandle | None = None

    def start_clock(self, timeout_s: float) -> None:
        """Close the connection unless a request begins in time."""
        self.stop_clock()
        if self._transport is not None:
            loop = asyncio.get_running_loop()
            self._clock = loop.call_later(timeout_s, self._transport.abort)

    def stop_clock(self) -> None:
        """A request is under way, or the connection is gone."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are no subclass of asyncio's, only alike.
        self._transport = transport = cast("asyncio.Transport", transport)
        self._is_admitted = self._connections.admit(self._inner, self)
        if self._is_admitted:
            self._inner.connection_made(transport)
        else:
            transport.write(_REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_clock()
        self._transport = None
        if self._is_admitted:
            self._connections.forget(self._inner)
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_admitted:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_admitted else None

    def pause_writing(self) -> None:
        if self._is_admitted:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._is_admitted:
            self._inner.resume_writing()


def _refusal() -> bytes:
    error = LimitReachedError("too many connections to the admin API", hint="close some")
    body = msgspec.json.encode(problem_of(error))
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL: Final = _refusal()
