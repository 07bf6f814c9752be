"""The keeper of slots: which row sits where, how slots are begun, adopted and wiped.

Invariants
    1. `rows` and the slot table agree: a slot is free in both or in neither, as long as this
       engine is the writer.
    2. A slot is begun only on zeroed memory. A slot that someone else may have written (`clean`
       does not name it) is zeroed as a whole first; what this engine used, when it is freed.
    3. Freed slots are wiped in the table before anything else: from then on nobody adopts them.
"""

import logging
import time

import msgspec

from cache.errors import SlotTableError
from cache.slots import SlotState
from engines.native.commands import Submit
from engines.native.memory import ServingMemory
from engines.native.rows import Row, RowState
from engines.native.streams import StreamPort
from engines.native.text import Decoding

__all__ = ["SlotKeeper"]

log = logging.getLogger(__name__)


class SlotKeeper:
    """Used by the model thread alone."""

    def __init__(self, memory: ServingMemory, decoding: Decoding, *, grace_s: float) -> None:
        self._memory = memory
        self._decoding = decoding
        self._grace_s = grace_s
        self._geometry = memory.kv.geometry
        self._clean = set() if memory.is_shared else set(range(self._geometry.slots))
        self._rows: dict[int, Row] = {}

    # ------------------------------------------------------------------ looking

    @property
    def rows(self) -> list[Row]:
        """All rows, oldest first."""
        return list(self._rows.values())

    @property
    def free_slots(self) -> int:
        """Slots that may be begun now; none while a predecessor's device may still write."""
        if not self._memory.is_settled():
            return 0
        return self._geometry.slots - len(self._rows)

    @property
    def is_settled(self) -> bool:
        """Whether nobody but us writes to the memory any more."""
        return self._memory.is_settled()

    def in_state(self, state: RowState) -> list[Row]:
        """Rows in one state, oldest first."""
        return [row for row in self._rows.values() if row.state is state]

    def of_request(self, request_id: bytes) -> Row | None:
        """The row of a request, attached to a connection or not."""
        return next((r for r in self._rows.values() if r.request_id == request_id), None)

    def of_port(self, port: StreamPort) -> Row | None:
        """The row that sends to this connection."""
        return next((r for r in self._rows.values() if r.port is port), None)

    def next_deadline_s(self) -> float | None:
        """When the next parked row runs out of time."""
        deadlines = [r.deadline_s for r in self._rows.values() if r.deadline_s is not None]
        return min(deadlines, default=None)

    def expired(self) -> list[Row]:
        """Parked rows that nobody resumed in time."""
        now_s = time.monotonic()
        return [
            row
            for row in self._rows.values()
            if row.deadline_s is not None and row.deadline_s <= now_s
        ]

    # ----------------------------------------------------------------- changing

    def begin(self, submit: Submit) -> bool:
        """Put a request into a free slot; False if a whole slot had to be zeroed for it."""
        free = [slot for slot in range(self._geometry.slots) if slot not in self._rows]
        slot = next((s for s in free if s in self._clean), free[0])
        was_clean = slot in self._clean
        if not was_clean:
            self._memory.kv.zero(slot, self._geometry.max_length)
        self._clean.discard(slot)
        request = submit.request
        self._memory.table.begin(
            slot,
            request.request_id,
            request.prompt_ids,
            request.params.encode(),
            self._memory.kv.chunk_tokens,
        )
        self._rows[slot] = Row.of_request(slot, request, submit.port, self._decoding)
        return was_clean

    def park(self, row: Row) -> None:
        """Nobody reads this row: keep what it has until its gateway comes, or time is up."""
        row.port = None
        row.state = RowState.PARKED
        row.deadline_s = time.monotonic() + self._grace_s

    def free(self, row: Row) -> None:
        """Wipe ids, then keys and values: they are a user's text."""
        del self._rows[row.slot]
        self._memory.table.free(row.slot)
        used = len(row.prompt_ids) + len(row.tokens)
        self._memory.kv.zero(row.slot, min(used, self._geometry.max_length))
        if row.prefilled:  # begun by this engine, so nothing lies behind the used part
            self._clean.add(row.slot)

    def zero_whole(self, row: Row) -> None:
        """Zero the whole slot of a row whose numbers went wrong."""
        self._memory.kv.zero(row.slot, self._geometry.max_length)

    def adopt(self) -> list[Row]:
        """Park what the predecessor left, free what it had not finished to begin."""
        table = self._memory.table
        deadline_s = time.monotonic() + self._grace_s
        for slot in range(table.slots):
            state = table.state(slot)
            if state is SlotState.FREE:
                continue
            row = self._row_of_record(slot, deadline_s) if state is SlotState.ACTIVE else None
            if row is None:
                table.free(slot)
            else:
                self._rows[slot] = row
        return self.rows

    def forget(self) -> None:
        """Somebody else becomes the writer: leave the slots to him as they are."""
        self._rows.clear()
        if self._memory.is_shared:
            self._clean.clear()

    def _row_of_record(self, slot: int, deadline_s: float) -> Row | None:
        try:
            record = self._memory.table.read(slot)
            return Row.of_record(record, self._decoding, deadline_s=deadline_s)
        except (SlotTableError, msgspec.MsgspecError) as error:
            log.error("slot %d cannot be adopted: %s", slot, error)  # noqa: TRY400 - one line
            return None
