"""A request before it gets a slot: rendered, tokenised, checked, its limits worked out.

Preparing is a pure function of the `Generate` frame and the model's files, and the only place
where a request is refused for what it says. A resume is never rendered again: it brings ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cache.slots import MAX_PARAMS_BYTES, REQUEST_ID_BYTES
from engines.contract import Generate, GenerateBody
from engines.native.errors import ContextLengthExceededError, InvalidRequestError
from engines.native.skeleton import Skeleton

__all__ = ["PreparedRequest", "RequestPreparer", "RowParams"]

_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for completions."""

_params_encoder: Final = msgspec.json.Encoder()


class RowParams(msgspec.Struct, frozen=True):
    """What a successor must know to continue a stream; lies in the slot table beside the ids."""

    gateway: str
    seed: int
    max_tokens: int  # output tokens, already bounded by the slot
    temperature: float
    top_p: float
    top_k: int
    stop: list[str]
    ignore_eos: bool

    def encode(self) -> bytes:
        """As it lies in the slot table."""
        return _params_encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "RowParams":
        """Read what `encode` wrote.

        Raises:
            msgspec.MsgspecError: it is not that.
        """
        return _params_decoder.decode(data)

    def is_same_stream(self, other: "RowParams") -> bool:
        """Whether both give the same tokens; which gateway asks does not matter."""
        return msgspec.structs.replace(self, gateway=other.gateway) == other


_params_decoder: Final = msgspec.json.Decoder(RowParams)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Ready to be queued."""

    request_id: bytes
    epoch: int
    prompt_ids: list[int]  # empty where a resume has left them out
    params: RowParams
    delivered: list[int]  # output tokens that the client already has
    delivered_chars: int
    is_resume: bool
    left_out_tokens: int = 0  # of the prompt


class RequestPreparer:
    """Turns `Generate` frames into prepared requests. Blocking, thread-safe, stateless."""

    def __init__(self, skeleton: Skeleton, *, max_length: int) -> None:
        self._tokenizer = skeleton.tokenizer
        self._vocabulary_size = int(skeleton.config.vocab_size)
        self._max_length = max_length
        self._longest_token = skeleton.longest_token

    @staticmethod
    def is_cheap(request: Generate) -> bool:
        """Whether preparing takes no tokenising, so that the event loop may do it itself."""
        return request.resume is not None or isinstance(request.body.prompt, list)

    def prepare(self, request: Generate) -> PreparedRequest:
        """Check and complete one request.

        Raises:
            InvalidRequestError: it cannot be understood or rendered.
            ContextLengthExceededError: it does not fit a slot.
        """
        resume, body = request.resume, request.body
        prompt_ids = self._prompt_ids(body) if resume is None else resume.prompt_ids or []
        left_out = resume.prompt_tokens if resume is not None and not prompt_ids else 0
        delivered = resume.token_ids if resume is not None else []
        self._check_ids(prompt_ids)
        self._check_ids(delivered)
        _check_sampling(request)
        max_tokens = self._max_tokens(body, left_out or len(prompt_ids))
        if len(delivered) > max_tokens:
            raise InvalidRequestError(
                f"{len(delivered)} tokens were delivered of at most {max_tokens}"
            )
        params = RowParams(
            gateway=request.gateway,
            seed=request.seed,
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=[s for s in body.stop if s],
            ignore_eos=body.ignore_eos,
        )
        if len(params.encode()) > MAX_PARAMS_BYTES:
            raise InvalidRequestError(
                f"parameters and stop strings take more than {MAX_PARAMS_BYTES} bytes"
            )
        return PreparedRequest(
            request_id=_request_id(request.request_id),
            epoch=request.epoch,
            prompt_ids=prompt_ids,
            params=params,
            delivered=delivered,
            delivered_chars=resume.chars if resume is not None else 0,
            is_resume=resume is not None,
            left_out_tokens=left_out,
        )

    def _prompt_ids(self, body: GenerateBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("exactly one of prompt and messages must be set")
        if isinstance(body.prompt, list):
            return body.prompt
        if body.prompt is not None:
            return self._tokenise(body.prompt, body, add_special_tokens=True)
        text = self._render(body.messages or [])
        return self._tokenise(text, body, add_special_tokens=False)

    def _tokenise(self, text: str, body: GenerateBody, *, add_special_tokens: bool) -> list[int]:
        # A token has at most so many characters: megabytes of prompt are refused unread.
        at_least = len(text) // self._longest_token
        if at_least > self._max_length:
            raise self._too_long(f"at least {at_least}", body)
        encoded = self._tokenizer.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoded.ids
        return ids

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "this model has no chat template", hint="use /v1/completions instead"
            )
        if not messages:
            raise InvalidRequestError("messages is empty")
        plain = [_with_plain_content(message) for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is a program of the checkpoint: anything goes
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        return str(rendered)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocabulary_size):
            raise InvalidRequestError(f"token ids must be in [0, {self._vocabulary_size})")

    def _max_tokens(self, body: GenerateBody, prompt_tokens: int) -> int:
        if not prompt_tokens:
            raise InvalidRequestError("the prompt is empty")
        if body.max_tokens is not None and body.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1")
        room = self._max_length - prompt_tokens
        if room < 1 or (body.max_tokens is not None and body.max_tokens > room):
            raise self._too_long(prompt_tokens, body)
        if body.max_tokens is not None:
            return body.max_tokens
        return min(_COMPLETION_TOKENS, room) if body.kind == "completion" else room

    def _too_long(self, prompt_tokens: int | str, body: GenerateBody) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            prompt_tokens=prompt_tokens,
            wanted_tokens=body.max_tokens or 1,
            max_length_tokens=self._max_length,
        )


def _with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI allows content as a list of parts; templates expect one string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[str] = []
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise InvalidRequestError("only text parts are supported in messages")
        parts.append(part["text"])
    return {**message, "content": "".join(parts)}


def _check_sampling(request: Generate) -> None:
    body = request.body
    if not (0.0 <= body.temperature <= 100.0):  # false for nan, too
        raise InvalidRequestError(f"temperature {body.temperature} is out of range")
    if not (0.0 < body.top_p <= 1.0):
        raise InvalidRequestError(f"top_p {body.top_p} is out of range")
    if body.top_k < 0:
        raise InvalidRequestError(f"top_k {body.top_k} is negative")
    if not (0 <= request.seed < 2**63):
        raise InvalidRequestError(f"seed {request.seed} is out of range")


def _request_id(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError as error:
        raise InvalidRequestError("request_id is not hexadecimal") from error
    if len(found) != REQUEST_ID_BYTES:
        raise InvalidRequestError(f"request_id must have {REQUEST_ID_BYTES} bytes")
    return found
