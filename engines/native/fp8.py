"""Linear layers in block-wise FP8: E4M3 weights with one scale for each 128 x 128 block.

The arena holds `weight` (float8_e4m3fn) and `weight_scale_inv` (float32, one number a block, to be
multiplied with). Activations are quantised on the way, one scale for 128 values of a row, and both
go through torch's block-scaled matrix product. A row's result depends on that row alone.

On the CPU, which has no such product, weights are dequantised for each call: right and slow,
there for tests.
"""

import importlib.util
import weakref
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

__all__ = ["BLOCK", "Fp8Linear", "dequantise", "quantise_rows"]

BLOCK: Final = 128
_LARGEST: Final = 448.0  # of float8_e4m3fn
_has_triton: Final = importlib.util.find_spec("triton") is not None
_PRODUCT_INPUTS: Final = 4 * BLOCK
"""The block-scaled product reads weight scales in rows of a multiple of four. Measured on an H200
(torch 2.11): with another number of blocks it takes the wrong scales and says nothing, and scales
padded to four are refused. Such layers are dequantised for each call."""

_SMALLEST_SCALE: Final = 1e-12
"""A row of zeros has some scale: dividing by zero would make it NaN."""


def blocks_of(size: int) -> int:
    """Blocks along one side, the last one perhaps partly used."""
    return -(-size // BLOCK)


def dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[..., rows, columns]` in full width; in float32 until the last step."""
    rows, columns = weight.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    wide = wide.repeat_interleave(BLOCK, dim=-1)[..., :columns]
    return (weight.to(torch.float32) * wide).to(dtype)


def quantise_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[rows, columns]` to E4M3 and a scale for 128 values, `[rows, columns / 128]`.

    Scales lie column by column in memory: the product takes them in no other order.
    """
    if values.is_cuda and _has_triton:
        from engines.native.fp8_kernels import quantise

        return quantise(values.contiguous())
    rows, columns = values.shape
    parts = values.view(rows, columns // BLOCK, BLOCK).to(torch.float32)
    scale = parts.abs().amax(dim=-1).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
    narrow = (parts / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return narrow.view(rows, columns), scale.t().contiguous().t()


class _LastInput:
    """The quantised form of the input seen last: q, k and v (and gate and up) have the same."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def quantised(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._made is None or self._of is None or self._of() is not values:
            self._made = quantise_rows(values.reshape(-1, values.shape[-1]))
            self._of = weakref.ref(values)
        return self._made


_last_input: Final = _LastInput()
"""One model thread computes, so one is enough."""


class Fp8Linear(nn.Module):
    """Stands in for `nn.Linear` where the arena holds a quantised weight. Made on `meta`."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        rows, columns = original.out_features, original.in_features
        self.out_features, self.in_features = rows, columns
        narrow = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(blocks_of(rows), blocks_of(columns), device="meta")
        self.weight = nn.Parameter(narrow, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale.float(), requires_grad=False)
        self.bias = original.bias

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`."""
        if not values.is_cuda or self.in_features % _PRODUCT_INPUTS:
            weight = dequantise(self.weight, self.weight_scale_inv, values.dtype)
            return F.linear(values, weight, self.bias)
        narrow, scale = _last_input.quantised(values)
        out = torch._scaled_mm(
            narrow,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.weight_scale_inv.t(),
            out_dtype=values.dtype,
        )
        if self.bias is not None:
            out = out + self.bias
        return out.view(*values.shape[:-1], self.out_features)
