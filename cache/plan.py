"""The plan of a load: where each tensor goes and where its bytes come from. Pure.

Invariants
    1. Layout is a function of model and dtype alone, in state-dict order, aligned to 256 bytes:
       two loads of one checkpoint give identical arenas.
    2. Every tensor of the model is either copied from the checkpoint or tied to one that is. What
       the checkpoint holds beyond that (old rotary tables) is left out.
    3. Floating tensors become `spec.dtype`; integers and booleans keep theirs. Quantised floats
       in an unquantised checkpoint are refused: without their scales they mean nothing.
"""

from dataclasses import dataclass
from typing import Final

from cache.checkpoint import Checkpoint, TensorSource
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
    """One tensor on its way from a file into the arena."""

    source: TensorSource
    target: TensorEntry

    @property
    def converts(self) -> bool:
        """Whether the dtype changes on the way."""
        return self.source.dtype != self.target.dtype


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The manifest (extents and checksums still open) and the copies that fill it."""

    manifest: Manifest
    copies: tuple[Copy, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes to be read from disk."""
        return sum(copy.source.size_bytes for copy in self.copies)


def plan_load(
    spec: LoadSpec, fingerprint: Fingerprint, model: ModelTensors, checkpoint: Checkpoint
) -> LoadPlan:
    """Lay out the arena and pair every tensor with its source.

    Raises:
        MissingTensorError: the checkpoint lacks a tensor or has it in another shape.
        UnexpectedDtypeError: a tensor has a dtype that cannot become `spec.dtype`.
    """
    aliases = _aliases(model, checkpoint)
    _check_present(model, checkpoint, aliases)
    placed: dict[str, TensorEntry] = {}
    copies: list[Copy] = []
    end = 0
    for entry in model.entries:
        if entry.name in aliases:
            continue
        source = checkpoint.tensors[entry.name]
        offset = -(-end // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
        placed[entry.name] = _place(entry, _target_dtype(source, entry, spec.dtype), offset)
        copies.append(Copy(source, placed[entry.name]))
        end = offset + placed[entry.name].size_bytes
    tensors = [
        placed.get(entry.name) or _alias(entry, placed[aliases[entry.name]])
        for entry in model.entries
    ]
    return LoadPlan(Manifest(fingerprint, end, [], tensors), tuple(copies))


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
    needed = [entry for entry in model.entries if entry.name not in aliases]
    absent = [entry.name for entry in needed if entry.name not in checkpoint.tensors]
    if absent:
        raise MissingTensorError(
            f"{checkpoint.path} lacks {len(absent)} of {len(needed)} tensors, {absent[0]} first",
            absent,
        )
    for entry in needed:
        shape = checkpoint.tensors[entry.name].shape
        if shape != entry.shape:
            raise MissingTensorError(
                f"{entry.name} has the shape {list(shape)}, the config asks for "
                f"{list(entry.shape)}",
                [entry.name],
            )


def _target_dtype(source: TensorSource, entry: NamedShape, wanted: str) -> str:
    if source.dtype in _FLOATING:
        return wanted
    if source.dtype in _INTEGRAL and entry.kind == "buffer":
        return source.dtype
    if source.dtype in _INTEGRAL:
        raise UnexpectedDtypeError(
            f"{source.name} holds {source.dtype}, where a model's weights are floating",
            hint="the checkpoint may be quantised in a way that its config does not say",
            details={"tensor": source.name, "dtype": source.dtype},
        )
    raise UnexpectedDtypeError(
        f"{source.name} is {source.dtype} in a checkpoint that says it is not quantised",
        hint="its config lacks the quantization_config that belongs to it",
        details={"tensor": source.name, "dtype": source.dtype},
    )


def _place(entry: NamedShape, dtype: str, offset_bytes: int) -> TensorEntry:
    size_bytes = dtype_bytes(dtype)
    for length in entry.shape:
        size_bytes *= length
    shape = list(entry.shape)
    return TensorEntry(
        entry.name, offset_bytes, size_bytes, shape, contiguous_stride(shape), dtype, entry.kind
    )


def _alias(entry: NamedShape, target: TensorEntry) -> TensorEntry:
    return TensorEntry(
        entry.name,
        target.offset_bytes,
        target.size_bytes,
        target.shape,
        target.stride,
        target.dtype,
        entry.kind,
        alias_of=target.name,
    )
