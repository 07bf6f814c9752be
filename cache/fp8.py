"""Block-wise FP8 in torch: quantising and its inverse, the same on CPU and GPU, bit for bit.

Imports torch: for loaders, engines and tests, not for the cache daemon.
"""

from typing import Final

import torch

from cache.blocks import BLOCK

__all__ = ["FP8_MAX", "dequantise_blocks", "quantise_blocks"]

FP8_MAX: Final = 448.0
"""Largest finite E4M3 value."""

_SMALLEST_SCALE: Final = 1e-30
"""Keeps a block of denormal weights from dividing by zero; it becomes zero."""


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and float32 scales of a matrix; `values * scale` gives it back, rounded.

    A block of non-finite weights has a non-finite scale: the caller looks at the scales.
    """
    rows, columns = weight.shape
    blocks = _blocks(weight.to(torch.float32))
    largest = blocks.abs().amax(dim=3).amax(dim=1)  # in two steps: the first reads in a row
    # By a tensor: on a GPU torch divides by a plain number by multiplying with its inverse.
    shares = largest / torch.full_like(largest, FP8_MAX)
    scale = torch.where(largest == 0, torch.ones_like(largest), shares.clamp(min=_SMALLEST_SCALE))
    values = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    flat = values.view(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
    return flat[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale


def dequantise_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 matrix that values and scales stand for; any leading dimensions."""
    *_, rows, columns = values.shape
    wide = scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return values.to(torch.float32) * wide[..., :rows, :columns]


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """`[block rows, 128, block columns, 128]`, padded with zeros."""
    rows, columns = matrix.shape
    if rows % BLOCK or columns % BLOCK:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return matrix.reshape(matrix.shape[0] // BLOCK, BLOCK, matrix.shape[1] // BLOCK, BLOCK)
