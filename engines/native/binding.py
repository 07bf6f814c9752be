"""Pointing a model that was built on `meta` at the tensors of the weight arena.

Invariants
    1. Parameters become views of the arena, never copies; the arena is mapped read-only.
    2. Where the arena holds quantised weights, the layers that can compute with them are put in
       the place of the library's first.
    3. Nothing is left on `meta`, or the binding fails and says what is.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

from cache.protocol import Manifest
from engines.native.errors import LeftOnMetaError, TensorMismatchError
from engines.native.experts import add_scales, take_over
from engines.native.fp8 import BLOCK, Fp8Linear
from engines.native.untyped import Untyped

__all__ = ["bind", "make_ready", "tensors_of"]

_SCALE: Final = "_scale_inv"
_READY_FOR: Final = "_understudy_scales"


def tensors_of(manifest: Manifest, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a mapped arena by name, aliases included.

    `arena` is uint8, has one dimension and is the whole of its storage.

    Raises:
        TensorMismatchError: an entry lies askew, or is an alias of nothing.
    """
    found: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}  # the arena as numbers of one dtype
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            continue
        typed = whole.get(entry.dtype)
        if typed is None:
            dtype = getattr(torch, entry.dtype)
            count = arena.numel() // dtype.itemsize
            typed = whole[entry.dtype] = arena[: count * dtype.itemsize].view(dtype)
        offset, rest = divmod(entry.offset_bytes, typed.element_size())
        if rest:
            raise TensorMismatchError(entry.name, f"{entry.dtype} at byte {entry.offset_bytes}")
        found[entry.name] = typed.as_strided(entry.shape, entry.stride, offset)
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            if entry.alias_of not in found:
                raise TensorMismatchError(entry.name, f"alias of {entry.alias_of}, which is absent")
            found[entry.name] = found[entry.alias_of]
    return found


def make_ready(model: Untyped, names: Iterable[str]) -> None:
    """Put the layers in place that compute with tensors of these names; again, it does nothing.

    Raises:
        TensorMismatchError: a layer has no width that can be computed with.
    """
    scales = frozenset(name for name in names if name.endswith(_SCALE))
    if getattr(model, _READY_FOR, None) == scales:
        return
    take_over(model)
    _make_room_for_scales(model, scales)
    setattr(model, _READY_FOR, scales)


def bind(model: Untyped, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every parameter and buffer of the model its memory.

    Raises:
        TensorMismatchError: a tensor of the arena has another shape or dtype than the model's.
        LeftOnMetaError: the arena lacks tensors.
    """
    make_ready(model, tensors)
    _point(model, tensors)
    # Rotary tables are computed, not loaded: build that module again, on real memory.
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config).to(device)
    left = [place.name for place in _places(model) if place.tensor.is_meta]
    if left:
        raise LeftOnMetaError(left)


def _make_room_for_scales(model: Untyped, scales: Iterable[str]) -> None:
    for name in scales:
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
