"""The request side of OpenAI's API: what is taken, what is refused, and the words for it.

A field is in one of four classes:

taken      checked by the structs below.
idle       part of OpenAI's API without a meaning here (`user`, `metadata`): ignored.
refused    would change the answer in a way no engine here can: an error that names the field,
           unless its value is the one that changes nothing (`n: 1`, `logprobs: null`).
unknown    an error with the nearest known name: a misspelt `temprature` must not be ignored.

A field whose value is null counts as absent. Extensions to OpenAI's API: `top_k`, `ignore_eos`;
`max_tokens` and `seed` are taken by both endpoints.
"""

import difflib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from engines.contract import GenerateBody
from supervisor.gateway.errors import ApiError

__all__ = ["Kind", "ParsedRequest", "decode_object", "model_of", "parse_request"]

Kind = Literal["completion", "chat"]

_Shape = TypeVar("_Shape", bound=msgspec.Struct)

_SEED_MASK: Final = (1 << 63) - 1
_MAX_TOKEN_ID: Final = (1 << 32) - 1
_MAX_STOPS: Final = 4

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = 0
    stop: str | list[str] = []
    seed: _Int64 | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False


class _Completion(_Common, frozen=True, kw_only=True):
    prompt: str | list[Any]


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    name: str | None = None


