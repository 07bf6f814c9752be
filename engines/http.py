"""Health and metrics of an engine over HTTP, on a Unix socket.

No port to steal, and none to reach a fenced engine by.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from cache.wire import listen_unix

__all__ = ["HEALTHY", "HttpServer"]

HEALTHY: Final = frozenset({"ready", "standby", "serving"})
"""States in which an engine can serve or stand by."""

_BACKLOG: Final = 8

Health = Callable[[], Awaitable[tuple[bool, dict[str, object]]]]
"""Whether the engine is well, and what more to say."""


class HttpServer:
    """Serves `/health` and `/metrics` at a Unix socket."""

    def __init__(self, path: Path, collector: Collector, health: Health) -> None:
        self._path = path
        self._ask = health
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Bind and serve."""
        await self._runner.setup()
        # asyncio accepts as often as `backlog` says, and logs a traceback for each that fails.
        await web.SockSite(self._runner, listen_unix(self._path), backlog=_BACKLOG).start()

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()
        self._path.unlink(missing_ok=True)

    async def _health(self, _request: web.Request) -> web.Response:
        is_healthy, body = await self._ask()
        return web.json_response(body, status=200 if is_healthy else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
