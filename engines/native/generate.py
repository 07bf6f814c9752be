"""The generation socket: one connection per request, served by the event loop.

Invariants
    1. A connection has one `Generate`, then at most one `Cancel`; anything else closes it.
    2. Frames leave in the order in which the model thread handed them over; nothing is dropped
       while the connection lives.
    3. End of file without `Cancel` parks the row. Only `Cancel` says that the client is gone.
    4. Every wait has a deadline: for the first frame, and for the last one to be read. In between
       a gateway that does not read stops its own row (`StreamPort`), which bounds our memory.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from cache.errors import ProtocolError
from cache.rpc import ACCEPT_PAUSE_S
from cache.wire import FrameBuffer, listen_unix, peer_uid, receive_once
from engines.contract import (
    GENERATE_VERSION,
    Cancel,
    EngineFrame,
    GatewayFrame,
    Generate,
    GenerateError,
)
from engines.native.commands import Detach, Flushed, Submit, Wake
from engines.native.errors import RequestRefusedError
from engines.native.request import PreparedRequest, RequestPreparer
from engines.native.scheduler import Scheduler
from engines.native.streams import Outgoing, StreamPort

__all__ = ["MAX_REQUEST_BYTES", "GenerateServer"]

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES: Final = 8 << 20
_FIRST_FRAME_S: Final = 10.0
_LAST_FRAME_S: Final = 30.0

_decoder: Final = msgspec.json.Decoder(GatewayFrame)
_encoder: Final = msgspec.json.Encoder()
_length: Final = struct.Struct(">I")


class _Connection:
    """One gateway connection."""

    def __init__(self, server: "GenerateServer", sock: socket.socket) -> None:
        sock.setblocking(False)
        self.port = StreamPort()
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer(max_frame_bytes=MAX_REQUEST_BYTES)
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self._is_writing = False
        self._is_last_queued = False
        self._has_request = False
        self.is_closed = False
        self._loop.add_reader(sock.fileno(), self._readable)
        self._deadline = self._loop.call_later(_FIRST_FRAME_S, self._out_of_time)

    # ---------------------------------------------------------------- receiving

    def _readable(self) -> None:
        try:
            data, fds = receive_once(self._sock)
            self._buffer.feed(data, fds)
            if not data:
                self._gone(is_cancelled=False)
                return
            while not self.is_closed and (body := self._buffer.next_body()) is not None:
                self._frame(_decoder.decode(body))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._gone(is_cancelled=False)
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._refuse_frame(str(error))

    def _frame(self, frame: Generate | Cancel) -> None:
        if isinstance(frame, Cancel):
            self._gone(is_cancelled=True)
        elif self._has_request:
            log.warning("a second request on one connection; closing it")
            self._gone(is_cancelled=False)
        elif frame.version != GENERATE_VERSION:
            self._refuse_frame(f"generation protocol {frame.version}, not {GENERATE_VERSION}")
        else:
            self._has_request = True
            self._deadline.cancel()
            self._server.request(self, frame)

    def _refuse_frame(self, why: str) -> None:
        if self._has_request:
            log.warning("closing a connection: %s", why)
            self._gone(is_cancelled=False)
            return
        self._has_request = True
        self.send(GenerateError("invalid_request", why, status=400), is_last=True)

    def _out_of_time(self) -> None:
        log.warning("closing a connection: its peer neither asks nor reads")
        self._gone(is_cancelled=False)

    # ------------------------------------------------------------------ sending

    def send(self, frame: EngineFrame, *, tokens: int = 0, is_last: bool = False) -> None:
        """Queue one frame; after the last one the connection closes by itself."""
        if self.is_closed or self._is_last_queued:
            return
        body = _encoder.encode(frame)
        self._unsent.append((memoryview(_length.pack(len(body)) + body), tokens))
        if is_last:
            self._is_last_queued = True
            self._deadline.cancel()
            self._deadline = self._loop.call_later(_LAST_FRAME_S, self._out_of_time)
        if not self._is_writing:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._unsent:
                data, tokens = self._unsent[0]
                sent = self._sock.send(data, socket.MSG_NOSIGNAL)
                if sent < len(data):
                    self._unsent[0] = (data[sent:], tokens)
                    continue
                self._unsent.popleft()
                self.port.sent_tokens += tokens
        except (BlockingIOError, InterruptedError):
            self._watch_writable(wanted=True)
            self._server.maybe_wake(self.port)
            return
        except OSError:
            self._gone(is_cancelled=False)
            return
        self._watch_writable(wanted=False)
        self._server.maybe_wake(self.port)
        if self._is_last_queued:
            self._server.flushed(self)
            self.close()

    def _watch_writable(self, *, wanted: bool) -> None:
        if wanted and not self._is_writing:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        elif not wanted and self._is_writing:
            self._loop.remove_writer(self._sock.fileno())
        self._is_writing = wanted

    # ------------------------------------------------------------------ closing

    def tear(self) -> None:
        """End in the middle of a frame, as a broken engine or proxy does (fault on order)."""
        if not self._unsent and not self._is_writing:
            with contextlib.suppress(OSError):
                self._sock.send(_length.pack(1000) + b'{"type"', socket.MSG_NOSIGNAL)
        self._gone(is_cancelled=False)

    def _gone(self, *, is_cancelled: bool) -> None:
        if not self.is_closed:
            self.close()
            self._server.detached(self, is_cancelled=is_cancelled)

    def close(self) -> None:
        """Close the socket and forget the connection; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._deadline.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._watch_writable(wanted=False)
        self._sock.close()
        self._buffer.close()
        self._unsent.clear()
        self._server.forget(self)