class _Chat(_Common, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None


_IDLE_COMMON: Final = frozenset({"user"})
_IDLE_CHAT: Final = _IDLE_COMMON | {
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls",
}  # fmt: skip
_IDLE_MESSAGE: Final = frozenset({"refusal", "annotations"})


def _is_one(value: object) -> bool:
    return value == 1 and not isinstance(value, bool)


def _is_zero(value: object) -> bool:
    return value == 0 and not isinstance(value, bool)


def _is_false(value: object) -> bool:
    return value is False


def _is_empty(value: object) -> bool:
    return value in ("", [], {})


def _is_plain_format(value: object) -> bool:
    return value == {"type": "text"}


def _is_text_only(value: object) -> bool:
    return value == ["text"]


def _is_no_choice(value: object) -> bool:
    return value in ("none", "auto")


def _never(_value: object) -> bool:
    return False


_Harmless = Callable[[object], bool]
_REFUSED_COMMON: Final[dict[str, _Harmless]] = {
    "n": _is_one,
    "logit_bias": _is_empty,
    "presence_penalty": _is_zero,
    "frequency_penalty": _is_zero,
}
_REFUSED_COMPLETION: Final[dict[str, _Harmless]] = _REFUSED_COMMON | {
    "best_of": _is_one,
    "echo": _is_false,
    "logprobs": _is_false,
    "suffix": _is_empty,
}
_REFUSED_CHAT: Final[dict[str, _Harmless]] = _REFUSED_COMMON | {
    "audio": _never,
    "function_call": _is_no_choice,
    "functions": _is_empty,
    "logprobs": _is_false,
    "modalities": _is_text_only,
    "moderation": _never,
    "prediction": _never,
    "reasoning_effort": _never,
    "response_format": _is_plain_format,
    "tool_choice": _is_no_choice,
    "tools": _is_empty,
    "top_logprobs": _is_zero,
    "verbosity": _never,
    "web_search_options": _never,
}
_REFUSED_MESSAGE: Final[dict[str, _Harmless]] = {
    "audio": _never,
    "function_call": _never,
    "tool_call_id": _never,
    "tool_calls": _is_empty,
}

_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that is valid for what the gateway can tell; the engine counts the tokens."""

    kind: Kind
    model: str
    body: GenerateBody
    seed: int
    stream: bool
    include_usage: bool


def decode_object(data: bytes) -> dict[str, Any]:
    """The body as a JSON object, without the fields that are null.

    Raises:
        ApiError: 400.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError.invalid(
            f"the body is not valid JSON: {error}", param=None, code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise ApiError.invalid("the body must be a JSON object", param=None, code="invalid_json")
    return {name: field for name, field in value.items() if field is not None}


def model_of(fields: dict[str, Any]) -> str:
    """The model id.

    Raises:
        ApiError: 400.
    """
    model = fields.get("model")
    if model is None:
        raise ApiError.invalid(
            "you must provide a model", param="model", code="missing_required_parameter"
        )
    if not isinstance(model, str):
        raise ApiError.invalid("model must be a string", param="model", code="invalid_type")
    return model


def parse_request(kind: Kind, fields: dict[str, Any], *, max_length: int) -> ParsedRequest:
    """Check the fields of a request and translate them for the engine.

    Args:
        kind: which endpoint.
        fields: what `decode_object` returned.
        max_length: tokens that one stream of this model may hold.

    Raises:
        ApiError: 400, naming the field.
    """
    request: _Chat | _Completion
    if kind == "chat":
        _check_names(fields, _Chat, _IDLE_CHAT, _REFUSED_CHAT, at="")
        request = _convert(fields, _Chat, at="")
        prompt, messages = None, _messages(request.messages)
        max_tokens = _max_tokens(request)
    else:
        _check_names(fields, _Completion, _IDLE_COMMON, _REFUSED_COMPLETION, at="")
        request = _convert(fields, _Completion, at="")
        prompt, messages = _prompt(request.prompt, max_length), None
        max_tokens = request.max_tokens
    if request.stream_options is not None and not request.stream:
        raise ApiError.invalid(
            "stream_options may only be given together with stream: true", param="stream_options"
        )
    # top_p = 0 keeps the likeliest token alone, which is what temperature 0 means.
    greedy = request.top_p == 0
    body = GenerateBody(
        kind=kind,
        prompt=prompt,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0.0 if greedy else request.temperature,
        top_p=1.0 if greedy else request.top_p,
        top_k=max(0, request.top_k),
        stop=_stops(request.stop),
        ignore_eos=request.ignore_eos,
    )
    return ParsedRequest(
        kind=kind,
        model=request.model,
        body=body,
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def _check_names(
    fields: dict[str, Any],
    shape: type[msgspec.Struct],
    idle: frozenset[str],
    refused: dict[str, _Harmless],
    *,
    at: str,
) -> None:
    taken = shape.__struct_fields__
    for name, value in fields.items():
        if name in taken or name in idle:
            continue
        if name in refused:
            if refused[name](value):
                continue
            ending = "" if refused[name] is _never else " with this value"
            raise ApiError.invalid(
                f"{at}{name} is not supported{ending}",
                param=at + name,
                code="unsupported_parameter",
            )
        known = [*taken, *idle, *refused]
        near = difflib.get_close_matches(name[:64], known, n=1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        raise ApiError.invalid(
            f"unrecognized parameter {at}{name[:64]}{suggestion}",
            param=at + name[:64],
            code="unknown_parameter",
        )


def _convert(fields: dict[str, Any], shape: type[_Shape], *, at: str) -> _Shape:
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        text = str(error)
        if missing := _MISSING.search(text):
            name = at + missing[1]
            raise ApiError.invalid(
                f"you must provide {name}", param=name, code="missing_required_parameter"
            ) from error
        path = _PATH.search(text)
        name = at + path[1] if path else at.rstrip(".")
        reason = _PATH.sub("", text).replace("`", "")
        raise ApiError.invalid(
            f"{name}: {reason[:1].lower()}{reason[1:]}", param=name or None, code="invalid_type"
        ) from error


def _max_tokens(request: _Chat) -> int | None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError.invalid(
            "max_tokens and max_completion_tokens mean the same; give one of them",
            param="max_tokens",
        )
    return request.max_completion_tokens or request.max_tokens


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MAX_STOPS:
        raise ApiError.invalid(f"stop: at most {_MAX_STOPS} sequences", param="stop")
    if not all(stops):
        raise ApiError.invalid("stop: an empty sequence would stop at once", param="stop")
    return stops


def _prompt(prompt: str | list[Any], max_length: int) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise ApiError.invalid("prompt is empty", param="prompt")
    if isinstance(prompt[0], str | list):  # a batch of prompts; of one, it is that one
        if len(prompt) > 1:
            raise ApiError.invalid(
                "prompt: one prompt per request; send several requests instead",
                param="prompt",
                code="unsupported_parameter",
            )
        return _prompt(prompt[0], max_length)
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ApiError.invalid(
                "prompt must be a string or a list of token ids",
                param="prompt",
                code="invalid_type",
            )
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise ApiError.invalid(f"prompt: {token_id} is not a token id", param="prompt")
    if len(prompt) >= max_length:
        raise ApiError.invalid(
            f"this model's context holds {max_length} tokens, the prompt alone has {len(prompt)}",
            param="prompt",
            code="context_length_exceeded",
        )
    return prompt


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain = []
    for number, raw in enumerate(messages):
        at = f"messages[{number}]."
        fields = {name: value for name, value in raw.items() if value is not None}
        _check_names(fields, _Message, _IDLE_MESSAGE, _REFUSED_MESSAGE, at=at)
        message = _convert(fields, _Message, at=at)
        # Chat templates know no `developer`: it is the newer name of the same role.
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": _content(message.content, at=at)}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


def _content(content: str | list[dict[str, Any]], *, at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        name = f"{at}content[{number}]"
        if part.get("type") != "text":
            raise ApiError.invalid(
                f"{name}.type: only parts of type text are supported",
                param=f"{name}.type",
                code="unsupported_parameter",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise ApiError.invalid(
                f"{name}.text must be a string", param=f"{name}.text", code="invalid_type"
            )
        texts.append(text)
    return "".join(texts)
