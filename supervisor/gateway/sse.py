"""Sinks: where the text of an answer goes, as it comes or all at once.

Invariants
    1. Nothing is sent before the first text (or the end), so a request that fails before it gets
       an ordinary HTTP error.
    2. Each text leaves as one event at once.
    3. A client that takes nothing for `client_timeout_s` is cut off.
"""

import asyncio
from typing import Final

from aiohttp import web

from engines.contract import End
from supervisor.gateway.errors import ApiError
from supervisor.gateway.responses import Answer, event

__all__ = ["ClientGoneError", "SseSink", "TextSink", "send_whole"]

_SSE_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # reverse proxies would collect events otherwise
}


class ClientGoneError(ConnectionError):
    """The client took nothing for too long and was cut off."""


async def send_whole(
    request: web.BaseRequest, response: web.Response, *, timeout_s: float
) -> web.Response:
    """Send a complete response, with a deadline.

    Raises:
        ConnectionError: the client is gone, or does not take it.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        raise _cut_off(request, timeout_s) from None
    return response


def _cut_off(request: web.BaseRequest, timeout_s: float) -> ClientGoneError:
    if request.transport is not None:
        request.transport.abort()
    return ClientGoneError(f"the client took nothing for {timeout_s:g} s")


class TextSink:
    """Collects the text of an answer; its size is bounded by the engine's slot."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    async def text(self, text: str) -> None:
        """Keep a piece."""
        self._pieces.append(text)

    def restart(self) -> bool:
        """Forget everything: the client has not got a byte of it."""
        self._pieces.clear()
        return True

    @property
    def whole(self) -> str:
        """Everything so far."""
        return "".join(self._pieces)


class SseSink:
    """Server-sent events to one client."""

    def __init__(
        self,
        request: web.BaseRequest,
        answer: Answer,
        *,
        headers: dict[str, str],
        timeout_s: float,
    ) -> None:
        self._request = request
        self._answer = answer
        self._timeout_s = timeout_s
        self.response = web.StreamResponse(headers={**_SSE_HEADERS, **headers})
        self.is_open = False

    async def text(self, text: str) -> None:
        """Send a chunk.

        Raises:
            ConnectionError: the client is gone, or takes nothing.
        """
        await self._write(self._answer.text(text))

    def restart(self) -> bool:
        """Whether the answer may begin anew: not once the client has got some of it."""
        return not self.is_open

    async def finish(self, end: End) -> None:
        """Send the last chunks; after it the caller returns the response."""
        await self._write(self._answer.closing(end), is_last=True)

    async def fail(self, error: ApiError) -> None:
        """End an open stream with an error event, so that nobody takes it for complete."""
        await self._write(event(error.body), is_last=True)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.is_open:
                    await self.response.prepare(self._request)
                    self.is_open = True
                    data = self._answer.opening() + data
                await self.response.write(data)
                if is_last:
                    await self.response.write_eof()
                else:
                    await self._request.writer.drain()
        except TimeoutError:
            raise _cut_off(self._request, self._timeout_s) from None
