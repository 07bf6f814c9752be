"""The route table: one line per endpoint, from which handlers and OpenAPI document are made."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from aiohttp import web

from supervisor.admin import models
from supervisor.admin.handlers import Handlers

__all__ = ["ROUTES", "Route"]

Handler = Callable[[Handlers, web.Request, Any], Awaitable[web.StreamResponse]]
Answer = Literal["object", "operation", "events", "text"]


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint."""

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    parameters: type[models.Parameters] = models.NoParameters
    is_open: bool = False  # needs no token, unless `admin.auth: all`
    answer: Answer = "object"
    may_be_unavailable: bool = False  # 503 with the same body is an answer, not a failure

    @property
    def name(self) -> str:
        """Operation id; the name of the handler."""
        return self.handler.__name__

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (self.handler.__doc__ or "").strip().splitlines()[0]


_get: Final = partial(Route, "GET")
_probe: Final = partial(Route, "GET", is_open=True, may_be_unavailable=True)
_post: Final = partial(Route, "POST", answer="operation")

ROUTES: Final[tuple[Route, ...]] = (
    _probe("/livez", Handlers.livez),
    _probe("/readyz", Handlers.readyz, parameters=models.GroupParameters),
    _probe("/primary", Handlers.primary, parameters=models.GroupParameters),
    _probe("/standby", Handlers.standby, parameters=models.GroupParameters),
    _get("/metrics", Handlers.metrics, is_open=True, answer="text"),
    _get("/openapi.json", Handlers.openapi),
    _get("/v1/status", Handlers.status, is_open=True),
    _get("/v1/topology", Handlers.topology),
    _get("/v1/history", Handlers.history),
    _get("/v1/events", Handlers.events, parameters=models.EventsParameters, answer="events"),
    _get("/v1/operations/{id}", Handlers.operation, answer="operation"),
    _post("/v1/promote", Handlers.promote, models.PromoteParameters),
    _post("/v1/failover", Handlers.failover, models.PromoteParameters),
    _post("/v1/evict/{engine}", Handlers.evict, models.EvictParameters),
    _post("/v1/resume/{engine}", Handlers.resume, models.ResumeParameters),
    _post("/v1/freeze/{engine}", Handlers.freeze),
    _post("/v1/thaw/{engine}", Handlers.thaw),
    _post("/v1/restart/{engine}", Handlers.restart),
    _post("/v1/fence/{engine}", Handlers.fence, models.FenceParameters),
    _post("/v1/pause", Handlers.pause),
    _post("/v1/unpause", Handlers.unpause),
    _post("/v1/ack", Handlers.ack, models.AckParameters),
    _post("/v1/stop", Handlers.stop),
)
