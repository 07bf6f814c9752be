"""Conversions on the GPU while loading: another dtype, or block-wise FP8.

Imports torch, which a load that converts nothing never needs. Works on bytes that already lie in
device memory: a staging buffer holds what came from the file, the arena gets the result.
"""

from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from cache.blocks import SCALE_DTYPE
from cache.devicetensor import tensor_at_device
from cache.errors import CheckpointCorruptError
from cache.fp8 import quantise_blocks
from cache.plan import LoadPlan
from cache.protocol import dtype_bytes
from cache.transfers import Part

__all__ = ["DeviceConverter"]


class DeviceConverter:
    """Writes converted parts into the arena at `arena_address`. Used by many threads."""

    def __init__(self, ordinal: int, arena_address: int) -> None:
        self._ordinal: Final = ordinal
        self._arena: Final = arena_address

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Work of this thread goes to a stream of the driver's while the context is entered."""
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._ordinal))

    def convert(self, part: Part, staged: int) -> None:
        """Queue the conversion of a part whose file bytes lie at address `staged`."""
        copy = part.copy
        source = self._source(staged, part.size_bytes, copy.source.dtype)
        target_bytes = source.numel() * dtype_bytes(copy.target.dtype)
        target = self._tensor(self._arena + part.arena_offset, target_bytes, copy.target.dtype)
        if copy.scale is None:
            target.copy_(source)
            return
        columns = copy.source.shape[-1]
        values, scales = quantise_blocks(source.view(-1, columns))
        target.copy_(values.view(-1))
        scale_bytes = scales.numel() * dtype_bytes(SCALE_DTYPE)
        address = self._arena + part.scale_arena_offset
        self._tensor(address, scale_bytes, SCALE_DTYPE).copy_(scales.view(-1))

    def check(self, plan: LoadPlan) -> None:
        """Look at all new scales, once everything is done.

        Raises:
            CheckpointCorruptError: a weight was not finite.
        """
        made = {copy.scale.name: copy for copy in plan.copies if copy.scale is not None}
        for copy in made.values():
            assert copy.scale is not None  # noqa: S101 - chosen so
            address = self._arena + copy.scale.offset_bytes
            scales = self._tensor(address, copy.scale.size_bytes, SCALE_DTYPE)
            if not bool(torch.isfinite(scales).all()):
                reason = f"weights of {copy.target.name} are not finite"
                raise CheckpointCorruptError(str(copy.source.file), reason)

    def _source(self, address: int, size_bytes: int, dtype: str) -> torch.Tensor:
        """What came from the file. Its neighbours there may have left it unaligned."""
        if address % dtype_bytes(dtype):
            raw = self._tensor(address, size_bytes, "uint8").clone()
            return raw.view(getattr(torch, dtype))
        return self._tensor(address, size_bytes, dtype)

    def _tensor(self, address: int, size_bytes: int, dtype: str) -> torch.Tensor:
        return tensor_at_device(address, size_bytes, getattr(torch, dtype), self._ordinal)
