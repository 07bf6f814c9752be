"""Server-sent events: the event log as a stream that a client can resume by `Last-Event-ID`."""

import asyncio
import json
from typing import Any, Final

from aiohttp import web

from supervisor.admin.problems import BadRequestError, LimitReachedError
from supervisor.observe.events import EventLog, Subscription

__all__ = ["EventStreams", "encode_event"]

_HEARTBEAT: Final = b": nothing new\n\n"
MAX_STREAMS: Final = 32
HEARTBEAT_S: Final = 10.0
"""A comment when nothing happens: proxies and clients see that the stream lives."""
WRITE_TIMEOUT_S: Final = 10.0
"""A client that takes nothing for so long is cut off; it can resume where it was."""


class EventStreams:
    """All open streams; they end when their client, the log or the server does."""

    def __init__(
        self, log: EventLog, *, limit: int = MAX_STREAMS, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._log = log
        self._limit = limit
        self._heartbeat_s = heartbeat_s
        self._open: set[Subscription] = set()
        self._closed = False

    async def serve(self, request: web.Request, since: int | None) -> web.StreamResponse:
        """Send events until somebody leaves.

        Raises:
            LimitReachedError: too many streams are open.
            BadRequestError: `Last-Event-ID` is no number.
        """
        if self._closed or len(self._open) >= self._limit:
            raise LimitReachedError(f"{self._limit} event streams are open", hint="close some")
        subscription = self._log.subscribe(after=_start(request, since))
        self._open.add(subscription)
        try:
            return await self._send(request, subscription)
        finally:
            self._open.discard(subscription)
            subscription.close()

    def close(self) -> None:
        """End all streams; their clients resume elsewhere or later."""
        self._closed = True
        for subscription in list(self._open):
            subscription.close()

    async def _send(self, request: web.Request, subscription: Subscription) -> web.StreamResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        await response.prepare(request)
        try:
            await _write(response, b"retry: 1000\n\n")
            skipped = 0
            while (event := await self._next(subscription)) is not None:
                if subscription.skipped > skipped:
                    lost = subscription.skipped - skipped
                    skipped = subscription.skipped
                    await _write(
                        response, f'event: skipped\ndata: {{"skipped":{lost}}}\n\n'.encode()
                    )
                await _write(response, encode_event(event) if event else _HEARTBEAT)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:  # gone, or takes nothing: there is nobody to tell
                request.transport.abort()
        return response

    async def _next(self, subscription: Subscription) -> dict[str, Any] | None:
        """The next event, {} for a heartbeat, None at the end."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                return await anext(subscription)
        except TimeoutError:
            return {}
        except StopAsyncIteration:
            return None


def _start(request: web.Request, since: int | None) -> int | None:
    """Behind which event to begin; a reconnecting client's own count comes first."""
    given = request.headers.get("Last-Event-ID", "").strip()
    if not given:
        return since
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise BadRequestError(f"Last-Event-ID {given[:40]!r} is no event number")
    return int(given)


def encode_event(event: dict[str, Any]) -> bytes:
    """One event as a block of the stream."""
    data = json.dumps(event, separators=(",", ":"))  # ASCII: no line break of any kind inside
    return f"id: {event['seq']}\ndata: {data}\n\n".encode()


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.write(data)
