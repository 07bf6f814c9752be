"""Reads the parameters of a request from its query and its JSON body, with bounds and deadlines."""

import asyncio
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from pydantic import ValidationError

from supervisor.admin.models import Parameters
from supervisor.admin.problems import AdminApiError, BadRequestError, TimedOutError

__all__ = ["BODY_TIMEOUT_S", "MAX_BODY_BYTES", "BodyNotJsonError", "read_parameters"]

MAX_BODY_BYTES: Final = 64 << 10
BODY_TIMEOUT_S: Final = 10.0

T = TypeVar("T", bound=Parameters)


class BodyNotJsonError(AdminApiError):
    """The body of a request is not `application/json`."""

    code = "unsupported_media_type"
    http_status = 415


async def read_parameters(
    request: web.Request, kind: type[T], *, timeout_s: float = BODY_TIMEOUT_S
) -> T:
    """The checked parameters of this request.

    Raises:
        BadRequestError: an unknown name, a wrong value, or one given twice.
        BodyNotJsonError: a body of another type.
        TimedOutError: the body did not arrive in time.
    """
    values: dict[str, Any] = {}
    for name, value in request.query.items():
        if name in values:
            raise BadRequestError(f"the parameter {name[:100]!r} is given twice")
        values[name] = value
    for name, value in (await _body(request, timeout_s)).items():
        if name in values:
            raise BadRequestError(f"the parameter {name[:100]!r} is in the query and in the body")
        values[name] = value
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _bad_parameters(kind, error) from None


async def _body(request: web.Request, timeout_s: float) -> dict[str, Any]:
    if not request.body_exists:
        return {}
    try:
        async with asyncio.timeout(timeout_s):
            raw = await request.read()
    except TimeoutError:
        raise TimedOutError(f"the body did not arrive within {timeout_s:g} s") from None
    if not raw:
        return {}
    if request.content_type != "application/json":
        raise BodyNotJsonError(
            f"the body is {request.content_type}, not application/json",
            hint="send 'Content-Type: application/json', or no body",
        )
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body is JSON, but no object", hint='send {"name": value}')
    return body


def _bad_parameters(kind: type[Parameters], error: ValidationError) -> BadRequestError:
    found = [
        {"name": ".".join(str(part) for part in each["loc"])[:100], "message": each["msg"]}
        for each in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    names = ", ".join(kind.model_fields) or "none"
    text = "; ".join(f"{each['name']}: {each['message']}" for each in found[:5])
    return BadRequestError(
        f"parameters are wrong: {text}",
        hint=f"parameters of this request: {names}",
        details={"parameters": found[:50]},
    )
