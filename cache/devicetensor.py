"""Torch tensors over device memory that torch does not own. Imports torch: not for the daemon."""

from typing import Any

import torch

__all__ = ["tensor_at_device"]


class _Bytes:
    """Memory as CUDA array libraries announce it to each other.

    The interface has no names for bfloat16 and FP8, so everything goes through bytes.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        # Announced as writable: torch refuses read-only arrays. Whether a write is legal is the
        # mapping's business.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at_device(
    address: int, size_bytes: int, dtype: torch.dtype, device_index: int
) -> torch.Tensor:
    """A one-dimensional tensor over memory that outlives it; the caller sees to that. No copy."""
    device = torch.device("cuda", device_index)
    if size_bytes == 0:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.as_tensor(_Bytes(address, size_bytes), device=device).view(dtype)
