"""Pointing a model that was built on `meta` at the tensors of the weight arena.

Invariants
    1. Parameters become views of the arena, never copies; the arena is mapped read-only.
    2. Where the arena holds quantised weights, the layers that can compute with them are put in
       the place of the library's first.
    3. Nothing is left on `meta`, or the binding fails and says what is.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

from cache.protocol import Manifest
from engines.native.errors import LeftOnMetaError, TensorMismatchError
from engines.native.experts import add_scales, take_over
from engines.native.fp8 import BLOCK, Fp8Linear
from engines.native.untyped import Untyped

__all__ = ["bind", "tensors_of"]

_SCALE: Final = "_scale_inv"


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


def bind(model: Untyped, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every parameter and buffer of the model its memory.

    Raises:
        TensorMismatchError: a tensor of the arena has another shape or dtype than the model's.
        LeftOnMetaError: the arena lacks tensors.
    """
    take_over(model)
    _make_room_for_scales(model, tensors)
    _point(model, tensors)
    # Rotary tables are computed, not loaded: build that module again, on real memory.
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config).to(device)
    left = [place.name for place in _places(model) if place.tensor.is_meta]
    if left:
        raise LeftOnMetaError(left)


def _make_room_for_scales(model: Untyped, tensors: Mapping[str, torch.Tensor]) -> None:
    for name in tensors:
        if not name.endswith(_SCALE):
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf == f"weight{_SCALE}" and isinstance(module, nn.Linear):
            if module.in_features % BLOCK:
                raise TensorMismatchError(
                    name, f"{module.in_features} inputs are not a multiple of {BLOCK}"
                )
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, Fp8Linear(module))
        elif leaf == f"gate_up_proj{_SCALE}":
            add_scales(module)


class _Place(NamedTuple):
    """Where a module keeps one parameter or buffer."""

    name: str  # in the whole model
    store: dict[str, torch.Tensor | None]
    leaf: str
    tensor: torch.Tensor


def _places(model: Untyped) -> Iterator[_Place]:
    """Every parameter and buffer; what several modules share comes once for each of them.

    Walks the modules itself: the library's own iterators take five times as long, on a path where
    milliseconds count.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for store in (module._parameters, module._buffers):
            for leaf, tensor in store.items():
                if tensor is not None:
                    yield _Place(f"{prefix}{leaf}", store, leaf, tensor)


def _point(model: Untyped, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, store, leaf, wanted in _places(model):
        tensor = tensors.get(name)
        if tensor is None:
            continue  # named by the check for meta, together with the others
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise TensorMismatchError(
                name,
                f"{tuple(tensor.shape)} {tensor.dtype} in the arena, "
                f"{tuple(wanted.shape)} {wanted.dtype} in the model",
            )
        is_parameter = isinstance(wanted, torch.nn.Parameter)
        store[leaf] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
