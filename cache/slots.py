"""The slot table: what a serving engine has promised, in memory that outlives it.

One writer, any number of readers, no lock and no sequence lock: a writer that is killed in the
middle of a locked update would leave the table unreadable for ever. Instead every record has one
word that decides, stored last:

    begin      lengths, ids, parameters, request id  -> state PREFILL
    append     token id                              -> commit word (generation << 32 | tokens)
    activate   (after the first append)              -> state ACTIVE
    free       state FREE -> wipe everything         -> commit word (generation + 1) << 32

Invariants
    1. Whatever instruction the writer is killed at, a reader sees a record as it was before or
       after one of these steps; committed tokens are a prefix of what was appended.
    2. n committed tokens mean that KV is valid for the prompt and n - 1 positions behind it (the
       newest token has not been fed through the model yet).
    3. A slot that is free and clean holds no user's text. A writer killed between `begin` and
       its end, or within `free`, leaves a free slot that is not clean; `claim` wipes those.
    4. Every word is stored with one aligned 8-byte (ids: 4-byte) store, through `memoryview.cast`.
       `struct.pack_into` copies byte by byte and was seen torn in a fifth of all reads.

WARNING: trust a table only once its writer is fenced. While the writer lives, a record read here
may be a mixture of two requests if the slot was freed and begun again during the read.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cache.errors import SlotTableError, StaleEpochError

__all__ = ["MAX_PARAMS_BYTES", "REQUEST_ID_BYTES", "SlotRecord", "SlotState", "SlotTable"]

MAX_PARAMS_BYTES: Final = 16 << 10
"""Bound of the sampling parameters of one request, as JSON."""

REQUEST_ID_BYTES: Final = 16

_MAGIC: Final = 0x5553_534C_4F54_0000  # "USSLOT"
_VERSION: Final = 1
_HEADER_BYTES: Final = 4096
_RECORD_BYTES: Final = 64  # eight words before parameters and ids
_MAX_SLOTS: Final = 65_536
_MAX_LENGTH: Final = 1 << 24  # tokens

# Words of the header. Behind `_H_EARLIER` lie pid and start time of earlier writers.
_H_MAGIC, _H_VERSION, _H_SLOTS, _H_LENGTH, _H_EPOCH, _H_PID, _H_TICKS, _H_EARLIER = range(8)
_EARLIER: Final = 16
"""Writers that died within the second or so that a driver needs to take a context down."""
# Words of a record.
_STATE, _COMMIT, _PROMPT, _PARAMS, _CHUNK, _ID = range(6)
_ID_BYTE: Final = _ID * 8

_WRITER_WORDS: Final = (_H_PID, *range(_H_EARLIER, _H_EARLIER + 2 * _EARLIER, 2))

_TOKENS_MASK: Final = 0xFFFF_FFFF


class SlotState(IntEnum):
    """What a slot holds. Only ACTIVE slots are adopted; PREFILL has produced no token yet."""

    FREE = 0
    PREFILL = 1
    ACTIVE = 2


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot as it was when it was read."""

    slot: int
    state: SlotState
    generation: int
    request_id: bytes
    prompt_ids: list[int]
    params: bytes
    chunk_tokens: int
    token_ids: list[int]  # committed ones only


