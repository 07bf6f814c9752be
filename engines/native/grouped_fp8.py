"""Grouped matrix product of block-wise FP8 experts, as one Triton kernel.

`torch` 2.11 to 2.13 has no grouped product with 128 x 128 scales. This one is plain: a program
computes a tile of rows of one expert times 128 of its columns, 128 values of the sum at a time,
each partial product scaled by the row's scale and the block's. The grid covers every expert and as
many tiles as one expert can get; programs without rows return at once. So the grid never depends
on the routing (a graph can hold it), and a row's sum is made in the same order wherever it sits.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from engines.native.fp8 import BLOCK, quantise_rows
from engines.native.untyped import Untyped

__all__ = ["grouped_fp8"]

_SMALL_TILE: Final = 16
_LARGE_TILE: Final = 64


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # noqa: PLR0917 - kernels are called by position
    rows_ptr: Untyped,
    row_scale_ptr: Untyped,
    weight_ptr: Untyped,
    scale_ptr: Untyped,
    out_ptr: Untyped,
    ends_ptr: Untyped,
    total_rows: Untyped,
    columns: Untyped,
    inner: Untyped,
    TILE: tl.constexpr,  # noqa: N803 - Triton's custom for compile-time numbers
    STEP: tl.constexpr,  # noqa: N803
) -> None:
    expert = tl.program_id(0).to(tl.int64)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    start = first + tl.program_id(1) * TILE
    if start < end:
        block = tl.program_id(2)
        row = start + tl.arange(0, TILE)
        is_row = row < end
        column = block * STEP + tl.arange(0, STEP)
        is_column = column < columns
        blocks_inner = tl.cdiv(inner, STEP)
        blocks_columns = tl.cdiv(columns, STEP)
        scales = scale_ptr + (expert * blocks_columns + block) * blocks_inner
        weights = weight_ptr + expert * columns * inner + column[None, :].to(tl.int64) * inner
        total = tl.zeros((TILE, STEP), dtype=tl.float32)
        for step in range(blocks_inner):
            k = step * STEP + tl.arange(0, STEP)
            a = tl.load(
                rows_ptr + row[:, None].to(tl.int64) * inner + k[None, :],
                mask=is_row[:, None],
                other=0.0,
            )
            b = tl.load(weights + k[:, None], mask=is_column[None, :], other=0.0)
            # The rows' scales lie column by column.
            a_scale = tl.load(row_scale_ptr + step * total_rows + row, mask=is_row, other=0.0)
            total += tl.dot(a, b) * (a_scale[:, None] * tl.load(scales + step))
        tl.store(
            out_ptr + row[:, None].to(tl.int64) * columns + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )


def grouped_fp8(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    most_rows: int,
) -> torch.Tensor:
    """Each row times its expert's weight; rows are sorted by expert.

    Args:
        rows: `[rows, inner]`, `inner` a multiple of 128.
        weight: `[experts, columns, inner]`, E4M3.
        scale: `[experts, columns / 128, inner / 128]`, float32.
        ends: int32 `[experts]`, the row behind each expert's last.
        most_rows: more rows than this no expert can have.
    """
    count, inner = rows.shape
    experts, columns, _ = weight.shape
    narrow, row_scale = quantise_rows(rows)
    out = torch.empty(count, columns, dtype=rows.dtype, device=rows.device)
    tile = _SMALL_TILE if most_rows <= _SMALL_TILE * 2 else _LARGE_TILE
    grid = (experts, -(-most_rows // tile), -(-columns // BLOCK))
    _kernel[grid](
        narrow, row_scale, weight, scale, out, ends, count, columns, inner, TILE=tile, STEP=BLOCK
    )
    return out
