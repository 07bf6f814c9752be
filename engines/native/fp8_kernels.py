"""Two Triton kernels for block-wise FP8 on a GPU; `fp8` and `experts` have the plain formulas.

`quantise` does in one launch what takes torch six; a step of a large model has hundreds of them.
`grouped` exists because `torch` 2.11 to 2.13 has no grouped product with 128 x 128 scales. It is
plain: a program computes a tile of rows of one expert times 128 of its columns, 128 values of the
sum at a time, each partial product scaled by the row's scale and the block's. The grid covers
every expert and as many tiles as one expert can get; programs without rows return at once. So
the grid never depends on the routing (a graph can hold it), and a row's sum is made in the same
order wherever it sits.
"""

from typing import Final

import torch
import triton
import triton.language as tl

__all__ = ["KERNELS", "grouped", "quantise"]

_BLOCK: Final = 128
_LARGEST: Final = tl.constexpr(448.0)  # of float8_e4m3fn
_SMALLEST_SCALE: Final = tl.constexpr(1e-12)
_SMALL_TILE: Final = 16
_LARGE_TILE: Final = 64


# Triton reads the source: annotations other than its own are errors there.
@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    values_ptr,  # noqa: ANN001
    narrow_ptr,  # noqa: ANN001
    scale_ptr,  # noqa: ANN001
    total_rows,  # noqa: ANN001
    inner: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = row * inner + block * width + tl.arange(0, width)
    values = tl.load(values_ptr + at).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / _LARGEST, _SMALLEST_SCALE)
    tl.store(narrow_ptr + at, (values / scale).to(narrow_ptr.dtype.element_ty))
    tl.store(scale_ptr + block * total_rows + row, scale)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fp8.quantise_rows`; `values` is contiguous."""
    rows, inner = values.shape
    narrow = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=values.device)
    scale = torch.empty(inner // _BLOCK, rows, dtype=torch.float32, device=values.device)
    _quantise[rows, inner // _BLOCK](values, narrow, scale, rows, inner, _BLOCK)
    return narrow, scale.t()


@triton.jit  # type: ignore[untyped-decorator]
def _grouped(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    rows_ptr,  # noqa: ANN001
    row_scale_ptr,  # noqa: ANN001
    weight_ptr,  # noqa: ANN001
    scale_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    ends_ptr,  # noqa: ANN001
    total_rows,  # noqa: ANN001
    columns: tl.constexpr,
    inner: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    start = first + tl.program_id(1) * tile
    if start < end:
        block = tl.program_id(2)
        row = start + tl.arange(0, tile)
        is_row = row < end
        column = block * width + tl.arange(0, width)
        is_column = column < columns
        blocks_inner: tl.constexpr = inner // width
        blocks_columns: tl.constexpr = (columns + width - 1) // width
        scales = scale_ptr + (expert * blocks_columns + block) * blocks_inner
        weights = weight_ptr + expert * columns * inner + column[None, :].to(tl.int64) * inner
        total = tl.zeros((tile, width), dtype=tl.float32)
        for step in range(blocks_inner):
            k = step * width + tl.arange(0, width)
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


KERNELS: Final = (_quantise, _grouped)


def grouped(
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
    narrow, row_scale = quantise(rows.contiguous())
    out = torch.empty(count, columns, dtype=rows.dtype, device=rows.device)
    tile = _SMALL_TILE if most_rows <= _SMALL_TILE * 2 else _LARGE_TILE
    grid = (experts, -(-most_rows // tile), -(-columns // _BLOCK))
    _grouped[grid](narrow, row_scale, weight, scale, out, ends, count, columns, inner, tile, _BLOCK)
    return out
