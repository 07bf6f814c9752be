"""One connection to an engine's generation socket: frames of one request, both ways.

Invariants
    1. `cut` takes effect at once: unread frames are gone, `next_frame` raises, no `Cancel` is
       sent, so the engine's slot waits for whoever adopts the stream.
    2. A connection that nobody reads stops reading once `UPSTREAM_BUFFER_BYTES` of frames wait.
    3. Frames that came complete before an end of file are still handed out; a torn one is not.
    4. `cancel` closes only its own half and reads on (for `CANCEL_LINGER_S`), because an engine
       that writes into a closed connection may be told of that before it reads the `Cancel`.

WARNING: connecting is done by hand. A full backlog of a Unix socket answers EAGAIN, which event
loops take for `in progress` and then report as success; a stopped engine has a full backlog.
"""

import asyncio
import socket
from collections import deque
from pathlib import Path
from typing import Final, Self, cast

import msgspec

from cache.errors import ProtocolError
from cache.wire import FrameBuffer, encode_frame, unix_address
from engines.contract import Cancel, EngineFrame, GatewayFrame
from supervisor.gateway.errors import AttemptFailedError, EngineLostError, RouteCutError
from supervisor.gateway.limits import CANCEL_LINGER_S, SOCKET_FLUSH_S, UPSTREAM_BUFFER_BYTES
from supervisor.gateway.protocol import RouteTarget

__all__ = ["EngineConnection"]

_RETRY_CONNECT_S: Final = 0.02

_decoder: Final = msgspec.json.Decoder(EngineFrame)


class EngineConnection(asyncio.Protocol):
    """Made by `open`; ended by exactly one of `close`, `cancel` and `cut` (more do no harm)."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer()
        self._bodies: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_reading = True
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: AttemptFailedError | None = None
        self.is_closed = asyncio.Event()

    @classmethod
    async def open(cls, target: RouteTarget, *, deadline: float | None) -> Self:
        """Connect; waits while the engine's backlog is full.

        Args:
            target: whose socket.
            deadline: in the loop's time.

        Raises:
            EngineLostError: nobody listens there.
            TimeoutError: the deadline passed.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline):
            sock = await _connect(target)
            try:
                _, connection = await loop.create_unix_connection(cls, sock=sock)
            except BaseException:
                sock.close()
                raise
        return connection

    def send(self, frame: GatewayFrame) -> None:
        """Send a frame; if the engine is gone the next read says so."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(frame))

    async def next_frame(self) -> EngineFrame:
        """The next frame; the caller brings the deadline.

        Raises:
            RouteCutError: the connection was cut.
            EngineLostError: end of file, a broken connection, or rubbish.
        """
        while not self._bodies:
            if self._lost is not None:
                raise self._lost
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        body = self._bodies.popleft()
        self._waiting_bytes -= len(body)
        if not self._is_reading and self._waiting_bytes <= UPSTREAM_BUFFER_BYTES // 2:
            self._resume_reading()
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise EngineLostError(f"the engine sent an unknown frame: {error}") from error

    def close(self) -> None:
        """The request is over, or goes on elsewhere; what was sent before still leaves."""
        self._discard(EngineLostError("closed by this side"))
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(SOCKET_FLUSH_S, transport.abort)
        transport.close()

    def cancel(self) -> None:
        """The client is gone: tell the engine, and let it hang up."""
        self._discard(EngineLostError("closed by this side"))
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.send(Cancel())
        transport.write_eof()
        if not self._is_reading:
            self._resume_reading()
        asyncio.get_running_loop().call_later(CANCEL_LINGER_S, transport.abort)

    def cut(self, reason: AttemptFailedError | None = None) -> None:
        """Drop the connection without a word; what was not read is discarded."""
        self._discard(reason or RouteCutError("the route was cut"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._lost is not None:
            return
        self._buffer.feed(data)
        try:
            while (body := self._buffer.next_body()) is not None:
                self._bodies.append(body)
                self._waiting_bytes += len(body)
        except ProtocolError as error:
            self._end(EngineLostError(error.message))
            if self._transport is not None:
                self._transport.abort()
            return
        if self._is_reading and self._waiting_bytes > UPSTREAM_BUFFER_BYTES:
            self._is_reading = False
            if self._transport is not None:
                self._transport.pause_reading()
        if self._bodies:
            self._wake()

    def eof_received(self) -> bool:
        """Called by the event loop; False lets it close the transport."""
        self._end(EngineLostError("the engine closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._end(EngineLostError(f"the connection to the engine broke: {exc}"))
        self.is_closed.set()

    def _resume_reading(self) -> None:
        self._is_reading = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _discard(self, reason: AttemptFailedError) -> None:
        self._bodies.clear()
        self._waiting_bytes = 0
        self._end(reason)

    def _end(self, reason: AttemptFailedError) -> None:
        if self._lost is None:
            self._lost = reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _connect(target: RouteTarget) -> socket.socket:
    try:
        sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
    except OSError as error:  # no descriptor is left: there will be one again
        raise EngineLostError(f"cannot reach engine {target.instance}: {error}") from error
    try:
        with unix_address(Path(target.generate_socket)) as address:
            while True:
                try:
                    sock.connect(address)
                except BlockingIOError:  # the backlog is full
                    await asyncio.sleep(_RETRY_CONNECT_S)
                else:
                    return sock
    except OSError as error:
        sock.close()
        raise EngineLostError(f"cannot reach engine {target.instance}: {error}") from error
    except BaseException:
        sock.close()
        raise
