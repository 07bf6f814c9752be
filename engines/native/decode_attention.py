"""Attention of a decode step over slots, on a GPU: one query a row, keys and values in place.

A library's kernel divides the work by what keeps the card busy, so where it cuts a row's past, and
with it the order of the sum, depends on how many rows there are and where the row sits (measured:
cuDNN with 16 rows of 2 heads). Here a row's past is cut every `_SPLIT` tokens, always: one program
a row, head and piece, then one program a row that adds up the pieces in order. A row's bits depend
on its own past alone, and pieces behind its end are not even read: one graph serves every length,
and memory is read only where there is something.

Invariants
    1. Only positions up to and including the row's own are read; every row has at least one.
    2. Scratch memory belongs to one stream of work: a model uses it one layer after another.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from cache.protocol import KvGeometry

__all__ = ["KERNELS", "DecodeAttention"]

_SPLIT: Final = 256
_BLOCK: Final = 64
_LEAST_ROWS: Final = 16  # of a matrix product


# Triton reads the source: annotations other than its own are errors there.
@triton.jit  # type: ignore[untyped-decorator]
def _attend_piece(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    query_ptr,  # noqa: ANN001
    key_ptr,  # noqa: ANN001
    value_ptr,  # noqa: ANN001
    positions_ptr,  # noqa: ANN001
    sums_ptr,  # noqa: ANN001
    peaks_ptr,  # noqa: ANN001
    totals_ptr,  # noqa: ANN001
    scaling,  # noqa: ANN001
    slot_stride,  # noqa: ANN001
    head_stride,  # noqa: ANN001
    query_slot_stride,  # noqa: ANN001
    query_head_stride,  # noqa: ANN001
    pieces,  # noqa: ANN001
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    split: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    slot = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    piece = tl.program_id(1)
    length = tl.load(positions_ptr + slot) + 1
    start = piece * split
    if start < length:
        row = tl.arange(0, rows)
        is_row = row < group
        dim = tl.arange(0, head_dim)
        query = tl.load(
            query_ptr
            + slot * query_slot_stride
            + (head * group + row)[:, None] * query_head_stride
            + dim[None, :],
            mask=is_row[:, None],
            other=0.0,
        )
        memory = slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
        peak = tl.full((rows,), float("-inf"), tl.float32)
        total = tl.zeros((rows,), tl.float32)
        sums = tl.zeros((rows, head_dim), tl.float32)
        for step in range(split // block):
            token = start + step * block + tl.arange(0, block)
            is_token = token < length
            at = memory + token[:, None].to(tl.int64) * head_dim + dim[None, :]
            key = tl.load(key_ptr + at, mask=is_token[:, None], other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision=precision) * scaling
            score = tl.where(is_token[None, :], score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, axis=1))
            # A block behind the end changes nothing: its weights are exactly zero.
            weight = tl.exp(score - new_peak[:, None])
            shrink = tl.exp(peak - new_peak)
            value = tl.load(value_ptr + at, mask=is_token[:, None], other=0.0)
            total = total * shrink + tl.sum(weight, axis=1)
            sums = sums * shrink[:, None]
            sums += tl.dot(weight.to(value.dtype), value, input_precision=precision)
            peak = new_peak
        place = ((slot * kv_heads + head) * pieces + piece).to(tl.int64) * group + row
        tl.store(sums_ptr + place[:, None] * head_dim + dim[None, :], sums, mask=is_row[:, None])
        tl.store(peaks_ptr + place, peak, mask=is_row)
        tl.store(totals_ptr + place, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _add_pieces(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    out_ptr,  # noqa: ANN001
    positions_ptr,  # noqa: ANN001
    sums_ptr,  # noqa: ANN001
    peaks_ptr,  # noqa: ANN001
    totals_ptr,  # noqa: ANN001
    pieces,  # noqa: ANN001
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    split: tl.constexpr,
):
    slot = tl.program_id(0)
    head = tl.program_id(1) // group
    row = tl.program_id(1) % group
    dim = tl.arange(0, head_dim)
    used = (tl.load(positions_ptr + slot) + split) // split
    peak = float("-inf")
    total = 0.0
    sums = tl.zeros((head_dim,), tl.float32)
    first = ((slot * kv_heads + head) * pieces).to(tl.int64)
    for piece in range(used):
        place = (first + piece) * group + row
        piece_peak = tl.load(peaks_ptr + place)
        new_peak = tl.maximum(peak, piece_peak)
        shrink = tl.exp(peak - new_peak)
        share = tl.exp(piece_peak - new_peak)
        sums = sums * shrink + tl.load(sums_ptr + place * head_dim + dim) * share
        total = total * shrink + tl.load(totals_ptr + place) * share
        peak = new_peak
    at = (slot * kv_heads * group + tl.program_id(1)) * head_dim + dim
    tl.store(out_ptr + at, (sums / total).to(out_ptr.dtype.element_ty))


KERNELS: Final = (_attend_piece, _add_pieces)


class DecodeAttention:
    """The kernel and its scratch memory, for one geometry."""

    def __init__(self, geometry: KvGeometry, heads: int, device: torch.device) -> None:
        self._geometry = geometry
        self._group = heads // geometry.kv_heads
        self._pieces = -(-geometry.max_length // _SPLIT)
        places = (geometry.slots, geometry.kv_heads, self._pieces, self._group)
        self._sums = torch.zeros(*places, geometry.head_dim, device=device)
        self._peaks = torch.zeros(*places, device=device)
        self._totals = torch.zeros(*places, device=device)

    def attend(
        self,
        query: torch.Tensor,
        memory: torch.Tensor,
        positions: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """`query [slots, heads, 1, head_dim]` over `memory [2, slots, kv_heads, length, head_dim]`.

        `positions` are those of the queries, int64; keys and values up to them are in memory.
        Returns `[slots, 1, heads, head_dim]`.
        """
        g, group = self._geometry, self._group
        slots, heads = query.shape[0], query.shape[1]
        key, value = memory[0], memory[1]
        precision = "ieee" if query.dtype is torch.float32 else "tf32"
        _attend_piece[slots * g.kv_heads, self._pieces](
            query,
            key,
            value,
            positions,
            self._sums,
            self._peaks,
            self._totals,
            scaling,
            key.stride(0),
            key.stride(1),
            query.stride(0),
            query.stride(1),
            self._pieces,
            g.kv_heads,
            group,
            max(_LEAST_ROWS, triton.next_power_of_2(group)),
            g.head_dim,
            _SPLIT,
            _BLOCK,
            precision,
        )
        out = torch.empty(slots, 1, heads, g.head_dim, dtype=query.dtype, device=query.device)
        _add_pieces[slots, heads](
            out,
            positions,
            self._sums,
            self._peaks,
            self._totals,
            self._pieces,
            g.kv_heads,
            group,
            g.head_dim,
            _SPLIT,
        )
        return out
