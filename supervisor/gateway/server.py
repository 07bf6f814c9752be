"""HTTP connections of a worker: accepting, bounding, closing. aiohttp parses and frames.

Connections are accepted by hand from the inherited socket, because its owner is the supervisor,
other workers may share it, and above `max_connections` new ones must wait in the kernel's backlog
instead of being accepted and dropped.

Invariants
    1. The listening socket is never shut down here; closing a descriptor leaves it to the others.
    2. A connection that sends no complete request head in `HEAD_TIMEOUT_S` is closed.
    3. When a client's connection is lost, its handler is cancelled.
    4. Errors that aiohttp finds (a malformed head) have the same JSON shape as ours.

WARNING: a client that shuts down its sending half counts as gone, as with most servers.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from supervisor.gateway.errors import ApiError
from supervisor.gateway.limits import HEAD_TIMEOUT_S, KEEPALIVE_S, LINGER_S

__all__ = [
    "SERVER_HEADER",
    "ClientConnection",
    "HttpServer",
    "connections_within",
    "raise_descriptor_limit",
]

log = logging.getLogger(__name__)

SERVER_HEADER: Final = {"Server": "understudy"}
"""Instead of aiohttp's, which tells the versions of everything."""

_ACCEPTS_PER_WAKEUP: Final = 64
_RETRY_ACCEPT_S: Final = 0.1
_READ_BUFFER_BYTES: Final = 64 << 10
_OWN_DESCRIPTORS: Final = 64
_FOR_ENGINES: Final = 2048
"""Descriptors kept for connections to engines; each request under way has one."""


def raise_descriptor_limit() -> None:
    """Use all descriptors that this process may have: two per stream, and the soft limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_within(limit: int, wanted: int) -> int:
    """How many clients to let in so that those who are in can be served.

    Args:
        limit: descriptors that this process may have.
        wanted: clients that the topology allows.
    """
    for_engines = min(_FOR_ENGINES, limit // 2)
    return max(1, min(wanted, limit - for_engines - _OWN_DESCRIPTORS))


class ClientConnection(web.RequestHandler):
    """One client connection, with a deadline for its first request head."""

    __slots__ = ("_head_timer", "_owner", "is_busy")

    def __init__(
        self,
        owner: "HttpServer",
        manager: web.Server,
        **settings: Any,  # noqa: ANN401 - aiohttp's own
    ) -> None:
        super().__init__(manager, **settings)
        self._owner = owner
        self._head_timer: asyncio.TimerHandle | None = None
        self.is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the event loop."""
        self.head_arrived()
        super().connection_lost(exc)
        self._owner.connection_gone(self)

    def head_arrived(self) -> None:
        """A request head is complete; later ones are bounded by the keep-alive time."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A malformed request, as found by the parser, or a bug of ours."""
        if isinstance(exc, ConnectionError):  # the client is gone: nobody to answer
            raise exc
        if status >= 500:
            log.error("a request failed inside the gateway error=%r", exc, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; the connection can only be closed")
        if status >= 500:
            error = ApiError(status, "internal_error", "the gateway failed; its log says why")
        else:
            log.debug("a client sent malformed HTTP reason=%r", message)
            error = ApiError(status, "bad_request", "the request is not valid HTTP")
        response = web.json_response(error.body, status=status, headers=SERVER_HEADER)
        response.force_close()
        return response

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            self.transport.abort()


class HttpServer:
    """Accepts from a listening socket and hands each request to one handler."""

    def __init__(
        self,
        sock: socket.socket,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        max_connections: int,
        max_body_bytes: int,
    ) -> None:
        self._sock = sock
        sock.setblocking(False)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = connections_within(soft, max_connections)
        if self._max_connections < max_connections:
            log.warning("%d descriptors allow %d client connections, not %d; more of them wait",
                        soft, self._max_connections, max_connections)  # fmt: skip
        self._max_body_bytes = max_body_bytes
        self._loop = asyncio.get_running_loop()
        self._manager = web.Server(  # type: ignore[no-untyped-call, unused-ignore]
            handler, request_factory=self._make_request, handler_cancellation=True
        )
        self._connections: set[ClientConnection] = set()
        self._adopting: set[asyncio.Task[None]] = set()
        self._wants_more = False
        self._is_accepting = False
        self._gone = asyncio.Event()

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    def start(self) -> None:
        """Accept from now on."""
        self._wants_more = True
        self._update()

    def stop(self) -> None:
        """Accept nothing more, and close the connections on which no request is under way."""
        self._wants_more = False
        self._update()
        for connection in list(self._connections):
            if not connection.is_busy:
                connection.close()
                connection.force_close()

    def abort(self) -> None:
        """Close every connection; handlers are cancelled."""
        for connection in list(self._connections):
            connection.force_close()

    async def wait_idle(self, *, timeout_s: float) -> bool:
        """Wait until no connection is open; False when the time was not enough."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._connections or self._adopting:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            return False
        return True

    def connection_gone(self, connection: ClientConnection) -> None:
        """Called by the connection, once."""
        self._connections.discard(connection)
        self._gone.set()
        self._update()

    def _update(self) -> None:
        room = len(self._connections) + len(self._adopting) < self._max_connections
        wanted = self._wants_more and room
        if wanted and not self._is_accepting:
            self._loop.add_reader(self._sock.fileno(), self._accept)
        elif not wanted and self._is_accepting:
            self._loop.remove_reader(self._sock.fileno())
        self._is_accepting = wanted

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKEUP):
            if not self._is_accepting:
                return
            try:
                client, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: wait for some to be closed instead of spinning.
                log.error("cannot accept connections error=%s", error)  # noqa: TRY400
                self._loop.remove_reader(self._sock.fileno())
                self._is_accepting = False
                self._loop.call_later(_RETRY_ACCEPT_S, self._update)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._adopt(client))
            self._adopting.add(task)
            task.add_done_callback(self._adopted)
            self._update()

    async def _adopt(self, client: socket.socket) -> None:
        try:
            _, connection = await self._loop.connect_accepted_socket(self._protocol, client)
        except OSError as error:
            client.close()
            log.info("a client was gone before it was served error=%s", error)
            return
        if connection.transport is not None:
            self._connections.add(connection)

    def _adopted(self, task: asyncio.Task[None]) -> None:
        self._adopting.discard(task)
        self._gone.set()
        self._update()

    def _protocol(self) -> ClientConnection:
        return ClientConnection(
            self,
            self._manager,
            loop=self._loop,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            read_bufsize=_READ_BUFFER_BYTES,
            auto_decompress=False,
            access_log=None,
        )

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        if isinstance(protocol, ClientConnection):
            protocol.head_arrived()
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            self._loop,
            client_max_size=self._max_body_bytes,
        )