class SlotTable:
    """A view of one slot table. The buffer must stay mapped; `release` gives it back."""

    def __init__(self, buffer: memoryview) -> None:
        """Open a formatted table; reading works over read-only memory.

        Raises:
            SlotTableError: not a table of this version, or its header does not fit the buffer.
        """
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if len(data) < _HEADER_BYTES:
            raise SlotTableError(f"a slot table of {len(data)} bytes is too small")
        with data[:_HEADER_BYTES].cast("Q") as header:
            magic, version, slots, max_length = header[:4].tolist()
        if magic != _MAGIC or version != _VERSION:
            raise SlotTableError(f"not a slot table of version {_VERSION} (magic {magic:#x})")
        size_bytes = self.size_bytes(slots, max_length)
        if size_bytes > len(data):
            raise SlotTableError(
                f"the slot table claims {size_bytes} bytes, there are only {len(data)}"
            )
        self.slots: Final[int] = slots
        self.max_length: Final[int] = max_length
        self._stride = _stride_bytes(max_length)
        self._bytes = data[:size_bytes]
        self._words = self._bytes.cast("Q")
        self._cells = self._bytes.cast("I")

    @staticmethod
    def size_bytes(slots: int, max_length: int) -> int:
        """Bytes that a table needs.

        Raises:
            SlotTableError: numbers that no table has.
        """
        if not (0 < slots <= _MAX_SLOTS and 0 < max_length <= _MAX_LENGTH):
            raise SlotTableError(f"no slot table has {slots} slots of {max_length} tokens")
        return _HEADER_BYTES + slots * _stride_bytes(max_length)

    @classmethod
    def format(cls, buffer: memoryview, slots: int, max_length: int) -> None:
        """Write the header of a new table into zero-filled memory (the daemon, once)."""
        if cls.size_bytes(slots, max_length) > len(buffer):
            raise SlotTableError(f"{len(buffer)} bytes are too small for {slots} slots")
        with buffer[:_HEADER_BYTES].cast("Q") as header:
            header[_H_VERSION] = _VERSION
            header[_H_SLOTS] = slots
            header[_H_LENGTH] = max_length
            header[_H_MAGIC] = _MAGIC

    def release(self) -> None:
        """Drop all views, so that the mapping below may be closed."""
        self._cells.release()
        self._words.release()
        self._bytes.release()

    # ------------------------------------------------------------------ writer

    @property
    def epoch(self) -> int:
        """The epoch of the last writer."""
        return self._words[_H_EPOCH]

    @property
    def writers(self) -> list[tuple[int, int]]:
        """Pid and start time (ticks since boot) of all whose work may still be under way.

        The last writer first, unless it has resigned; then earlier ones that nobody has struck
        out.
        """
        words = self._words
        return [(words[at], words[at + 1]) for at in _WRITER_WORDS if words[at]]

    def resign(self) -> None:
        """Say that this writer has nothing under way any more: its successor need not wait.

        What earlier writers have under way is as it was.
        """
        self._words[_H_PID] = 0

    def strike(self, writer: tuple[int, int]) -> None:
        """Strike out an earlier writer that is gone."""
        for at in _WRITER_WORDS[1:]:
            if (self._words[at], self._words[at + 1]) == writer:
                self._words[at] = 0

    def claim(self, epoch: int, writer: tuple[int, int] | None = None) -> None:
        """Become the writer. Wipes what a killed predecessor left in free slots.

        Call it after the fence and before anything else; `active` is untouched by it. `writer`
        is who claims, None for the same as before: a successor whose device works in the
        background looks whether that process is gone before it uses slots anew. The last writer
        becomes an earlier one.

        Raises:
            StaleEpochError: a writer with a higher epoch was here.
        """
        seen = self.epoch
        if epoch < seen:
            raise StaleEpochError(ours=epoch, seen=seen)
        self._words[_H_EPOCH] = epoch
        last = (self._words[_H_PID], self._words[_H_TICKS])
        if writer is not None and writer != last:
            if last[0]:
                self._remember(last)
            self._put_writer(_H_PID, writer)
        for slot in range(self.slots):
            if self.state(slot) is SlotState.FREE and self._is_dirty(slot):
                self.free(slot)

    def _remember(self, writer: tuple[int, int]) -> None:
        """Keep an earlier writer; where there is no room left, in the place of the oldest."""
        if writer in self.writers[1:]:
            return
        free = [at for at in _WRITER_WORDS[1:] if not self._words[at]]
        oldest = min(_WRITER_WORDS[1:], key=lambda at: self._words[at + 1])
        self._put_writer(free[0] if free else oldest, writer)

    def _put_writer(self, at: int, writer: tuple[int, int]) -> None:
        self._words[at] = 0  # never one's pid with another's start time
        self._words[at + 1] = writer[1]
        self._words[at] = writer[0]

    def begin(
        self,
        slot: int,
        request_id: bytes,
        prompt_ids: Sequence[int],
        params: bytes,
        chunk_tokens: int,
    ) -> None:
        """Write the request's fixed fields, then publish PREFILL.

        Raises:
            SlotTableError: the slot is taken, or a field is too long.
        """
        word = self._word(slot)
        if self._words[word + _STATE] != SlotState.FREE:
            raise SlotTableError(f"slot {slot} is not free")
        if len(request_id) != REQUEST_ID_BYTES:
            raise SlotTableError(f"a request id has {REQUEST_ID_BYTES} bytes")
        if len(params) > MAX_PARAMS_BYTES:
            raise SlotTableError(f"{len(params)} bytes of parameters, the bound is 16 KiB")
        if not 0 < len(prompt_ids) <= self.max_length:
            raise SlotTableError(f"a prompt of {len(prompt_ids)} tokens, slots hold less")
        ids = array("I", prompt_ids)  # before anything is written: a bad id raises here
        words, start = self._words, word * 8
        # Lengths first: they are what makes a half-written slot visible to `claim`.
        words[word + _PROMPT] = len(prompt_ids)
        words[word + _PARAMS] = len(params)
        words[word + _CHUNK] = chunk_tokens
        params_at = start + _RECORD_BYTES
        self._bytes[params_at : params_at + len(params)] = params
        cell = self._cell(slot)
        self._cells[cell : cell + len(ids)] = memoryview(ids)
        self._bytes[start + _ID_BYTE : start + _ID_BYTE + REQUEST_ID_BYTES] = request_id
        words[word + _STATE] = SlotState.PREFILL

    def append(self, slot: int, token_id: int) -> int:
        """Commit one token; returns how many are committed now. Send only afterwards.

        Raises:
            SlotTableError: the slot is free or full.
        """
        words, word = self._words, self._word(slot)
        if words[word + _STATE] == SlotState.FREE:
            raise SlotTableError(f"slot {slot} is free")
        commit = words[word + _COMMIT]
        position = words[word + _PROMPT] + (commit & _TOKENS_MASK)
        if position >= self.max_length:
            raise SlotTableError(f"slot {slot} is full: {position} tokens")
        self._cells[self._cell(slot) + position] = token_id
        words[word + _COMMIT] = commit + 1
        return (commit + 1) & _TOKENS_MASK

    def activate(self, slot: int) -> None:
        """Publish ACTIVE: from now on the slot is adopted when the writer dies.

        Raises:
            SlotTableError: nothing was appended yet, or the slot is free.
        """
        word = self._word(slot)
        if self._words[word + _STATE] == SlotState.FREE:
            raise SlotTableError(f"slot {slot} is free")
        if not self._words[word + _COMMIT] & _TOKENS_MASK:
            raise SlotTableError(f"slot {slot} has no committed token yet")
        self._words[word + _STATE] = SlotState.ACTIVE

    def free(self, slot: int) -> None:
        """Publish FREE, then wipe the user's text; idempotent for a clean slot."""
        words, word = self._words, self._word(slot)
        words[word + _STATE] = SlotState.FREE
        if not self._is_dirty(slot):
            return
        start, commit = word * 8, words[word + _COMMIT]
        # One cell more than committed: the writer may die between the id and the commit word.
        used = words[word + _PROMPT] + (commit & _TOKENS_MASK) + 1
        self._wipe(self._cell(slot) * 4, min(used, self.max_length) * 4)
        self._wipe(start + _RECORD_BYTES, min(words[word + _PARAMS], MAX_PARAMS_BYTES))
        self._wipe(start + _ID_BYTE, REQUEST_ID_BYTES)
        # The lengths go last: as long as they stand, `claim` finds a wipe that was cut short.
        words[word + _COMMIT] = (((commit >> 32) + 1) & _TOKENS_MASK) << 32
        words[word + _CHUNK] = 0
        words[word + _PARAMS] = 0
        words[word + _PROMPT] = 0

    # ------------------------------------------------------------------ reader

    def state(self, slot: int) -> SlotState:
        """State of one slot.

        Raises:
            SlotTableError: the word is none of ours.
        """
        value = self._words[self._word(slot) + _STATE]
        if value > SlotState.ACTIVE:
            raise SlotTableError(f"slot {slot} has the unknown state {value}")
        return SlotState(value)

    def read(self, slot: int) -> SlotRecord:
        """Everything that is committed in one slot.

        Raises:
            SlotTableError: lengths that no writer of ours can have written.
        """
        state = self.state(slot)
        words, word = self._words, self._word(slot)
        commit = words[word + _COMMIT]
        tokens = commit & _TOKENS_MASK
        prompt, params = words[word + _PROMPT], words[word + _PARAMS]
        if prompt + tokens > self.max_length or params > MAX_PARAMS_BYTES:
            raise SlotTableError(f"slot {slot} claims {prompt} + {tokens} tokens, {params} bytes")
        start, cell = word * 8, self._cell(slot)
        params_at = start + _RECORD_BYTES
        return SlotRecord(
            slot=slot,
            state=state,
            generation=commit >> 32,
            request_id=bytes(self._bytes[start + _ID_BYTE : start + _ID_BYTE + REQUEST_ID_BYTES]),
            prompt_ids=self._cells[cell : cell + prompt].tolist(),
            params=bytes(self._bytes[params_at : params_at + params]),
            chunk_tokens=words[word + _CHUNK],
            token_ids=self._cells[cell + prompt : cell + prompt + tokens].tolist(),
        )

    def active(self) -> list[SlotRecord]:
        """Every slot that a successor adopts, in slot order."""
        return [
            self.read(slot) for slot in range(self.slots) if self.state(slot) is SlotState.ACTIVE
        ]

    # ----------------------------------------------------------------- private

    def _word(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise SlotTableError(f"there is no slot {slot} among {self.slots}")
        return (_HEADER_BYTES + slot * self._stride) // 8

    def _cell(self, slot: int) -> int:
        record = _HEADER_BYTES + slot * self._stride
        return (record + _RECORD_BYTES + MAX_PARAMS_BYTES) // 4

    def _is_dirty(self, slot: int) -> bool:
        word = self._word(slot)
        return any(self._words[word + _PROMPT : word + _CHUNK + 1].tolist())

    def _wipe(self, start: int, size_bytes: int) -> None:
        self._bytes[start : start + size_bytes] = bytes(size_bytes)


def _stride_bytes(max_length: int) -> int:
    """Bytes of one slot: words, parameters, cells, rounded to a cache line."""
    return -(-(_RECORD_BYTES + MAX_PARAMS_BYTES + max_length * 4) // 64) * 64
