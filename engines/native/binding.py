"""Pointing a model that was built on `meta` at the tensors of the weight arena.

Invariants
    1. Parameters become views of the arena, never copies; the arena is mapped read-only.
    2. Where the arena holds quantised weights, the layers that can compute with them are put in
       the place of the library's first.
    3. Nothing is left on `meta`, or the binding fails and says what is.
"""

from collections.abc import Mapping
from typing import Final

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
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in named if tensor.is_meta]
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


def _point(model: Untyped, tensors: Mapping[str, torch.Tensor]) -> None:
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
