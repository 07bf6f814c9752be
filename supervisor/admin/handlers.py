"""The handlers: from checked parameters to a call of the controller and its answer as JSON."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from supervisor.admin import models
from supervisor.admin.controller import Controller, Operation
from supervisor.admin.eventstream import EventStreams, encode_event
from supervisor.admin.idempotency import IdempotencyStore
from supervisor.admin.problems import BadRequestError, TimedOutError
from supervisor.errors import NotFoundError
from supervisor.observe.events import EventLog
from supervisor.observe.metrics import Metrics

__all__ = ["Handlers"]

READ_TIMEOUT_S: Final = 10.0
OPERATION_TIMEOUT_S: Final = 300.0
_UNFIT: Final = frozenset({"hung", "dead"})

T = TypeVar("T")


class Handlers:
    """One method per route; `supervisor.admin.routes` names them."""

    def __init__(
        self,
        controller: Controller,
        events: EventLog,
        metrics: Metrics,
        *,
        openapi: Callable[[], dict[str, Any]],
    ) -> None:
        self._controller = controller
        self._events = events
        self._metrics = metrics
        self._openapi = openapi
        self.operations = IdempotencyStore()
        self.streams = EventStreams(events)

    # ---------------------------------------------------------------- looking

    async def livez(self, _request: web.Request, _: models.NoParameters) -> web.Response:
        """200 while the supervisor itself works."""
        is_live = await _within(READ_TIMEOUT_S, self._controller.is_live())
        return _json({"live": is_live}, status=200 if is_live else 503)

    async def readyz(self, _request: web.Request, p: models.GroupParameters) -> web.Response:
        """200 while every group (or the one named) serves its clients."""
        groups = await _within(READ_TIMEOUT_S, self._controller.readiness())
        if p.group is not None:
            if p.group not in groups:
                raise _no_group(p.group, list(groups))
            groups = {p.group: groups[p.group]}
        is_ready = bool(groups) and all(groups.values())
        return _json({"ready": is_ready, "groups": groups}, status=200 if is_ready else 503)

    async def primary(self, _request: web.Request, p: models.GroupParameters) -> web.Response:
        """200 while the group has a primary that is neither hung nor dead."""
        group = self._group(p.group)
        return _role_answer(group, _fit(group, [group.get("primary")]))

    async def standby(self, _request: web.Request, p: models.GroupParameters) -> web.Response:
        """200 while a standby of the group could take over."""
        group = self._group(p.group)
        return _role_answer(group, _fit(group, group.get("standby") or []))

    async def metrics(self, _request: web.Request, _: models.NoParameters) -> web.Response:
        """Metrics for Prometheus."""
        page = await asyncio.to_thread(self._metrics.render)  # some milliseconds of CPU
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def status(self, _request: web.Request, _: models.NoParameters) -> web.Response:
        """The whole system: groups, engines, caches, gateway workers."""
        return _json(self._controller.status())

    async def topology(self, _request: web.Request, _: models.NoParameters) -> web.Response:
        """The topology in force, defaults included."""
        return _json(await _within(READ_TIMEOUT_S, self._controller.topology()))

    async def history(self, _request: web.Request, _: models.NoParameters) -> web.Response:
        """Past operations, the supervisor's own failovers among them."""
        found = await _within(READ_TIMEOUT_S, self._controller.history())
        return _json({"operations": found})

    async def operation(self, request: web.Request, _: models.NoParameters) -> web.Response:
        """One operation."""
        operation_id = request.match_info["id"]
        found = await _within(READ_TIMEOUT_S, self._controller.operation(operation_id))
        if found is None:
            raise NotFoundError(
                f"there is no operation {operation_id[:100]!r}", hint="GET /v1/history lists them"
            )
        return _json({"operation": found})

    async def events(self, request: web.Request, p: models.EventsParameters) -> web.StreamResponse:
        """Events as JSON, or as server-sent events (`follow`, `Accept: text/event-stream`)."""
        accepted = _accepted(request)
        is_stream = bool(p.follow) or "text/event-stream" in accepted
        # EventSource accepts nothing else, and means to follow; who accepts both may say so.
        follow = accepted == {"text/event-stream"} if p.follow is None else p.follow
        if is_stream and follow:
            return await self.streams.serve(request, p.since)
        found = self._events.since(p.since or 0, limit=p.limit)
        if is_stream:
            page = b"".join(encode_event(event) for event in found)
            return web.Response(body=page, content_type="text/event-stream", charset="utf-8")
        answer = {"events": found, "last_seq": self._events.last_seq}
        return _json(answer | {"degraded": self._events.degraded})

    async def openapi(self, _request: web.Request, _: models.NoParameters) -> web.Response:
        """This API as an OpenAPI 3.1 document."""
        return _json(self._openapi())

    # ----------------------------------------------------------------- acting

    async def promote(self, request: web.Request, p: models.PromoteParameters) -> web.Response:
        """Planned switchover: streams go on, the old primary becomes the standby."""
        call = self._controller.promote
        return await self._operate(
            request, p, lambda: call(p.group, p.to, p.expected_epoch, p.dry_run)
        )

    async def failover(self, request: web.Request, p: models.PromoteParameters) -> web.Response:
        """Forced failover: the primary is fenced, though it may be well."""
        call = self._controller.failover
        return await self._operate(
            request, p, lambda: call(p.group, p.to, p.expected_epoch, p.dry_run)
        )

    async def evict(self, request: web.Request, p: models.EvictParameters) -> web.Response:
        """A batch engine ends and gives its memory back."""
        engine = request.match_info["engine"]
        return await self._operate(
            request, p, lambda: self._controller.evict(engine, p.hold, p.dry_run)
        )

    async def resume(self, request: web.Request, p: models.ResumeParameters) -> web.Response:
        """An evicted or given-up engine starts again."""
        engine = request.match_info["engine"]
        return await self._operate(request, p, lambda: self._controller.resume(engine, p.dry_run))

    async def freeze(self, request: web.Request, p: models.NoParameters) -> web.Response:
        """A batch engine stops computing at once and keeps its memory."""
        engine = request.match_info["engine"]
        return await self._operate(request, p, lambda: self._controller.freeze(engine))

    async def thaw(self, request: web.Request, p: models.NoParameters) -> web.Response:
        """A frozen engine goes on."""
        engine = request.match_info["engine"]
        return await self._operate(request, p, lambda: self._controller.thaw(engine))

    async def restart(self, request: web.Request, p: models.NoParameters) -> web.Response:
        """An engine is replaced by a new process."""
        engine = request.match_info["engine"]
        return await self._operate(request, p, lambda: self._controller.restart(engine))

    async def fence(self, request: web.Request, p: models.FenceParameters) -> web.Response:
        """An unkillable engine is attested to be harmless; its group goes on without it."""
        engine = request.match_info["engine"]
        return await self._operate(request, p, lambda: self._controller.fence(engine, p.confirm))

    async def pause(self, request: web.Request, p: models.NoParameters) -> web.Response:
        """Automation pauses: nothing is started, stopped or promoted by itself."""
        return await self._operate(request, p, self._controller.pause)

    async def unpause(self, request: web.Request, p: models.NoParameters) -> web.Response:
        """Automation goes on."""
        return await self._operate(request, p, self._controller.unpause)

    async def ack(self, request: web.Request, p: models.AckParameters) -> web.Response:
        """A blocked group may fail over by judgement again, and given-up engines start again."""
        return await self._operate(request, p, lambda: self._controller.ack(p.group))

    async def stop(self, request: web.Request, p: models.NoParameters) -> web.Response:
        """Everything stops, in order."""
        return await self._operate(request, p, self._controller.stop)

    async def _operate(
        self,
        request: web.Request,
        parameters: models.Parameters,
        work: Callable[[], Awaitable[Operation]],
    ) -> web.Response:
        """Carry out one command; it goes on when its caller goes away or loses patience."""
        key = request.headers.get("Idempotency-Key")
        fingerprint = f"{request.path} {parameters.model_dump_json()}"
        done = self.operations.run(key, fingerprint, work)
        return _json({"operation": await _within(OPERATION_TIMEOUT_S, done)})

    def _group(self, name: str | None) -> dict[str, Any]:
        """The status of one group.

        Raises:
            BadRequestError: none is named, and there are several.
            NotFoundError: there is none of this name.
        """
        groups = {group["name"]: group for group in self._controller.status().get("groups", [])}
        if name is None and len(groups) == 1:
            return next(iter(groups.values()))
        if name is None:
            raise BadRequestError(
                "the topology has several groups", hint=f"add ?group= one of {', '.join(groups)}"
            )
        if name not in groups:
            raise _no_group(name, list(groups))
        found: dict[str, Any] = groups[name]
        return found


