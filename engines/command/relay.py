"""One request of a gateway, asked of the server over HTTP as a stream, and its answer as frames.

Invariants
    1. What the server sends is taken at once and handed on; a client that does not read stops its
       own request (`TooSlowError`), never the server.
    2. `End` is sent only when the server has said that the answer is complete. Anything else is an
       error frame or a cut: what is lost is never taken for the end.
    3. 4xx is the client's, 429 and 503 mean a full server: they are handed on as they are.

WARNING: only text is relayed. What OpenAI's API has beside it (tools, log probabilities, more than
one choice) is refused by the gateway already; reasoning that a server sends apart is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import msgspec

from engines.command.api import HttpEngine
from engines.command.progress import Progress
from engines.contract import (
    Accepted,
    Delta,
    End,
    EngineFrame,
    Generate,
    GenerateBody,
    GenerateError,
    Usage,
)

__all__ = ["EventReader", "Relay", "ServerLostError", "TooSlowError", "request_of"]

_OK: Final = 200
_MAX_EVENT_BYTES: Final = 1 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_SEED_MASK: Final = (1 << 31) - 1
"""Some servers take 32 bits only; the same seed still gives the same one."""


class TooSlowError(Exception):
    """The gateway does not take what the server sends."""


class ServerLostError(Exception):
    """The server has not answered to the end: it may have died of the request."""


class _BrokenAnswerError(Exception):
    """The server's answer is not what OpenAI's API says."""


class _SaidError(Exception):
    """The server says in its answer that there is none: asking again would hear it again."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__()
        self.body = body


def request_of(body: GenerateBody, *, seed: int, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body for the server; extensions of OpenAI's API only where they are used."""
    fields: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": body.temperature,
        "top_p": body.top_p,
    }
    if body.temperature > 0:
        fields["seed"] = seed & _SEED_MASK
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    if body.stop:
        fields["stop"] = body.stop
    if body.top_k > 0:
        fields["top_k"] = body.top_k
    if body.ignore_eos:
        fields["ignore_eos"] = True
    if body.kind == "chat":
        return "/v1/chat/completions", {**fields, "messages": body.messages}
    return "/v1/completions", {**fields, "prompt": body.prompt}


class EventReader:
    """Cuts a body into the data of server-sent events. Pure."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now.

        Raises:
            _BrokenAnswerError: one is too long.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise _BrokenAnswerError("an event is too long")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(slots=True)
class _Answer:
    """What has come of one answer."""

    chars: int = 0
    pieces: int = 0
    finish_reason: str = ""
    usage: Usage | None = None
    is_done: bool = False

    def take(self, data: bytes) -> str:
        """One event; returns its text.

        Raises:
            _SaidError: it is an error of the server's.
            _BrokenAnswerError: nobody understands it.
        """
        if data == b"[DONE]":
            self.is_done = True
            return ""
        try:
            event = msgspec.json.decode(data)
            if event.get("error") is not None or event.get("object") == "error":
                raise _SaidError(event)
            self._take_usage(event.get("usage"))
            if not event["choices"]:
                return ""
            choice = event["choices"][0]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
        except (
            msgspec.MsgspecError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise _BrokenAnswerError(f"an event that nobody understands: {error!r}") from error
        if not text:
            return ""
        if not isinstance(text, str):
            raise _BrokenAnswerError("an event whose text is none")
        self.pieces += 1
        self.chars += len(text)
        return text

    def _take_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt, int) and isinstance(made, int):
                self.usage = Usage(prompt, made)

    def end(self) -> End:
        """The last frame.

        Raises:
            ServerLostError: it just ended. Without a length this is also how a death looks.
            _BrokenAnswerError: the server has not said that it is complete.
        """
        if not self.finish_reason and not self.is_done:
            raise ServerLostError("the answer broke off")
        if not self.finish_reason or self.finish_reason in ("abort", "error"):
            raise _BrokenAnswerError("the answer broke off")
        reason: Literal["stop", "length"] = "length" if self.finish_reason == "length" else "stop"
        # One piece is about one token where the server does not count.
        return End(reason, self.usage or Usage(0, self.pieces))


class Relay:
    """Asks the server what gateways ask."""

    def __init__(self, server: HttpEngine, model: str, progress: Progress) -> None:
        self._server = server
        self._model = model
        self._progress = progress

    async def run(self, frame: Generate, send: Callable[[EngineFrame], None]) -> None:
        """Answer one request; the last frame is an `End` or a `GenerateError`.

        Raises:
            ServerLostError: the connection is to be cut, as if this process had died.
            TooSlowError: by `send`.
            CancelledError: the gateway is gone; the server is told by the closed connection.
        """
        # At once: a request may wait in the server's queue for minutes, and is in good hands.
        send(Accepted([], frame.epoch, "fresh", exact=False, resumable=False))
        path, body = request_of(frame.body, seed=frame.seed, model=self._model)
        with self._progress.awaited():
            try:
                async with self._server.post(path, body) as response:
                    if response.status != _OK or response.content_type == "application/json":
                        send(await _refusal(response))
                        return
                    send(await self._stream(response, send))
            except _SaidError as error:
                send(_error_of(_status_of(error.body), _message_of(error.body)))
            except _BrokenAnswerError as error:
                send(GenerateError("engine_failed", str(error), resumable=True))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ServerLostError(str(error) or type(error).__name__) from error

    async def _stream(
        self, response: aiohttp.ClientResponse, send: Callable[[EngineFrame], None]
    ) -> End:
        reader, answer = EventReader(), _Answer()
        async for piece in response.content.iter_any():
            for data in reader.feed(piece):
                if text := answer.take(data):
                    self._progress.piece()
                    send(Delta(0, [], text, answer.chars))
            if answer.is_done:
                break
        return answer.end()


async def _refusal(response: aiohttp.ClientResponse) -> GenerateError:
    """What the server says instead of an answer, as the client shall hear it."""
    data = await response.content.read(_MAX_ERROR_BYTES)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        body = None
    retry_after = response.headers.get("Retry-After", "")
    wait_s = float(retry_after) if retry_after.isdecimal() else 1.0
    if response.status == _OK:
        message = _message_of(body) or "the server did not answer with a stream"
        return _error_of(_status_of(body), message, wait_s)
    return _error_of(response.status, _message_of(body), wait_s)


def _error_of(status: int, message: str, wait_s: float = 1.0) -> GenerateError:
    message = message or f"the server answered {status}"
    if status in (429, 503):
        code = "queue_full" if status == 429 else "server_busy"
        return GenerateError(code, message, status=status, retry_after_s=wait_s)
    if 400 <= status < 500:
        is_long = "context length" in message or "context_length" in message
        code = "context_length_exceeded" if is_long else "invalid_request"
        return GenerateError(code, message, status=400 if status in (404, 405) else status)
    return GenerateError("server_error", message, status=status if status >= 500 else 502)


def _status_of(body: object) -> int:
    """The status that an error in a body stands for, where it is said: else the server failed."""
    inner = body.get("error", body) if isinstance(body, dict) else None
    code = inner.get("code") if isinstance(inner, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 502


def _message_of(body: object) -> str:
    """The sentence of an error body, whichever of the common shapes it has."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else inner
        if isinstance(message, str):
            return message[:2000]
    return ""
