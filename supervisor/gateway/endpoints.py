"""The HTTP surface: which paths exist, reading bodies, and one request from head to last byte.

Only the listed paths are served. Every error has OpenAI's shape. `x-request-id` is the client's
own, if it sent a sane one, else ours; it is never the id that engines know.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from aiohttp import web

from supervisor.gateway.counters import Counters, ModelCounters
from supervisor.gateway.errors import ApiError
from supervisor.gateway.limits import BODY_TIMEOUT_S
from supervisor.gateway.openai_api import (
    Kind,
    ParsedRequest,
    decode_object,
    model_of,
    parse_request,
)
from supervisor.gateway.responses import Answer, model_list, model_object
from supervisor.gateway.routes import ServedModel
from supervisor.gateway.server import SERVER_HEADER, ClientConnection
from supervisor.gateway.sse import SseSink, TextSink, send_whole
from supervisor.gateway.stream import EngineStream, StreamContext

__all__ = ["Endpoints"]

log = logging.getLogger(__name__)

_GENERATE: Final[dict[str, Kind]] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
}
_MODELS: Final = "/v1/models"
_SANE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class _Exchange:
    """One request while it is handled."""

    request: web.BaseRequest
    request_id: str
    started_at: float
    counters: ModelCounters


class Endpoints:
    """Handles requests; `handle` is the HTTP server's handler."""

    def __init__(
        self, context: StreamContext, counters: Counters, *, is_draining: Callable[[], bool]
    ) -> None:
        self._context = context
        self._limits = context.limits
        self._counters = counters
        self._is_draining = is_draining

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request, whatever it is."""
        sent_id = request.headers.get("x-request-id", "")
        request_id = sent_id if _SANE_ID.fullmatch(sent_id) else secrets.token_hex(16)
        exchange = _Exchange(request, request_id, time.perf_counter(), self._counters.of(""))
        connection = request.protocol
        if isinstance(connection, ClientConnection):
            connection.is_busy = True
        try:
            return await self._answer(exchange)
        finally:
            if isinstance(connection, ClientConnection):
                connection.is_busy = False
                if self._is_draining():
                    connection.close()  # this answer may have promised to keep it open

    async def _answer(self, exchange: _Exchange) -> web.StreamResponse:
        try:
            return await self._dispatch(exchange)
        except ApiError as error:
            exchange.counters.refused[str(error.status)] += 1
            response = self._json(exchange, error.body, status=error.status, more=error.headers)
            if not exchange.request.content.is_eof():
                response.force_close()  # what is left of the body is not worth reading
        except (ConnectionError, asyncio.CancelledError):
            exchange.counters.cancelled += 1
            raise
        return await self._send(exchange, response)

    async def _dispatch(self, exchange: _Exchange) -> web.StreamResponse:
        request = exchange.request
        path, method = request.path, request.method
        if (kind := _GENERATE.get(path)) is not None:
            if method != "POST":
                raise _wrong_method(path, "POST")
            return await self._generate(exchange, kind)
        if path == _MODELS or (path.startswith(_MODELS + "/") and path != _MODELS + "/"):
            if method not in ("GET", "HEAD"):
                raise _wrong_method(path, "GET, HEAD")
            return await self._models(exchange, path.removeprefix(_MODELS).removeprefix("/"))
        raise ApiError(404, "not_found", f"there is nothing at {path[:200]}")

    async def _models(self, exchange: _Exchange, model_id: str) -> web.StreamResponse:
        await self._table_known()
        if not model_id:
            body = model_list(self._context.table.models)
        else:
            body = model_object(self._find(model_id))
        return await self._send(exchange, self._json(exchange, body))

    async def _generate(self, exchange: _Exchange, kind: Kind) -> web.StreamResponse:
        data = await self._read_body(exchange.request)
        fields = decode_object(data)
        model_id = model_of(fields)
        await self._table_known()
        model = self._find(model_id)
        exchange.counters = self._counters.of(model.id)
        parsed = parse_request(kind, fields, max_length=model.max_length)
        exchange.counters.requests += 1
        exchange.counters.streams_open += 1
        try:
            if parsed.stream:
                return await self._streamed(exchange, parsed, model)
            return await self._assembled(exchange, parsed, model)
        finally:
            exchange.counters.streams_open -= 1

    async def _streamed(
        self, exchange: _Exchange, parsed: ParsedRequest, model: ServedModel
    ) -> web.StreamResponse:
        counters = exchange.counters
        sink = SseSink(
            exchange.request,
            _answer_of(parsed, model),
            headers={**SERVER_HEADER, "x-request-id": exchange.request_id},
            timeout_s=self._limits.client_timeout_s,
        )
        if self._is_draining():
            sink.response.force_close()
        stream = self._stream(parsed, model, counters, sink)
        try:
            end = await stream.run()
        except ApiError as error:
            if not sink.is_open:
                raise
            await sink.fail(error)
            counters.failed += 1
            return sink.response
        finally:
            self._observe(exchange, stream)
        await sink.finish(end)
        counters.completed += 1
        return sink.response

    async def _assembled(
        self, exchange: _Exchange, parsed: ParsedRequest, model: ServedModel
    ) -> web.StreamResponse:
        sink = TextSink()
        stream = self._stream(parsed, model, exchange.counters, sink)
        try:
            end = await stream.run()
        finally:
            self._observe(exchange, stream)
        body = _answer_of(parsed, model).whole(sink.whole, end)
        response = await self._send(exchange, self._response(exchange, body))
        exchange.counters.completed += 1
        return response

    def _stream(
        self,
        parsed: ParsedRequest,
        model: ServedModel,
        counters: ModelCounters,
        sink: SseSink | TextSink,
    ) -> EngineStream:
        return EngineStream(
            self._context,
            model=model,
            body=parsed.body,
            seed=parsed.seed,
            counters=counters,
            sink=sink,
        )

    def _observe(self, exchange: _Exchange, stream: EngineStream) -> None:
        if stream.first_token_at is None or stream.sent_at is None:
            return
        exchange.counters.ttft.observe(stream.first_token_at - exchange.started_at)
        if not stream.waited:
            own_s = stream.sent_at - exchange.started_at + stream.first_text_s
            exchange.counters.overhead.observe(own_s)

    async def _table_known(self) -> None:
        if self._context.table.is_known:
            return
        with self._context.parking.place():
            try:
                await self._context.table.wait_known(timeout_s=self._limits.park_timeout_s)
            except TimeoutError:
                raise ApiError(
                    503, "no_routes", "the gateway has no routes yet", retry_after_s=5.0
                ) from None

    def _find(self, model_id: str) -> ServedModel:
        model = self._context.table.find(model_id)
        if model is None:
            raise ApiError(
                404, "model_not_found", f"the model {model_id[:200]!r} does not exist",
                param="model",
            )  # fmt: skip
        return model

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        limit = self._limits.max_body_bytes
        too_large = ApiError(413, "body_too_large", f"the body may have at most {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            raise ApiError(415, "unsupported_encoding", "send the body without a content encoding")
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # nothing of the answer itself was sent
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except TimeoutError:
            raise ApiError(
                408, "body_timeout", f"the body was not complete after {BODY_TIMEOUT_S:g} s"
            ) from None
        except web.RequestPayloadError as error:
            raise ApiError.invalid(
                f"the body is malformed: {error}", param=None, code="bad_request"
            ) from error

    def _json(
        self,
        exchange: _Exchange,
        body: dict[str, object],
        *,
        status: int = 200,
        more: dict[str, str] | None = None,
    ) -> web.Response:
        return self._response(exchange, msgspec.json.encode(body), status=status, more=more)

    def _response(
        self,
        exchange: _Exchange,
        body: bytes,
        *,
        status: int = 200,
        more: dict[str, str] | None = None,
    ) -> web.Response:
        headers = {**SERVER_HEADER, "x-request-id": exchange.request_id, **(more or {})}
        response = web.Response(
            body=body, status=status, headers=headers, content_type="application/json"
        )
        if self._is_draining():
            response.force_close()
        return response

    async def _send(self, exchange: _Exchange, response: web.Response) -> web.Response:
        timeout_s = self._limits.client_timeout_s
        return await send_whole(exchange.request, response, timeout_s=timeout_s)


def _wrong_method(path: str, allow: str) -> ApiError:
    return ApiError(405, "method_not_allowed", f"{path} takes {allow}", allow=allow)


def _answer_of(parsed: ParsedRequest, model: ServedModel) -> Answer:
    return Answer(
        parsed.kind,
        model=model.id,
        created=int(time.time()),
        include_usage=parsed.include_usage,
    )