class GenerateServer:
    """Accepts connections, prepares requests, moves frames."""

    def __init__(
        self,
        path: Path,
        scheduler: Scheduler,
        preparer: RequestPreparer,
        *,
        max_connections: int,
        wake_below_tokens: int,
        on_request: Callable[[Generate], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._on_request = on_request
        self._scheduler = scheduler
        self._preparer = preparer
        self._max_connections = max_connections
        self._wake_below_tokens = wake_below_tokens
        self._by_port: dict[StreamPort, _Connection] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def start(self) -> None:
        """Bind and accept."""
        self._sock = listen_unix(self._path, backlog=512)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def stop_accepting(self) -> None:
        """Close the listening socket; connections live on."""
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
            self._path.unlink(missing_ok=True)

    async def drain(self, *, timeout_s: float) -> None:
        """Give last frames time to leave, then close what is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        for connection in list(self._by_port.values()):
            connection.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def deliver(self, batch: list[Outgoing]) -> None:
        """Frames from the model thread. Runs in the event loop."""
        for outgoing in batch:
            connection = self._by_port.get(outgoing.port)
            if connection is not None:  # gone meanwhile: the row is being detached
                connection.send(outgoing.frame, tokens=outgoing.tokens, is_last=outgoing.is_last)

    # -------------------------------------------- called by the connections only

    def request(self, connection: _Connection, frame: Generate) -> None:
        """A connection's request: prepare it here, or in the worker if it must be tokenised."""
        self._on_request(frame)
        if self._preparer.is_cheap(frame):
            self._prepared(connection, lambda: self._preparer.prepare(frame))
            return
        future = self._worker.submit(self._preparer.prepare, frame)
        future.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._prepared, connection, done.result)
        )

    def _prepared(self, connection: _Connection, result: Callable[[], PreparedRequest]) -> None:
        if connection.is_closed:
            return
        try:
            request = result()
        except RequestRefusedError as error:
            refusal = GenerateError(error.stable_code, str(error), status=error.http_status)
            connection.send(refusal, is_last=True)
            return
        except Exception:
            log.exception("a request could not be prepared")
            failure = GenerateError("engine_failed", "the request could not be prepared")
            connection.send(failure, is_last=True)
            return
        self._scheduler.post(Submit(request, connection.port))

    def tear(self) -> None:
        """Only for chaos tests: see `engines.native.faults`."""
        for connection in list(self._by_port.values()):
            connection.tear()

    def maybe_wake(self, port: StreamPort) -> None:
        """A paused row may go on once its gateway has read enough."""
        if port.wants_wake and port.unsent_tokens <= self._wake_below_tokens:
            port.wants_wake = False
            self._scheduler.post(Wake())

    def flushed(self, connection: _Connection) -> None:
        """The kernel has the last frame."""
        self._scheduler.post(Flushed(connection.port))

    def detached(self, connection: _Connection, *, is_cancelled: bool) -> None:
        """The peer is gone."""
        self._scheduler.post(Detach(connection.port, is_cancelled))

    def forget(self, connection: _Connection) -> None:
        """The connection is closed."""
        self._by_port.pop(connection.port, None)
        if not self._by_port:
            self._is_empty.set()

    # ------------------------------------------------------------------ private

    def _resume_accepting(self) -> None:
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        if self._sock is None:
            return
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors. The socket stays readable, so without a pause the loop would
            # spin, beside the model's steps; gateways wait in the backlog meanwhile.
            log.error("cannot accept at %s: %s", self._path, error)  # noqa: TRY400 - one line
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)
            return
        if peer_uid(sock) != os.getuid():
            sock.close()
            return
        connection = _Connection(self, sock)
        self._by_port[connection.port] = connection
        self._is_empty.clear()
        if len(self._by_port) > self._max_connections:
            full = GenerateError(
                "queue_full", "too many connections", status=429, retry_after_s=1.0
            )
            connection.send(full, is_last=True)
