"""The KV memory as the model sees it: one flat `[rows, head_dim]` view and a slot-shaped one.

A row is one head's key (or value) of one token. Writes go through row numbers that are an *input*
of the step, so the serving computation can run with no slot active: every row number then points
into the *tail*, a few private discard rows behind the shared range.

Invariants
    1. A row of an inactive slot, and of padding, is written to the tail, never to a slot.
    2. Tail rows of one step are distinct: what they hold never depends on the order of writes.
    3. Reading is by slot and attended length; nobody reads the tail.

WARNING: the shared part may be mapped read-only. Torch does not know: a write there is SIGSEGV,
or on CUDA an illegal access that costs the process its context.
"""

from typing import Final

import torch

from cache.protocol import KvGeometry, dtype_bytes
from engines.native.device import HOST, Device, on_device

__all__ = ["KvMemoryView", "tail_bytes_for"]

_PAGE_BYTES: Final = 4096


def _row_bytes(geometry: KvGeometry) -> int:
    return geometry.head_dim * dtype_bytes(geometry.dtype)


def _tail_rows(geometry: KvGeometry, chunk_tokens: int) -> int:
    return 2 * geometry.kv_heads * max(geometry.slots, chunk_tokens)


def tail_bytes_for(geometry: KvGeometry, chunk_tokens: int) -> int:
    """Bytes of private discard memory wanted behind the shared range, in whole pages."""
    # One row more: the tail starts at a page, which need not be a multiple of a row.
    wanted = (_tail_rows(geometry, chunk_tokens) + 1) * _row_bytes(geometry)
    return -(-wanted // _PAGE_BYTES) * _PAGE_BYTES


class KvMemoryView:
    """Tensor views and write indices over one KV memory."""

    def __init__(
        self,
        geometry: KvGeometry,
        flat: torch.Tensor,
        *,
        tail_row: int,
        chunk_tokens: int,
        layers_share_rows: bool = False,
    ) -> None:
        """Use `of_mapping` or `private`; `flat` is `[rows, head_dim]`, contiguous."""
        g = geometry
        device = flat.device
        self.geometry = g
        self.flat = flat
        self.chunk_tokens = chunk_tokens
        per_part = g.slots * g.kv_heads * g.max_length
        layer_rows = 0 if layers_share_rows else 2 * per_part
        strides_rows = (layer_rows, per_part, g.kv_heads * g.max_length, g.max_length, 1)
        self.slots = torch.as_strided(
            flat,
            (g.layers, 2, g.slots, g.kv_heads, g.max_length, g.head_dim),
            (*(rows * g.head_dim for rows in strides_rows), 1),
        )
        """`[layers, 2, slots, kv_heads, max_length, head_dim]`"""
        layer = torch.arange(g.layers)[:, None, None, None] * layer_rows
        part = torch.arange(2)[None, :, None, None] * per_part
        slot = torch.arange(g.slots)[:, None]
        head = (slot * g.kv_heads + torch.arange(g.kv_heads)) * g.max_length
        first_row = layer + part + head  # of position 0: [layers, 2, slots, kv_heads]
        self._first_row = on_device(first_row, device)
        tail = on_device(tail_row + torch.arange(_tail_rows(g, chunk_tokens)), device)
        self._decode_tail = tail[: 2 * g.slots * g.kv_heads].view(1, 2, g.slots, g.kv_heads)
        self._chunk_tail = tail[: 2 * chunk_tokens * g.kv_heads].view(
            1, 2, g.kv_heads, chunk_tokens
        )
        self._chunk_offsets = on_device(torch.arange(chunk_tokens), device)

    @classmethod
    def of_mapping(
        cls,
        geometry: KvGeometry,
        address: int,
        *,
        shared_bytes: int,
        tail_bytes: int,
        device: Device = HOST,
    ) -> "KvMemoryView":
        """Over a mapping: `shared_bytes` of arena (whole pages), then `tail_bytes` of tail."""
        row_bytes = _row_bytes(geometry)
        rows = (shared_bytes + tail_bytes) // row_bytes
        dtype = getattr(torch, geometry.dtype)
        flat = device.tensor_at(address, rows * row_bytes, dtype).view(rows, geometry.head_dim)
        tail_row = -(-shared_bytes // row_bytes)
        return cls(geometry, flat, tail_row=tail_row, chunk_tokens=device.chunk_tokens)

    @classmethod
    def private(
        cls, geometry: KvGeometry, *, device: Device = HOST, layers_share_rows: bool = False
    ) -> "KvMemoryView":
        """Over zero-filled memory of this process's own.

        With `layers_share_rows` all layers use the same memory: enough to prove things about one
        step, at a fraction of the size.
        """
        shared = 2 * geometry.slots * geometry.kv_heads * geometry.max_length
        shared *= 1 if layers_share_rows else geometry.layers
        rows = shared + _tail_rows(geometry, device.chunk_tokens)
        dtype = getattr(torch, geometry.dtype)
        flat = torch.zeros(rows, geometry.head_dim, dtype=dtype, device=device.torch_device)
        return cls(
            geometry,
            flat,
            tail_row=shared,
            chunk_tokens=device.chunk_tokens,
            layers_share_rows=layers_share_rows,
        )

    def decode_rows(self, positions: torch.Tensor, is_active: torch.Tensor) -> torch.Tensor:
        """Where a decode step writes: `[layers, 2, slots * kv_heads]`."""
        rows = self._first_row + positions[None, None, :, None]
        rows = torch.where(is_active[None, None, :, None], rows, self._decode_tail)
        return rows.view(self.geometry.layers, 2, -1)

    def chunk_rows(
        self, slot: int | torch.Tensor, start: int | torch.Tensor, tokens: int | torch.Tensor
    ) -> torch.Tensor:
        """Where a prefill chunk writes, padding to the tail: `[layers, 2, kv_heads * chunk]`.

        In a graph all three are tensors; `slot` then has one dimension.
        """
        if isinstance(slot, torch.Tensor):
            first = self._first_row.index_select(2, slot).squeeze(2)
        else:
            first = self._first_row[:, :, slot]
        rows = first[..., None] + (start + self._chunk_offsets)
        rows = torch.where(self._chunk_offsets < tokens, rows, self._chunk_tail)
        return rows.view(self.geometry.layers, 2, -1)

    def zero(self, slot: int, tokens: int) -> None:
        """Wipe the first `tokens` positions of a slot."""
        self.slots[:, :, slot, :, :tokens].zero_()
