"""Pointing a model that was built on `meta` at the tensors of the weight arena.

Invariants
    1. Parameters become views of the arena, never copies; the arena is mapped read-only. They
       are plain tensors: nothing trains here, and a `Parameter` costs as much again as its view.
    2. Where the arena holds quantised weights, the layers that can compute with them are put in
       the place of the library's first.
    3. Nothing is left on `meta`, or the binding fails and says what is.

Binding is on the way of every start, beside an engine that decodes, and milliseconds count. So
what depends on the model alone is found by `make_ready`, in the zygote; what is left for a fork
is one view and one entry for each tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import nn

from cache.protocol import Manifest
from engines.native.errors import LeftOnMetaError, TensorMismatchError
from engines.native.experts import add_scales, take_over
from engines.native.fp8 import BLOCK, Fp8Linear
from engines.native.untyped import Untyped

__all__ = ["bind", "kinds_of_layers", "make_ready", "tensors_of"]

_SCALE: Final = "_scale_inv"
_READY: Final = "_understudy_ready"
_ROTARY: Final = "model.rotary_emb"


def tensors_of(manifest: Manifest, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a mapped arena by name, aliases included.

    `arena` is uint8, has one dimension and is the whole of its storage.

    Raises:
        TensorMismatchError: an entry lies askew, or is an alias of nothing.
    """
    found: dict[str, torch.Tensor] = {}
    typed = {name: _typed(arena, name) for name in {entry.dtype for entry in manifest.tensors}}
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            continue
        whole, item_bytes = typed[entry.dtype]
        offset, rest = divmod(entry.offset_bytes, item_bytes)
        if rest:
            raise TensorMismatchError(entry.name, f"{entry.dtype} at byte {entry.offset_bytes}")
        found[entry.name] = whole.as_strided(entry.shape, entry.stride, offset)
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            if entry.alias_of not in found:
                raise TensorMismatchError(entry.name, f"alias of {entry.alias_of}, which is absent")
            found[entry.name] = found[entry.alias_of]
    return found


def _typed(arena: torch.Tensor, dtype_name: str) -> tuple[torch.Tensor, int]:
    """The arena as numbers of one dtype, and the bytes of one."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    count = arena.numel() // dtype.itemsize
    return arena[: count * dtype.itemsize].view(dtype), dtype.itemsize


def make_ready(model: Untyped, names: Iterable[str]) -> None:
    """Put the layers in place that compute with tensors of these names; again, it does nothing.

    Rotary tables are computed, not loaded: that module is built again, on real memory.

    Raises:
        TensorMismatchError: a layer has no width that can be computed with.
    """
    scales = frozenset(name for name in names if name.endswith(_SCALE))
    ready: _Ready | None = getattr(model, _READY, None)
    if ready is not None and ready.scales == scales:
        return
    take_over(model)
    _make_room_for_scales(model, scales)
    places = [p for p in _places(model) if not p.name.startswith(f"{_ROTARY}.")]
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config)
    kinds = [tuple(map(type, layer.modules())) for layer in inner.layers]
    setattr(model, _READY, _Ready(scales, places, tuple(map(kinds.index, kinds))))


def kinds_of_layers(model: Untyped) -> tuple[int, ...]:
    """For each layer the number of the first one of its kind; the model was made ready.

    Layers are of a kind when they are made of the same modules: those have the same shapes.
    """
    ready: _Ready = getattr(model, _READY)
    return ready.kinds


def bind(model: Untyped, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every parameter and buffer of the model its memory.

    Raises:
        TensorMismatchError: a tensor of the arena has another shape or dtype than the model's.
        LeftOnMetaError: the arena lacks tensors.
    """
    make_ready(model, tensors)
    places: list[_Place] = getattr(model, _READY).places
    _point(places, tensors)
    rotary = model.model.rotary_emb.to(device, non_blocking=True)  # as `device.on_device`
    left = _left_on_meta([*places, *_places(rotary, _ROTARY)])
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
    """Where a module keeps one parameter or buffer, and what stood there without memory.

    That is kept: freeing it would make a fork copy three pages of its zygote in place of one.
    """

    name: str  # in the whole model
    store: dict[str, torch.Tensor | None]
    leaf: str
    wanted: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Ready:
    """What `make_ready` knows of a model; kept on the model itself."""

    scales: frozenset[str]
    places: list[_Place]  # all that is loaded
    kinds: tuple[int, ...]  # of layers


def _places(module: Untyped, prefix: str = "") -> Iterator[_Place]:
    """Every parameter and buffer; what several modules share comes once for each of them."""
    for path, part in module.named_modules(prefix=prefix):
        for store in (part._parameters, part._buffers):
            for leaf, tensor in store.items():
                if tensor is not None:
                    yield _Place(f"{path}.{leaf}" if path else leaf, store, leaf, tensor)


def _point(places: Iterable[_Place], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, store, leaf, wanted in places:
        tensor = tensors.get(name)
        if tensor is None:
            continue  # named by the check for meta, together with the others
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise TensorMismatchError(
                name,
                f"{tuple(tensor.shape)} {tensor.dtype} in the arena, "
                f"{tuple(wanted.shape)} {wanted.dtype} in the model",
            )
        store[leaf] = tensor


def _left_on_meta(places: Iterable[_Place]) -> list[str]:
    """Names of places that hold no memory now."""
    now = ((place.name, place.store[place.leaf]) for place in places)
    return [name for name, tensor in now if tensor is not None and tensor.is_meta]
