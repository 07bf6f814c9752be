"""The model: `transformers` code, parameters in the weight arena, keys and values in slots.

`decode` always runs all slots, one token each. `prefill` runs one slot, `CHUNK_TOKENS` tokens,
padded. These two shapes are the only ones that ever reach a matrix product, because bits of a
row change with the shape (measured: `linear` differs between 1 and 16 rows).

Invariants
    1. Nothing is left on `meta`: the constructor refuses, naming what it is.
    2. Parameters are views of the arena, never copies; the arena is mapped read-only.
    3. The attended length of a decode step comes from `lengths`, a set the self-check proved
       bit-equal; that of a prefill chunk depends on the request's own position alone.

WARNING: one thread at a time, and only inside `torch.inference_mode`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from cache.protocol import KvGeometry, Manifest
from engines.native.attention import StepInputs
from engines.native.errors import LeftOnMetaError, TensorMismatchError
from engines.native.kv import KvMemoryView
from engines.native.skeleton import Skeleton, Untyped

__all__ = ["CHUNK_TOKENS", "SlotModel", "attended_lengths", "tensors_of"]

CHUNK_TOKENS: Final = 64
"""Tokens of one prefill chunk. A longer chunk is a longer pause for the rows that decode."""

_FIRST_LENGTH: Final = 128


def attended_lengths(max_length: int) -> tuple[int, ...]:
    """Candidates for the attended length: 128, then powers of two and their halves between."""
    lengths: list[int] = []
    step = _FIRST_LENGTH
    while step < max_length:
        lengths.append(step)
        if step >= 2 * _FIRST_LENGTH and step * 3 // 2 < max_length:
            lengths.append(step * 3 // 2)
        step *= 2
    return (*lengths, max_length)


def tensors_of(manifest: Manifest, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a mapped arena (uint8, one dimension) by name, aliases included."""
    found: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            continue
        part = arena[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        typed = part.view(getattr(torch, entry.dtype))
        found[entry.name] = torch.as_strided(typed, entry.shape, entry.stride)
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            if entry.alias_of not in found:
                raise TensorMismatchError(entry.name, f"alias of {entry.alias_of}, which is absent")
            found[entry.name] = found[entry.alias_of]
    return found


@dataclass(slots=True)
class _DecodeBuffers:
    """Inputs of a decode step, written in place: numpy on our side, torch on the model's."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    is_active: npt.NDArray[np.bool_]


class SlotModel:
    """A model over slots. Built in the engine, from a skeleton and an arena."""

    def __init__(
        self, skeleton: Skeleton, tensors: Mapping[str, torch.Tensor], geometry: KvGeometry
    ) -> None:
        self.geometry = geometry
        self.lengths: tuple[int, ...] = (geometry.max_length,)
        self.vocabulary_size = int(skeleton.config.vocab_size)
        self._model = skeleton.model
        _bind(self._model, tensors)
        _compute_rotary(self._model)
        _check_nothing_on_meta(self._model)
        slots = geometry.slots
        self._buffers = _DecodeBuffers(
            np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.zeros(slots, np.bool_)
        )
        self._ids = torch.from_numpy(self._buffers.ids).view(slots, 1)
        self._positions = torch.from_numpy(self._buffers.positions)
        self._is_active = torch.from_numpy(self._buffers.is_active)
        self._all_positions = torch.arange(geometry.max_length)
        self._chunk_ids = torch.zeros(1, CHUNK_TOKENS, dtype=torch.int64)
        self._chunk_offsets = torch.arange(CHUNK_TOKENS)
        dtype = getattr(torch, geometry.dtype)
        self._zero = torch.zeros((), dtype=dtype)
        self._minus_infinity = torch.full((), float("-inf"), dtype=dtype)

    @property
    def inner(self) -> Untyped:
        """The decoder stack below the head; the self-check shortens it for its time."""
        return self._model.model

    def decode(
        self,
        kv: KvMemoryView,
        tokens: Sequence[tuple[int, int, int]],
        *,
        attended_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """One token for each (slot, token id, position); logits of all slots `[slots, vocab]`.

        Rows of slots that are not named run too, write to the tail and mean nothing.
        `attended_tokens` overrides the choice of length (the self-check).
        """
        buffers = self._buffers
        buffers.ids.fill(0)
        buffers.positions.fill(0)
        buffers.is_active.fill(False)
        longest = 0
        for slot, token_id, position in tokens:
            buffers.ids[slot] = token_id
            buffers.positions[slot] = position
            buffers.is_active[slot] = True
            longest = max(longest, position)
        attended = attended_tokens or self.lengths[bisect_left(self.lengths, longest + 1)]
        visible = self._all_positions[:attended] <= self._positions[:, None]
        step = StepInputs(
            kv=kv,
            rows=kv.decode_rows(self._positions, self._is_active),
            first_slot=0,
            slots=self.geometry.slots,
            attended_tokens=attended,
            mask=torch.where(visible, self._zero, self._minus_infinity)[:, None, None, :],
        )
        out = self._forward(self._ids, self._positions[:, None], step)
        return _to_numpy(out[:, 0])

    def prefill(
        self, kv: KvMemoryView, slot: int, ids: Sequence[int], *, start: int
    ) -> npt.NDArray[np.float32]:
        """At most `CHUNK_TOKENS` prompt tokens from position `start` on; logits of the last."""
        count = len(ids)
        self._chunk_ids.zero_()
        self._chunk_ids[0, :count] = torch.tensor(ids)
        positions = start + self._chunk_offsets
        last = kv.geometry.max_length - 1
        attended = min(-(-(start + CHUNK_TOKENS) // _FIRST_LENGTH) * _FIRST_LENGTH, last + 1)
        visible = self._all_positions[:attended] <= positions[:, None]
        step = StepInputs(
            kv=kv,
            rows=kv.chunk_rows(slot, start, count),
            first_slot=slot,
            slots=1,
            attended_tokens=attended,
            mask=torch.where(visible, self._zero, self._minus_infinity)[None, None],
        )
        # Padding behind the last slot position would index the rotary table out of range.
        positions = positions.clamp(max=last)[None]
        out = self._forward(self._chunk_ids, positions, step, keep=torch.tensor([count - 1]))
        return _to_numpy(out[0, 0])

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
        *,
        keep: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        out: torch.Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            understudy_step=step,
        ).logits
        return out


def _to_numpy(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = logits.to(torch.float32).numpy()
    return found


def _bind(model: Untyped, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace each meta parameter and persistent buffer by its tensor of the arena."""
    for name, wanted in list(model.state_dict(keep_vars=True).items()):
        tensor = tensors.get(name)
        if tensor is None:
            continue  # named by the check for meta, together with the others
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise TensorMismatchError(
                name,
                f"{tuple(tensor.shape)} {tensor.dtype} in the arena, "
                f"{tuple(wanted.shape)} {wanted.dtype} in the model",
            )
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor


def _compute_rotary(model: Untyped) -> None:
    """Rotary tables are computed, not loaded: build that module again, on real memory."""
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config)


def _check_nothing_on_meta(model: Untyped) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in named if tensor.is_meta]
    if left:
        raise LeftOnMetaError(left)
