"""Health and metrics of the adapter over HTTP, on a Unix socket, as every engine has them.

`/health` hands on what the server says. No answer of the server is no statement: it may be busy,
and whether it still moves is the progress page's and the canary's business.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from cache.wire import listen_unix
from engines.contract import EngineStatus

__all__ = ["HttpServer"]

_HEALTHY: Final = frozenset({"ready", "standby", "serving"})
_BACKLOG: Final = 8
_GAUGES: Final = ("active", "queued", "epoch")


class HttpServer:
    """Serves `/health` and `/metrics` at a Unix socket."""

    def __init__(
        self,
        path: Path,
        group: str,
        status: Callable[[], EngineStatus],
        ask_server: Callable[[], Awaitable[bool | None]],
    ) -> None:
        self._path = path
        self._group = group
        self._status = status
        self._ask_server = ask_server
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Bind and serve."""
        await self._runner.setup()
        await web.SockSite(self._runner, listen_unix(self._path), backlog=_BACKLOG).start()

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()
        self._path.unlink(missing_ok=True)

    async def _health(self, _request: web.Request) -> web.Response:
        status = self._status()
        answer = await self._ask_server() if status.state in _HEALTHY else False
        body = {
            "state": status.state, "role": status.role, "epoch": status.epoch, "server": answer,
        }  # fmt: skip
        return web.json_response(body, status=503 if answer is False else 200)

    async def _metrics(self, _request: web.Request) -> web.Response:
        status = self._status()
        labels = f'{{group="{self._group}",engine="{status.name}"}}'
        lines = []
        for name in _GAUGES:
            lines.append(f"# TYPE understudy_command_{name} gauge")
            lines.append(f"understudy_command_{name}{labels} {getattr(status, name)}")
        return web.Response(text="\n".join(lines) + "\n")
