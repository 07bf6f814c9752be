"""What a client is told when its request cannot be served, in the shape of OpenAI's API.

Two kinds live here. `ApiError` is for clients: status, type, param and code of OpenAI's error
body. The others are for the resume machine: one attempt at one engine is over, and the request
looks for the next route; a client never sees them.
"""

import math
from http import HTTPStatus
from typing import Any

from engines.contract import GenerateError
from supervisor.errors import SupervisorError

__all__ = [
    "ApiError",
    "AttemptFailedError",
    "EngineLostError",
    "RefusedForNowError",
    "RouteCutError",
    "StaleEpochError",
    "StreamViolationError",
]


class ApiError(SupervisorError):
    """The request is refused, or its stream ends with an error event.

    `param` names the field of the request that is wrong.
    """

    code = "api_error"

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.api_code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow  # for 405: the methods that the path knows

    @classmethod
    def invalid(cls, message: str, *, param: str | None, code: str = "invalid_value") -> "ApiError":
        """A 400: the client sent something that this API does not take."""
        return cls(HTTPStatus.BAD_REQUEST, code, message, param=param)

    @classmethod
    def from_engine(cls, error: GenerateError, *, param: str) -> "ApiError":
        """The engine's refusal; its text is meant for clients."""
        status = error.status if 400 <= error.status <= 599 else 500
        return cls(
            status,
            error.code,
            error.message,
            param=param if status == HTTPStatus.BAD_REQUEST else None,
            retry_after_s=error.retry_after_s,
        )

    @property
    def stable_code(self) -> str:
        """The code in the error body."""
        return self.api_code

    @property
    def kind(self) -> str:
        """OpenAI's `type` of this error."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients parse it."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.api_code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least one, where waiting helps; `Allow` for a 405."""
        headers = {}
        retry_after_s = self.retry_after_s
        if retry_after_s is None and self.status == HTTPStatus.TOO_MANY_REQUESTS:
            retry_after_s = 1.0
        if retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        if self.allow:
            headers["Allow"] = self.allow
        return headers


class StaleEpochError(SupervisorError):
    """A routing table names a lower epoch than the one in force: an old supervisor sent it."""

    code = "stale_epoch"

    def __init__(self, group: str, *, offered: int, in_force: int) -> None:
        super().__init__(
            f"group {group}: epoch {offered} is older than epoch {in_force}, which is in force",
            hint="another supervisor has taken over, or state.json was lost",
        )


class AttemptFailedError(SupervisorError):
    """One attempt at one engine is over; the request may go on at the next route."""

    code = "attempt_failed"


class EngineLostError(AttemptFailedError):
    """The engine is not reachable, closed the connection, or sent what nobody understands."""

    code = "engine_lost"


class RouteCutError(AttemptFailedError):
    """The supervisor took the engine out of the table."""

    code = "route_cut"


class RefusedForNowError(AttemptFailedError):
    """The engine cannot serve this request now, and says that another attempt may succeed."""

    code = "refused_for_now"


class PromptNeededError(RefusedForNowError):
    """The engine has no slot of this stream, and was not told the ids of its prompt."""

    code = "prompt_needed"


class StreamViolationError(AttemptFailedError):
    """The engine's frames do not continue what the client has got."""

    code = "stream_violation"
