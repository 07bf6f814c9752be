"""The generation socket: one connection per request, each a task that relays.

Invariants
    1. Only the primary answers, only to a peer of our own uid, and only at its own epoch.
    2. A gateway that is gone, with or without `Cancel`, ends the request at the server: nobody can
       take it up again.
    3. Nothing is refused silently: every connection ends with a last frame or is cut.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from cache.errors import ProtocolError
from cache.wire import FrameBuffer, encode_frame, listen_unix, peer_uid
from engines.command.relay import Relay, ServerLostError, TooSlowError
from engines.contract import (
    GENERATE_VERSION,
    EngineFrame,
    GatewayFrame,
    Generate,
    GenerateError,
)

__all__ = ["GenerateServer"]

log = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 8 << 20
_MAX_UNSENT_BYTES: Final = 4 << 20
_FIRST_FRAME_S: Final = 10.0
_LAST_FRAME_S: Final = 30.0
_CHUNK_BYTES: Final = 256 << 10
_BACKLOG: Final = 512

_decoder: Final = msgspec.json.Decoder(GatewayFrame)

Gate = Callable[[Generate], GenerateError | None]
"""Says why a request is not served here now; None: it is."""


class GenerateServer:
    """Accepts connections and keeps count of them."""

    def __init__(self, path: Path, relay: Relay, gate: Gate, *, max_open: int) -> None:
        self._path = path
        self._relay = relay
        self._gate = gate
        self._max_open = max_open
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.open_requests = 0

    async def start(self) -> None:
        """Bind and accept."""
        self._server = await asyncio.start_unix_server(
            self._accept, sock=listen_unix(self._path, backlog=_BACKLOG)
        )

    @property
    def unfinished(self) -> int:
        """Connections whose last frame nobody has taken yet, and those before their first."""
        return len(self._tasks)

    def cut_all(self) -> None:
        """End every request: the role is gone."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop accepting and end every request."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        self.cut_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if peer_uid(writer.get_extra_info("socket")) != os.getuid():
                return
            peer = _Peer(reader, writer)
            await self._request(peer)
            async with asyncio.timeout(_LAST_FRAME_S):
                await writer.drain()
                await peer.wait_gone()  # it hangs up once it has taken the last frame
                writer.close()
                await writer.wait_closed()
        except TooSlowError:
            log.warning("cutting a gateway that does not read")
        except ServerLostError as error:
            log.warning("the server did not answer to the end: %s", error)
        except (OSError, TimeoutError) as error:
            log.debug("a gateway has gone: %s", error)
        except Exception:
            log.exception("a request failed")
        finally:
            writer.transport.abort()  # without effect behind an orderly close

    async def _request(self, peer: "_Peer") -> None:
        try:
            async with asyncio.timeout(_FIRST_FRAME_S):
                frame = await peer.next_frame()
        except (ProtocolError, msgspec.MsgspecError) as error:
            peer.send(GenerateError("invalid_request", str(error), status=400))
            return
        if not isinstance(frame, Generate):
            return
        if (refusal := self._refusal(frame)) is not None:
            peer.send(refusal)
            return
        self.open_requests += 1
        try:
            await _first_of(self._relay.run(frame, peer.send), peer.wait_gone())
        finally:
            self.open_requests -= 1

    def _refusal(self, frame: Generate) -> GenerateError | None:
        if frame.version != GENERATE_VERSION:
            text = f"generation protocol {frame.version}, not {GENERATE_VERSION}"
            return GenerateError("invalid_request", text, status=400)
        if (refusal := self._gate(frame)) is not None:
            return refusal
        if frame.resume is not None:
            text = "the server that had this stream is gone, and no other one can go on with it"
            return GenerateError("not_resumable", text, status=502)
        if self.open_requests >= self._max_open:
            text = f"{self.open_requests} requests are at the server already"
            return GenerateError("queue_full", text, status=429, retry_after_s=1.0)
        return None


async def _first_of(work: Coroutine[Any, Any, None], end: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it is done or `end` is; the other one is cancelled."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(end)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Peer:
    """A gateway's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = FrameBuffer(max_frame_bytes=_MAX_REQUEST_BYTES)

    async def next_frame(self) -> GatewayFrame | None:
        """The next frame; None at the end of file."""
        while (body := self._buffer.next_body()) is None:
            data = await self._reader.read(_CHUNK_BYTES)
            if not data:
                return None
            self._buffer.feed(data)
        return _decoder.decode(body)

    async def wait_gone(self) -> None:
        """Return at `Cancel`, at the end of file, or at anything that may not come."""
        with contextlib.suppress(ProtocolError, msgspec.MsgspecError, OSError):
            await self.next_frame()

    def send(self, frame: EngineFrame) -> None:
        """Queue a frame.

        Raises:
            TooSlowError: too much waits for this gateway.
        """
        self._writer.write(encode_frame(frame))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise TooSlowError
