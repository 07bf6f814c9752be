"""Errors as RFC 9457 problem documents: `application/problem+json` with `code` and `hint`.

One place decides how an exception becomes an answer. What is not one of ours says no more than
`internal`: a traceback belongs into the log, not to the caller.
"""

import re
from typing import Any, ClassVar, Final

import msgspec
from aiohttp import web

from supervisor.errors import SupervisorError, UnderstudyError

__all__ = [
    "CONTENT_TYPE",
    "AdminApiError",
    "BadRequestError",
    "ForbiddenError",
    "IdempotencyKeyReusedError",
    "LimitReachedError",
    "TimedOutError",
    "UnauthorizedError",
    "problem_of",
    "problem_response",
]

CONTENT_TYPE: Final = "application/problem+json"


class AdminApiError(SupervisorError):
    """Base of what the admin API itself refuses, before the supervisor is asked."""

    code = "admin_api"
    http_status = 400
    headers: ClassVar[dict[str, str]] = {}


class BadRequestError(AdminApiError):
    """The request is malformed: not JSON, an unknown field, a value of the wrong type."""

    code = "bad_request"
    exit_code = 2


class UnauthorizedError(AdminApiError):
    """The request needs the bearer token of `state_dir/admin.token`, and has none or another."""

    code = "unauthorized"
    http_status = 401
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": 'Bearer realm="understudy"'}


class ForbiddenError(AdminApiError):
    """The request comes from a place that may not ask: another user, or a foreign web page."""

    code = "forbidden"
    http_status = 403


class IdempotencyKeyReusedError(AdminApiError):
    """The Idempotency-Key was used for another request within the last ten minutes."""

    code = "idempotency_key_reused"
    http_status = 422


class LimitReachedError(AdminApiError):
    """A bound of the admin API is reached: connections, event streams or remembered keys."""

    code = "limit_reached"
    http_status = 503
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


class TimedOutError(AdminApiError):
    """The supervisor did not finish in time; what was begun goes on."""

    code = "admin_timeout"
    http_status = 504


_HTTP_HINTS: Final = {
    404: "GET /openapi.json lists every path",
    405: "GET /openapi.json lists the methods of every path",
    413: "a request body may have 64 KiB",
}


def problem_of(error: BaseException) -> dict[str, Any]:
    """The problem document of an exception."""
    if isinstance(error, UnderstudyError):
        title = re.sub(r"[_-]+", " ", error.stable_code).capitalize()
        document = _document(error.http_status, error.stable_code, title)
        document |= {"detail": error.message, "hint": error.hint}
        if error.details:
            document["details"] = error.details
        return document
    if isinstance(error, web.HTTPException):
        code = re.sub(r"\W+", "_", error.reason.lower())
        document = _document(error.status, code, error.reason)
        return document | {"detail": error.reason, "hint": _HTTP_HINTS.get(error.status, "")}
    document = _document(500, "internal", "Internal")
    detail = "the supervisor failed on this request; its log says why"
    return document | {"detail": detail, "hint": "report it with the log of this moment"}


def problem_response(error: BaseException) -> web.Response:
    """The answer to a request that failed with this exception."""
    document = problem_of(error)
    headers = dict(error.headers) if isinstance(error, AdminApiError | web.HTTPException) else {}
    kept = {k: v for k, v in headers.items() if k.lower() not in {"content-type", "content-length"}}
    body = msgspec.json.encode(document, enc_hook=str)
    return web.Response(
        status=document["status"], body=body, content_type=CONTENT_TYPE, headers=kept
    )


def _document(status: int, code: str, title: str) -> dict[str, Any]:
    return {
        "type": f"urn:understudy:problem:{code}",
        "title": title,
        "status": status,
        "code": code,
    }
