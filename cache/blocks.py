"""Block-wise FP8 as DeepSeek and Qwen3 store it: the shapes and names, without torch.

A linear weight is E4M3 in blocks of 128 x 128 (the last row and column of blocks may be smaller),
with one float32 per block beside it: `weight_scale_inv`, by which the block is multiplied. The
experts of a mixture are fused, one matrix behind the other, and so are their scales; then the rows
of each matrix must be whole blocks.
"""

from typing import Any, Final

__all__ = [
    "BLOCK",
    "FP8_BLOCK",
    "FP8_DTYPE",
    "SCALE_DTYPE",
    "is_block_fp8",
    "scale_name",
    "scale_shape",
]

BLOCK: Final = 128
FP8_BLOCK: Final = "fp8_block"
"""The value of `quantization` in topology and `LoadSpec`."""

FP8_DTYPE: Final = "float8_e4m3fn"
SCALE_DTYPE: Final = "float32"


def scale_name(weight: str) -> str:
    """Name of the scales that belong to a weight."""
    return f"{weight}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight of two or more dimensions."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def is_block_fp8(quantization: dict[str, Any]) -> bool:
    """Whether a checkpoint's `quantization_config` is this format, in its dynamic form."""
    return (
        quantization.get("quant_method") == "fp8"
        and quantization.get("weight_block_size") == [BLOCK, BLOCK]
        and quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
        and quantization.get("activation_scheme", "dynamic") == "dynamic"
        and quantization.get("scale_fmt") in (None, "float", "float32")
    )