def _accepted(request: web.Request) -> set[str]:
    """The media types that the client names."""
    header = ",".join(request.headers.getall("Accept", []))
    return {part.partition(";")[0].strip().lower() for part in header.split(",")} - {""}


def _fit(group: dict[str, Any], names: list[str | None]) -> str | None:
    """The first of these engines that is not known to be hung or dead."""
    verdicts = {e.get("name"): str(e.get("verdict", "")).lower() for e in group.get("engines", [])}
    return next((name for name in names if name and verdicts.get(name) not in _UNFIT), None)


def _role_answer(group: dict[str, Any], engine: str | None) -> web.Response:
    answer = {"group": group["name"], "engine": engine, "epoch": group.get("epoch")}
    return _json(answer, status=503 if engine is None else 200)


def _no_group(name: str, known: list[str]) -> NotFoundError:
    return NotFoundError(f"there is no group {name!r}", hint=f"groups: {', '.join(known)}")


def _json(value: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value, enc_hook=str)
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def _within(timeout_s: float, call: Awaitable[T]) -> T:
    """The answer of the controller, or a problem when it takes too long."""
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await call
    except TimeoutError:
        if not scope.expired():
            raise
        raise TimedOutError(
            f"the supervisor did not answer within {timeout_s:g} s",
            hint="GET /v1/history tells what became of a command",
        ) from None
