"""A row: one stream in one slot, and the rules that say when it ends and what it sends next.

Committing goes through `commit`: the token is in the slot table before anything of it can leave.
What leaves is a pure function of ids and of what the client already has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from cache.slots import SlotRecord, SlotTable
from engines.contract import Delta, Usage
from engines.native.request import PreparedRequest, RowParams
from engines.native.streams import StreamPort
from engines.native.text import Decoding, StreamText

__all__ = ["FinishReason", "Row", "RowState", "finish_reason"]

FinishReason = Literal["stop", "length"]


class RowState(Enum):
    """Where a row is in its life."""

    PREFILL = "prefill"  # its prompt is being computed; not adopted by a successor
    DECODE = "decode"
    PARKED = "parked"  # committed tokens, but nobody to send them to until `deadline_s`
    FINISHED = "finished"  # complete; keeps the slot until the kernel has taken the last frame


def finish_reason(
    token_ids: Sequence[int], text: StreamText, params: RowParams, eos_ids: frozenset[int]
) -> FinishReason | None:
    """Why a stream ends after these tokens, or None. Pure."""
    if not token_ids:
        return None
    if text.is_stopped or (not params.ignore_eos and token_ids[-1] in eos_ids):
        return "stop"
    return "length" if len(token_ids) >= params.max_tokens else None


@dataclass(slots=True, eq=False)
class Row:
    """One stream in one slot. Only the model thread touches it."""

    slot: int
    request_id: bytes
    prompt_ids: list[int]
    params: RowParams
    text: StreamText
    state: RowState
    port: StreamPort | None = None
    tokens: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)  # delivered ids that must be repeated
    prefilled: int = 0
    sent: int = 0  # output tokens that the client has, or that are on their way
    deadline_s: float | None = None

    @classmethod
    def of_request(
        cls, slot: int, request: PreparedRequest, port: StreamPort, decoding: Decoding
    ) -> "Row":
        """A new row, its prompt still to be computed."""
        return cls(
            slot=slot,
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            params=request.params,
            text=StreamText(decoding, request.params.stop, skip_chars=request.delivered_chars),
            state=RowState.PREFILL,
            port=port,
            forced=request.delivered,
            sent=len(request.delivered),
        )

    @classmethod
    def of_record(cls, record: SlotRecord, decoding: Decoding, *, deadline_s: float) -> "Row":
        """A row found in the slot table, parked until its gateway comes.

        Raises:
            msgspec.MsgspecError: its parameters cannot be read.
        """
        params = RowParams.decode(record.params)
        return cls(
            slot=record.slot,
            request_id=record.request_id,
            prompt_ids=record.prompt_ids,
            params=params,
            text=StreamText(decoding, params.stop),
            state=RowState.PARKED,
            tokens=record.token_ids,
            deadline_s=deadline_s,
        )

    @property
    def next_position(self) -> int:
        """Where the newest token goes: its keys and values are not computed yet."""
        return len(self.prompt_ids) + len(self.tokens) - 1

    @property
    def is_replaying(self) -> bool:
        """Whether the next token is one that the client already has."""
        return len(self.tokens) < len(self.forced)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.tokens))

    def fits(self, request: PreparedRequest) -> bool:
        """Whether this row's committed tokens are a past of that request's stream."""
        common = min(len(self.tokens), len(request.delivered))
        is_same_prompt = (
            len(self.prompt_ids) == request.left_out_tokens  # the id of a request is its own
            if request.left_out_tokens
            else self.prompt_ids == request.prompt_ids
        )
        return (
            is_same_prompt
            and self.params.is_same_stream(request.params)
            and self.tokens[:common] == request.delivered[:common]
        )

    def attach(self, request: PreparedRequest, port: StreamPort, decoding: Decoding) -> None:
        """Go on with another connection: text is rebuilt, what the client has is not sent."""
        self.params = request.params
        self.port = port
        self.forced = request.delivered
        self.sent = len(request.delivered)
        self.text = StreamText(decoding, request.params.stop, skip_chars=request.delivered_chars)
        self.text.feed(self.tokens)
        self.deadline_s = None
        if self.state is not RowState.PREFILL:
            self.state = RowState.DECODE

    def commit(self, token_id: int, table: SlotTable) -> None:
        """Make one token part of the stream, for every successor too."""
        table.append(self.slot, token_id)
        self.tokens.append(token_id)
        if len(self.tokens) == 1:
            table.activate(self.slot)
            self.state = RowState.DECODE
        self.text.feed((token_id,))

    def finish_reason(self, eos_ids: frozenset[int]) -> FinishReason | None:
        """Why the stream ends here; never while delivered tokens are still being repeated."""
        if self.is_replaying:
            return None
        return finish_reason(self.tokens, self.text, self.params, eos_ids)

    def take_delta(self) -> Delta | None:
        """Tokens and text that the client does not have yet."""
        index = self.sent
        token_ids = self.tokens[index:]
        text = self.text.take()
        if not token_ids and not text:
            return None
        self.sent = max(index, len(self.tokens))
        return Delta(index=index, token_ids=token_ids, text=text, chars=self.text.chars)
