"""Request/reply over Unix sockets for asyncio: one client class, one server class.

Both ends of every control protocol use these, so that peer check, version, deadlines and bounds
exist once. The first request on a connection is `hello`; a server answers nothing else before it.

Invariants
    1. Only a peer with our own uid is served (SO_PEERCRED).
    2. A request id is answered exactly once; a handler that raises answers with an error body.
    3. A peer that stops reading is cut off once `MAX_UNSENT_BYTES` are waiting for it: nobody's
       slowness becomes our memory.
    4. Handlers of one connection run one after another, those of different connections side by
       side; replies keep the order of requests.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from cache.errors import (
    ConnectionClosedError,
    DeadlineExceededError,
    DescriptorLimitError,
    ErrorBody,
    ProtocolError,
    RemoteError,
    UnderstudyError,
    VersionMismatchError,
)
from cache.wire import (
    MAX_FDS_PER_FRAME,
    Event,
    Frame,
    FrameBuffer,
    Reply,
    Request,
    close_all,
    encode_frame,
    listen_unix,
    peer_identity,
    peer_uid,
    receive_once,
    send_once,
    unix_address,
)

__all__ = [
    "ACCEPT_PAUSE_S", "MAX_UNSENT_BYTES", "Handler", "Hello", "RpcClient", "RpcPeer", "RpcServer",
]  # fmt: skip

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES: Final = 64 << 20
"""Bytes that may wait for one peer: room for two of the largest frames and then some."""

HELLO_TIMEOUT_S: Final = 10.0
"""A connection that has not said hello by then is closed: it takes a place from others."""

ACCEPT_PAUSE_S: Final = 0.1
"""Where no descriptor is left to accept with: the socket stays readable, and would spin."""

_encoder: Final = msgspec.json.Encoder()


class Hello(msgspec.Struct, frozen=True):
    """The first request: who speaks which version of which protocol."""

    protocol: str
    version: int
    instance: str = ""
    epoch: int = 0
    role: str = ""


class _Transport:
    """Frames over one non-blocking socket, with a reader callback and a bounded send queue."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame, list[int]], None],
        on_closed: Callable[[UnderstudyError], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._unsent_bytes = 0
        self._writing = False
        self.is_closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._unsent_bytes

    def send(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        """Queue a frame; descriptors are duplicated, so the caller may close its own.

        Raises:
            ConnectionClosedError: the peer is gone, or does not read and was cut off.
            ProtocolError: the frame or the number of descriptors is over the bound.
            DescriptorLimitError: this process may open no more files.
        """
        if self.is_closed:
            raise ConnectionClosedError("the connection is closed")
        if len(fds) > MAX_FDS_PER_FRAME:
            raise ProtocolError(f"{len(fds)} descriptors are too many for one frame")
        data = memoryview(encode_frame(frame))
        if self._unsent_bytes + len(data) > MAX_UNSENT_BYTES:
            self.close(ConnectionClosedError("the peer does not read"))
            raise ConnectionClosedError("the peer does not read")
        self._unsent.append((data, _duplicate(fds)))
        self._unsent_bytes += len(data)
        if not self._writing:
            self._writable()

    def close(self, reason: UnderstudyError) -> None:
        """Close; idempotent. `on_closed` is called once."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._buffer.close()
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._on_closed(reason)

    def _readable(self) -> None:
        try:
            data, fds = receive_once(self._sock)
            if not data:
                self.close(ConnectionClosedError("the peer closed the connection"))
                return
            self._buffer.feed(data, fds)
            while not self.is_closed and (cut := self._buffer.next_frame()) is not None:
                self._on_frame(*cut)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(ConnectionClosedError(f"the connection broke: {error.strerror}"))
        except ProtocolError as error:
            log.warning("closing a connection: %s", error)
            self.close(error)

    def _writable(self) -> None:
        try:
            while self._unsent:
                data, fds = self._unsent[0]
                sent = send_once(self._sock, data, fds)
                close_all(fds)
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent[0] = (data[sent:], [])
                else:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError as error:
            self.close(ConnectionClosedError(f"the connection broke: {error.strerror}"))
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())


def _duplicate(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 - a comprehension would leak on failure
    except OSError as error:
        close_all(copies)
        raise DescriptorLimitError(error.strerror or "dup failed") from error
    return copies


class RpcClient:
    """A connection to a server of ours. Calls may overlap; each has its own deadline.

    Events are heard in the order of the wire, also relative to replies: who awaits a reply goes
    on before an event that came behind it is handed over, though both arrived in one piece.
    """

    def __init__(self, on_event: Callable[[Event, list[int]], None] | None = None) -> None:
        self._on_event = on_event
        self._pending: dict[int, asyncio.Future[tuple[msgspec.Raw, list[int]]]] = {}
        self._next_id = 0
        self._transport: _Transport | None = None
        self.closed: asyncio.Future[UnderstudyError] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls,
        path: Path,
        hello: Hello,
        *,
        timeout_s: float,
        on_event: Callable[[Event, list[int]], None] | None = None,
    ) -> tuple[Self, Any]:
        """Connect and say hello; returns the client and the server's raw hello answer.

        Raises:
            OSError: nobody listens at `path`.
            RemoteError: the server refused us (version, uid).
            DeadlineExceededError: it did not answer in time.
        """
        client = cls(on_event)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                with unix_address(path) as address:
                    await asyncio.get_running_loop().sock_connect(sock, address)
        except TimeoutError as error:
            sock.close()
            raise DeadlineExceededError(f"connecting to {path}", timeout_s=timeout_s) from error
        except BaseException:
            sock.close()
            raise
        client._transport = _Transport(sock, client._frame, client._lost)
        try:
            raw, fds = await client.call("hello", hello, timeout_s=timeout_s)
        except BaseException:
            client.close()
            raise
        close_all(fds)
        return client, raw

    @property
    def is_closed(self) -> bool:
        """Whether the connection is gone."""
        return self._transport is None or self._transport.is_closed

    def close(self) -> None:
        """Close the connection; calls in flight fail with `ConnectionClosedError`."""
        if self._transport is not None:
            self._transport.close(ConnectionClosedError("closed by this side"))

    async def call(
        self, verb: str, params: object = None, *, fds: Sequence[int] = (), timeout_s: float
    ) -> tuple[msgspec.Raw, list[int]]:
        """One request; returns the raw result and the descriptors (the caller owns them).

        Raises:
            RemoteError: the server answered with an error.
            DeadlineExceededError: no answer in time (a late one is dropped).
            ConnectionClosedError: the server went away.
        """
        if self._transport is None:
            raise ConnectionClosedError("the connection is not open")
        self._next_id += 1
        call_id = self._next_id
        future: asyncio.Future[tuple[msgspec.Raw, list[int]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending[call_id] = future
        try:
            raw = msgspec.Raw(_encoder.encode({} if params is None else params))
            self._transport.send(Request(call_id, verb, raw, len(fds)), fds)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            _discard_answer(future)
            raise DeadlineExceededError(f"the answer to {verb}", timeout_s=timeout_s) from error
        except asyncio.CancelledError:
            _discard_answer(future)
            raise
        finally:
            self._pending.pop(call_id, None)

    def _frame(self, frame: Frame, fds: list[int]) -> None:
        if (
            isinstance(frame, Reply)
            and (future := self._pending.get(frame.re))
            and not future.done()
        ):
            if frame.error is not None:
                future.set_exception(RemoteError(frame.error))
            else:
                future.set_result((frame.result, fds))
                return
        elif isinstance(frame, Event) and self._on_event is not None:
            # Behind the turn of whoever awaits a reply that came before it.
            asyncio.get_running_loop().call_soon(self._hand_over, self._on_event, frame, fds)
            return
        close_all(fds)

    def _hand_over(
        self, on_event: Callable[[Event, list[int]], None], event: Event, fds: list[int]
    ) -> None:
        if self.is_closed:
            close_all(fds)
        else:
            on_event(event, fds)

    def _lost(self, reason: UnderstudyError) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionClosedError(reason.message))
        if not self.closed.done():
            self.closed.set_result(reason)


def _discard_answer(future: "asyncio.Future[tuple[msgspec.Raw, list[int]]]") -> None:
    """Close descriptors of an answer that arrived in the moment when nobody waited any more."""
    if future.done() and not future.cancelled() and future.exception() is None:
        close_all(future.result()[1])


Handler = Callable[["RpcPeer", msgspec.Raw, list[int]], Awaitable[tuple[object, Sequence[int]]]]
"""Gets the peer, raw parameters and descriptors (it owns them); returns result and descriptors.

The returned descriptors are duplicated by the sender and stay the handler's.
"""


class RpcPeer:
    """One client as the server sees it. The open connection is the registration."""

    def __init__(self, server: "RpcServer", sock: socket.socket) -> None:
        self._server = server
        self.pid: Final = peer_identity(sock)[0]
        self._queue: asyncio.Queue[tuple[Request, list[int]]] = asyncio.Queue(maxsize=256)
        self.hello: Hello | None = None
        self._transport = _Transport(sock, self._frame, self._lost)
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._serve())
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_S, self._expect_hello)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that this client has not taken yet."""
        return self._transport.unsent_bytes

    @property
    def is_closed(self) -> bool:
        """Whether this client is gone."""
        return self._transport.is_closed

    def notify(self, name: str, params: object = None, fds: Sequence[int] = ()) -> None:
        """Send an event; a peer that is gone is not an error."""
        raw = msgspec.Raw(_encoder.encode({} if params is None else params))
        with contextlib.suppress(ConnectionClosedError):
            self._transport.send(Event(name, raw, len(fds)), fds)

    def close(self, reason: str = "closed by the server") -> None:
        """Cut this client off."""
        self._transport.close(ConnectionClosedError(reason))

    def _frame(self, frame: Frame, fds: list[int]) -> None:
        if not isinstance(frame, Request):
            close_all(fds)
            raise ProtocolError("a client may only send requests")
        try:
            self._queue.put_nowait((frame, fds))
        except asyncio.QueueFull:
            close_all(fds)
            raise ProtocolError("the client sent 256 requests without reading an answer") from None

    def _expect_hello(self) -> None:
        # This process may have been stopped meanwhile: a hello that has come by now counts.
        if self.hello is None and self._queue.empty():
            self.close("no hello in time")

    def _lost(self, _reason: UnderstudyError) -> None:
        self._hello_timer.cancel()
        self._task.cancel()
        while not self._queue.empty():
            close_all(self._queue.get_nowait()[1])
        self._server._peer_gone(self)

    async def _serve(self) -> None:
        while True:
            request, fds = await self._queue.get()
            try:
                result, out_fds = await self._server._dispatch(self, request, fds)
                reply = Reply(request.id, msgspec.Raw(_encoder.encode(result)), None, len(out_fds))
            except UnderstudyError as error:
                reply, out_fds = Reply(request.id, error=error.to_body()), ()
            except Exception as error:
                log.exception("%s failed", request.verb)
                body = ErrorBody("internal", f"{request.verb} failed: {error!r}")
                reply, out_fds = Reply(request.id, error=body), ()
            self._answer(reply, out_fds)
            if self.hello is None:
                self.close("no hello")

    def _answer(self, reply: Reply, fds: Sequence[int]) -> None:
        try:
            self._transport.send(reply, fds)
        except ConnectionClosedError:
            log.debug("pid %d left before its answer", self.pid)
        except UnderstudyError as error:  # the answer cannot travel: say so instead
            log.warning("cannot answer pid %d: %s", self.pid, error)
            with contextlib.suppress(ConnectionClosedError):
                self._transport.send(Reply(reply.re, error=error.to_body()))


class RpcServer:
    """Serves verbs at a Unix socket (mode 0600) to peers of our own uid."""

    def __init__(
        self,
        path: Path,
        protocol: str,
        version: int,
        handlers: dict[str, Handler],
        *,
        on_peer_gone: Callable[[RpcPeer], None] | None = None,
        max_peers: int = 256,
    ) -> None:
        self._path = path
        self._protocol = protocol
        self._version = version
        self._handlers = handlers
        self._on_peer_gone = on_peer_gone
        self._max_peers = max_peers
        self._sock: socket.socket | None = None
        self._inode = (0, 0)
        self.peers: set[RpcPeer] = set()

    async def start(self) -> None:
        """Bind and serve."""
        self._sock = listen_unix(self._path)
        self._sock.setblocking(False)
        self._inode = _inode(self._path)
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._acceptable)

    def close(self, *, unlink: bool = True) -> None:
        """Stop serving and cut every client off."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
            # A successor may have put its own socket there already: leave that one alone.
            if unlink and _inode(self._path) == self._inode:
                self._path.unlink(missing_ok=True)
        for peer in list(self.peers):
            peer.close()

    def notify_all(
        self, name: str, params: object = None, *, max_unsent_bytes: int = MAX_UNSENT_BYTES
    ) -> None:
        """Send an event to every client that said hello.

        Clients for whom more than `max_unsent_bytes` wait already are passed over.
        """
        for peer in list(self.peers):
            if peer.hello is not None and peer.unsent_bytes <= max_unsent_bytes:
                peer.notify(name, params)

    def _acceptable(self) -> None:
        assert self._sock is not None  # noqa: S101 - the reader is removed before the socket
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors. The socket stays readable, so without a pause the loop would
            # spin; clients wait in the backlog meanwhile.
            log.error("cannot accept at %s: %s", self._path, error)  # noqa: TRY400
            self._pause_accepting()
            return
        if peer_uid(sock) != os.getuid() or len(self.peers) >= self._max_peers:
            sock.close()
            return
        self.peers.add(RpcPeer(self, sock))

    def _pause_accepting(self) -> None:
        assert self._sock is not None  # noqa: S101 - called from its reader
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock.fileno())
        loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._acceptable)

    def _peer_gone(self, peer: RpcPeer) -> None:
        self.peers.discard(peer)
        if self._on_peer_gone is not None:
            self._on_peer_gone(peer)

    async def _dispatch(
        self, peer: RpcPeer, request: Request, fds: list[int]
    ) -> tuple[object, Sequence[int]]:
        handler = self._handlers.get(request.verb)
        if request.verb == "hello":
            peer.hello = self._check_hello(request.params)
        refused = handler is None or peer.hello is None
        if refused:
            close_all(fds)
        if peer.hello is None:
            raise ProtocolError(f"{request.verb} before hello")
        if handler is None:
            raise ProtocolError(f"{self._protocol} has no verb {request.verb!r}")
        return await handler(peer, request.params, fds)

    def _check_hello(self, raw: msgspec.Raw) -> Hello:
        try:
            hello = msgspec.json.decode(raw, type=Hello)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"bad hello: {error}") from error
        if hello.protocol != self._protocol:
            raise ProtocolError(f"this socket speaks {self._protocol}, not {hello.protocol}")
        if hello.version != self._version:
            raise VersionMismatchError(self._protocol, ours=self._version, theirs=hello.version)
        return hello


def _inode(path: Path) -> tuple[int, int]:
    try:
        info = path.stat()
    except OSError:  # gone: nobody's
        return (-1, -1)
    return (info.st_dev, info.st_ino)
