"""The answer side of OpenAI's API: objects and server-sent events, as bytes. Pure.

A chunk of a stream differs from the next one only in its text, so everything around the text is
encoded once per answer.
"""

import secrets
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engines.contract import End, Usage
from supervisor.gateway.openai_api import Kind
from supervisor.gateway.routes import ServedModel

__all__ = ["DONE", "Answer", "event", "model_list", "model_object"]

DONE: Final = b"data: [DONE]\n\n"
_OWNER: Final = "understudy"

_encode: Final = msgspec.json.Encoder().encode


def event(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(payload) + b"\n\n"


def model_object(model: ServedModel) -> dict[str, Any]:
    """A model, as `/v1/models/{id}` shows it."""
    return {"id": model.id, "object": "model", "created": model.created, "owned_by": _OWNER}


def model_list(models: list[ServedModel]) -> dict[str, Any]:
    """All models, as `/v1/models` shows them."""
    return {"object": "list", "data": [model_object(model) for model in models]}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class _Frame:
    """The bytes around a chunk's text."""

    head: bytes
    tail: bytes


class Answer:
    """The identity of one answer, the same over however many engines produce it."""

    def __init__(self, kind: Kind, *, model: str, created: int, include_usage: bool) -> None:
        self.kind = kind
        self.include_usage = include_usage
        prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
        self._base = {
            "id": prefix + secrets.token_hex(12),
            "created": created,
            "model": model,
        }
        self._frame: _Frame | None = None

    def opening(self) -> bytes:
        """What comes before the first text: the role, for a chat."""
        if self.kind == "completion":
            return b""
        return event(self._chunk({"role": "assistant", "content": "", "refusal": None}, None))

    def text(self, text: str) -> bytes:
        """A chunk with text."""
        if self._frame is None:
            mark = "\x00"
            delta: object = {"content": mark} if self.kind == "chat" else mark
            head, tail = event(self._chunk(delta, None)).split(_encode(mark))
            self._frame = _Frame(head, tail)
        return self._frame.head + _encode(text) + self._frame.tail

    def closing(self, end: End) -> bytes:
        """The last chunk, the usage if it was asked for, and the end mark."""
        delta: object = {} if self.kind == "chat" else ""
        last = event(self._chunk(delta, end.finish_reason))
        if not self.include_usage:
            return last + DONE
        usage = {**self._chunk_base(), "choices": [], "usage": _usage(end.usage)}
        return last + event(usage) + DONE

    def whole(self, text: str, end: End) -> bytes:
        """The complete answer of a request without streaming."""
        choice: dict[str, Any] = {"index": 0}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": end.finish_reason}
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return _encode(
            {**self._base, "object": name, "choices": [choice], "usage": _usage(end.usage)}
        )

    def _chunk_base(self) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._base, "object": name}

    def _chunk(self, delta: object, finish_reason: str | None) -> dict[str, Any]:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": 0, key: delta, "logprobs": None, "finish_reason": finish_reason}
        chunk: dict[str, Any] = {**self._chunk_base(), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk
