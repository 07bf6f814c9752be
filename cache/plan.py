"""The plan of a load: where each tensor goes and where its bytes come from. Pure.

Invariants
    1. Layout is a function of model, checkpoint dtypes and spec alone, in state-dict order, scales
       behind their weight, aligned to 256 bytes: two loads of one checkpoint give identical arenas.
    2. Every tensor of the model is either copied from the checkpoint or tied to one that is. What
       the checkpoint holds beyond that (old rotary tables) is left out.
    3. Floating tensors become `spec.dtype`; integers and booleans keep theirs. FP8 is accepted
       only for the matrices of linear layers, with scales, where the spec says `fp8_block`.
    4. The copies of one target come in order and cover it without a gap.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from cache.blocks import BLOCK, FP8_BLOCK, FP8_DTYPE, SCALE_DTYPE, scale_name, scale_shape
from cache.checkpoint import Checkpoint, TensorSource
from cache.checksum import BLAKE2B, MIX128
from cache.errors import MissingTensorError, UnexpectedDtypeError
from cache.families import ModelTensors, NamedShape
from cache.manifest import contiguous_stride
from cache.protocol import (
    TENSOR_ALIGNMENT_BYTES,
    Fingerprint,
    LoadSpec,
    Manifest,
    TensorEntry,
    dtype_bytes,
)

__all__ = ["Copy", "LoadPlan", "plan_load"]

_FLOATING: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_INTEGRAL: Final = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})


@dataclass(frozen=True, slots=True)
class Copy:
    """One checkpoint tensor on its way into the arena, whole or as a part of a fused one.

    With `scale` it is quantised on the way: values to `target`, scales to `scale`.
    """

    source: TensorSource
    target: TensorEntry
    position_bytes: int = 0  # of its first byte within the target
    scale: TensorEntry | None = None
    scale_position_bytes: int = 0

    @property
    def converts(self) -> bool:
        """Whether the dtype changes on the way."""
        return self.source.dtype != self.target.dtype

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.source.shape)

    @property
    def target_bytes(self) -> int:
        """How many bytes it takes in the target."""
        return self.elements * dtype_bytes(self.target.dtype)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The manifest (extents and checksums still open) and the copies that fill it."""

    manifest: Manifest
    copies: tuple[Copy, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes to be read from disk."""
        return sum(copy.source.size_bytes for copy in self.copies)

    def by_target(self) -> list[list[Copy]]:
        """The copies of each target together."""
        return [list(group) for _, group in groupby(self.copies, key=lambda c: c.target.name)]


def plan_load(
    spec: LoadSpec, fingerprint: Fingerprint, model: ModelTensors, checkpoint: Checkpoint
) -> LoadPlan:
    """Lay out the arena and pair every tensor with its source.

    Raises:
        MissingTensorError: the checkpoint lacks a tensor or has it in another shape.
        UnexpectedDtypeError: a tensor has a dtype that cannot become what the spec asks for.
    """
    aliases = _aliases(model, checkpoint)
    _check_present(model, checkpoint, aliases)
    layout = _Layout(spec, checkpoint)
    for entry in model.entries:
        if entry.name not in aliases:
            layout.add(entry)
    for entry in model.entries:
        if entry.name in aliases:
            layout.tie(entry, aliases[entry.name])
    algorithm = BLAKE2B if spec.device == "cpu" else MIX128
    tensors = list(layout.in_order_of(model))
    manifest = Manifest(fingerprint, layout.end, [], tensors, checksum_algorithm=algorithm)
    return LoadPlan(manifest, tuple(layout.copies))


@dataclass(slots=True)
class _Layout:
    """An arena that grows tensor by tensor."""

    spec: LoadSpec
    checkpoint: Checkpoint
    end: int = 0
    placed: dict[str, list[TensorEntry]] = field(default_factory=dict)
    """By the model's names: the tensor and, where it has them, its scales."""
    copies: list[Copy] = field(default_factory=list)

    def in_order_of(self, model: ModelTensors) -> Iterator[TensorEntry]:
        for entry in model.entries:
            yield from self.placed[entry.name]

    def add(self, entry: NamedShape) -> None:
        """Place a tensor, and its scales, and say what is copied there."""
        sources = _sources_of(entry, self.checkpoint)
        found = {source.dtype for source in sources}
        if entry.is_linear and self.spec.quantization == FP8_BLOCK:
            if found == {FP8_DTYPE}:
                self._add_quantised(entry, sources)
                return
            if found <= _FLOATING and not _is_prequantised(self.checkpoint):
                self._add_quantising(entry, sources)
                return
        dtype = _target_dtype(sources, entry, self.spec)
        self._copy_parts(self._place(entry.name, entry, entry.shape, dtype), sources)

    def _add_quantised(self, entry: NamedShape, sources: list[TensorSource]) -> None:
        """FP8 in the checkpoint: values as they are, scales as float32."""
        _check_whole_blocks(entry, sources)
        scales = [_scale_source(source, self.checkpoint) for source in sources]
        self._copy_parts(self._place(entry.name, entry, entry.shape, FP8_DTYPE), sources)
        self._copy_parts(self._place_scale(entry), scales)

    def _add_quantising(self, entry: NamedShape, sources: list[TensorSource]) -> None:
        """Floating in the checkpoint, FP8 in the arena."""
        _check_whole_blocks(entry, sources)
        target = self._place(entry.name, entry, entry.shape, FP8_DTYPE)
        scale = self._place_scale(entry)
        position = scale_position = 0
        for source in sources:
            copy = Copy(source, target, position, scale, scale_position)
            self.copies.append(copy)
            position += copy.target_bytes
            scale_position += math.prod(scale_shape(source.shape)) * dtype_bytes(SCALE_DTYPE)

    def _copy_parts(self, target: TensorEntry, sources: list[TensorSource]) -> None:
        position = 0
        for source in sources:
            copy = Copy(source, target, position)
            self.copies.append(copy)
            position += copy.target_bytes

    def _place_scale(self, entry: NamedShape) -> TensorEntry:
        return self._place(scale_name(entry.name), entry, scale_shape(entry.shape), SCALE_DTYPE)

    def _place(
        self, name: str, entry: NamedShape, shape: tuple[int, ...], dtype: str
    ) -> TensorEntry:
        offset = -(-self.end // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
        size_bytes = math.prod(shape) * dtype_bytes(dtype)
        stride = contiguous_stride(list(shape))
        placed = TensorEntry(name, offset, size_bytes, list(shape), stride, dtype, entry.kind)
        self.end = offset + size_bytes
        self.placed.setdefault(entry.name, []).append(placed)
        return placed

    def tie(self, entry: NamedShape, target_name: str) -> None:
        """An entry that shares the bytes of another."""
        (target,) = self.placed[target_name]
        alias = TensorEntry(
            entry.name,
            target.offset_bytes,
            target.size_bytes,
            target.shape,
            target.stride,
            target.dtype,
            entry.kind,
            alias_of=target.name,
        )
        self.placed[entry.name] = [alias]


def _sources_of(entry: NamedShape, checkpoint: Checkpoint) -> list[TensorSource]:
    """The checkpoint tensors that make up an entry: itself, or its parts."""
    if entry.parts and entry.name not in checkpoint.tensors:
        return [checkpoint.tensors[part] for part in entry.parts]
    return [checkpoint.tensors[entry.name]]


def _aliases(model: ModelTensors, checkpoint: Checkpoint) -> dict[str, str]:
    """Name to the name whose bytes it shares.

    A checkpoint that holds both halves of a tie gets both loaded: if they are equal it costs some
    memory, and if they differ the config's tie was wrong (transformers decides the same way).
    """
    aliases = {}
    for one, other in model.ties:
        if one not in checkpoint.tensors:
            aliases[one] = other
        elif other not in checkpoint.tensors:
            aliases[other] = one
    return aliases


def _check_present(model: ModelTensors, checkpoint: Checkpoint, aliases: dict[str, str]) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for entry in model.entries:
        if entry.name in aliases:
            continue
        if entry.parts and entry.name not in checkpoint.tensors:
            wanted |= dict.fromkeys(entry.parts, entry.part_shape)
        else:
            wanted[entry.name] = entry.shape
    absent = [name for name in wanted if name not in checkpoint.tensors]
    if absent:
        raise MissingTensorError(
            f"{checkpoint.path} lacks {len(absent)} of {len(wanted)} tensors, {absent[0]} first",
            absent,
        )
    for name, shape in wanted.items():
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise MissingTensorError(
                f"{name} has the shape {list(found)}, the config asks for {list(shape)}", [name]
            )


def _scale_source(source: TensorSource, checkpoint: Checkpoint) -> TensorSource:
    name, shape = scale_name(source.name), scale_shape(source.shape)
    scale = checkpoint.tensors.get(name)
    if scale is None:
        raise MissingTensorError(f"{source.name} is FP8, and its scales are not there", [name])
    if scale.shape != shape:
        raise MissingTensorError(
            f"{name} has the shape {list(scale.shape)}, blocks of {BLOCK} x {BLOCK} need "
            f"{list(shape)}",
            [name],
        )
    if scale.dtype not in _FLOATING:
        raise UnexpectedDtypeError(f"{name} holds {scale.dtype}, scales are floating")
    return scale


def _is_prequantised(checkpoint: Checkpoint) -> bool:
    """Then a floating linear layer is one that its maker left unquantised on purpose."""
    return bool(checkpoint.config.get("quantization_config"))


def _check_whole_blocks(entry: NamedShape, sources: list[TensorSource]) -> None:
    """Where matrices lie behind each other their rows must be whole blocks, or scales overlap."""
    rows = sources[0].shape[-2]
    if (len(sources) > 1 or len(entry.shape) > 2) and rows % BLOCK:
        raise UnexpectedDtypeError(
            f"{entry.name} has {rows} rows an expert, which is not a multiple of {BLOCK}",
            hint="load this model with quantization: none",
            details={"tensor": entry.name, "rows": rows},
        )


def _target_dtype(sources: list[TensorSource], entry: NamedShape, spec: LoadSpec) -> str:
    found = {source.dtype for source in sources}
    if found <= _FLOATING:
        return spec.dtype
    source = next(source for source in sources if source.dtype not in _FLOATING)
    details = {"tensor": source.name, "dtype": source.dtype}
    if source.dtype in _INTEGRAL and entry.kind == "buffer":
        return source.dtype
    if source.dtype in _INTEGRAL:
        raise UnexpectedDtypeError(
            f"{source.name} holds {source.dtype}, where a model's weights are floating",
            hint="the checkpoint may be quantised in a way that its config does not say",
            details=details,
        )
    if spec.quantization == FP8_BLOCK:
        raise UnexpectedDtypeError(
            f"{source.name} is {source.dtype}, where only whole linear layers may be",
            hint="the checkpoint quantises more than its format says",
            details=details,
        )
    raise UnexpectedDtypeError(
        f"{source.name} is {source.dtype} in a checkpoint that says it is not quantised",
        hint="its config lacks the quantization_config that belongs to it",
        details=details,
    )
