"""The admin HTTP server: a Unix socket for the command line, loopback TCP for everything else.

Invariants
    1. Over the Unix socket (0600) only our own user, or root, is answered; no token is asked for.
    2. Over TCP nothing but probes, metrics and status is answered without the token, and with
       `auth: all` nothing at all.
    3. Every connection, body, stream and wait is bounded. A flood over TCP does not lock the
       Unix socket: each listener has its own bound.
    4. Every error is a problem document; the log has the traceback of what was not expected.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cache.wire import listen_unix
from supervisor.admin.auth import check_peer, check_source, check_token, make_token
from supervisor.admin.connections import Connections
from supervisor.admin.controller import Controller
from supervisor.admin.handlers import Handlers
from supervisor.admin.openapi import openapi_document
from supervisor.admin.parameters import BODY_TIMEOUT_S, MAX_BODY_BYTES, read_parameters
from supervisor.admin.problems import problem_response
from supervisor.admin.routes import ROUTES, Route
from supervisor.errors import StartFailedError, UnderstudyError
from supervisor.observe.events import EventLog
from supervisor.observe.logs import fields
from supervisor.observe.metrics import Metrics

__all__ = ["SOCKET_NAME", "AdminServer"]

SOCKET_NAME: Final = "admin.sock"
MAX_CONNECTIONS: Final = 128
IDLE_TIMEOUT_S: Final = 15.0
_STOP_S: Final = 2.0

_log = logging.getLogger(__name__)


class AdminServer:
    """Serves a controller. Made and started once by the daemon, on the loop of the controller.

    `listen_sock` is a bound TCP socket, or None to serve the Unix socket alone; the server owns
    it from `start` on.
    """

    def __init__(  # noqa: PLR0917 -- wiring, in the order in which the daemon makes the parts
        self,
        controller: Controller,
        events: EventLog,
        metrics: Metrics,
        state_dir: Path,
        listen_sock: socket.socket | None,
        auth: Literal["default", "all"] = "default",
        *,
        max_connections: int = MAX_CONNECTIONS,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._handlers = Handlers(controller, events, metrics, openapi=openapi_document)
        self._metrics = metrics
        self._state_dir = state_dir
        self._listen_sock = listen_sock
        self._needs_token_always = auth == "all"
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._body_timeout_s = body_timeout_s
        self._token = ""
        self._runners: list[web.AppRunner] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._socket_id: tuple[int, int] | None = None

    @property
    def socket_path(self) -> Path:
        """Where the command line connects."""
        return self._state_dir / SOCKET_NAME

    async def start(self) -> None:
        """Make the token, then answer on both listeners.

        Raises:
            StartFailedError: token or socket cannot be made.
        """
        self._token = await asyncio.to_thread(make_token, self._state_dir)
        try:
            unix_sock = await asyncio.to_thread(listen_unix, self.socket_path)
            stat = self.socket_path.stat()
            self._socket_id = (stat.st_dev, stat.st_ino)
            await self._serve(unix_sock, is_local=True)
            if self._listen_sock is not None:
                await self._serve(self._listen_sock, is_local=False)
        except OSError as error:
            await self.stop()
            raise StartFailedError(
                f"the admin API cannot listen at {self.socket_path}: {error.strerror}",
                hint="make the state directory writable",
            ) from error
        except BaseException:
            await self.stop()
            raise

    async def listen(self, sock: socket.socket) -> None:
        """Answer on a TCP socket that could not be bound before `start`.

        Raises:
            OSError: it cannot be served now; it is closed, and another may be tried.
        """
        try:
            await self._serve(sock, is_local=False)
        except BaseException:
            sock.close()
            raise
        self._listen_sock = sock

    async def stop(self) -> None:
        """Take nothing new, let what is under way finish for 2 s, and leave. Idempotent."""
        for server in self._servers:
            server.close()
        self._remove_socket()
        self._handlers.streams.close()
        await self._handlers.operations.close(timeout_s=_STOP_S)
        for runner in self._runners:
            await runner.cleanup()
        if self._listen_sock is not None:
            self._listen_sock.close()
        self._servers.clear()
        self._runners.clear()

    async def _serve(self, sock: socket.socket, *, is_local: bool) -> None:
        connections = Connections(limit=self._max_connections, idle_timeout_s=self._idle_timeout_s)
        runner = web.AppRunner(
            self._application(connections, is_local=is_local),
            access_log=None,
            # A reader that left frees its stream at once; commands are shielded and go on.
            handler_cancellation=True,
            keepalive_timeout=self._idle_timeout_s,
            shutdown_timeout=_STOP_S,
        )
        await runner.setup()
        self._runners.append(runner)
        assert runner.server is not None  # noqa: S101 -- set by setup()
        sock.setblocking(False)
        factory = connections.factory(runner.server)
        loop = asyncio.get_running_loop()
        if is_local:
            server = await loop.create_unix_server(factory, sock=sock)
        else:
            server = await loop.create_server(factory, sock=sock)
        self._servers.append(server)

    def _application(self, connections: Connections, *, is_local: bool) -> web.Application:
        application = web.Application(
            client_max_size=MAX_BODY_BYTES,
            middlewares=[
                self._measured(connections),
                _problems,
                self._guarded(is_local=is_local),
            ],
        )
        for route in ROUTES:
            application.router.add_route(route.method, route.path, self._handler(route))
            if route.method == "GET":
                application.router.add_route("HEAD", route.path, self._handler(route))
        return application

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            parameters = await read_parameters(
                request, route.parameters, timeout_s=self._body_timeout_s
            )
            return await route.handler(self._handlers, request, parameters)

        return handle

    def _measured(self, connections: Connections) -> Middleware:
        @web.middleware
        async def measured(request: web.Request, handler: Handler) -> web.StreamResponse:
            connections.request_started(request)
            started = time.monotonic()
            try:
                response = await handler(request)
                self._metrics.admin_request(
                    _known_method(request), _template(request), response.status,
                    time.monotonic() - started,
                )  # fmt: skip
                return response
            finally:
                connections.request_finished(request)

        return measured

    def _guarded(self, *, is_local: bool) -> Middleware:
        open_paths = {route.path for route in ROUTES if route.is_open}

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if is_local:
                check_peer(request)
            else:
                check_source(request)
                is_open = request.path in open_paths and request.method in ("GET", "HEAD")
                if self._needs_token_always or not is_open:
                    check_token(request, self._token)
            return await handler(request)

        return guarded

    def _remove_socket(self) -> None:
        """Unlink our own socket, never that of a supervisor that came after us."""
        try:
            stat = self.socket_path.stat()
            if (stat.st_dev, stat.st_ino) == self._socket_id:
                self.socket_path.unlink()
        except OSError:
            return  # it is gone, or the disk fails: the next start replaces it


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (UnderstudyError, web.HTTPException) as error:
        return problem_response(error)
    except ConnectionError:
        raise  # the client left in the middle: there is nobody to answer
    except Exception as error:  # noqa: BLE001 -- whatever it is, the caller gets a document
        _log.exception("a request failed", extra=fields(method=request.method, path=request.path))
        return problem_response(error)


def _template(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _known_method(request: web.Request) -> str:
    return request.method if request.method in {"GET", "HEAD", "POST"} else "other"
