"""Which bytes a loader reads in one go, and where in the device arena they end up. Pure.

Copies are cut into parts that fit a buffer, and parts that follow each other in a file are read
together: a mixture's checkpoint has tens of thousands of small tensors, and one read and one copy
for each would cost more than the bytes do.

Invariants
    1. Only the bytes that the plan needs are read, each once.
    2. A part is never cut within a number, nor within a block of an FP8 matrix.
    3. Reads come in the order of files and offsets, so a cold disk is read front to back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache.blocks import BLOCK, SCALE_DTYPE
from cache.plan import Copy, LoadPlan
from cache.protocol import dtype_bytes

__all__ = ["Part", "Read", "plan_reads", "reads_need_torch"]

_BLOCK_SCALE_BYTES: Final = dtype_bytes(SCALE_DTYPE)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one copy. Offsets are in the file, and in the arena."""

    copy: Copy
    file_offset: int
    size_bytes: int
    arena_offset: int
    scale_arena_offset: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the bytes go into the arena as they are."""
        return not self.copy.converts


@dataclass(frozen=True, slots=True)
class Read:
    """One read into one buffer: parts of one file, one behind the other."""

    file: Path
    offset: int
    size_bytes: int
    parts: tuple[Part, ...]

    @property
    def is_plain(self) -> bool:
        """Whether no part of it is converted."""
        return all(part.is_plain for part in self.parts)


def reads_need_torch(reads: list[Read]) -> bool:
    """Whether anything is converted on the device."""
    return not all(read.is_plain for read in reads)


def plan_reads(plan: LoadPlan, buffer_bytes: int) -> list[Read]:
    """All reads of a plan. A buffer holds at least one band of blocks of the widest matrix."""
    parts = [part for copy in plan.copies for part in _parts(copy, buffer_bytes)]
    parts.sort(key=lambda part: (str(part.copy.source.file), part.file_offset))
    reads: list[Read] = []
    together: list[Part] = []
    size_bytes = 0
    for part in parts:
        if together and not _follows(together[-1], part, size_bytes, buffer_bytes):
            reads.append(_read(together, size_bytes))
            together, size_bytes = [], 0
        together.append(part)
        size_bytes += part.size_bytes
    if together:
        reads.append(_read(together, size_bytes))
    return reads


def _follows(last: Part, part: Part, size_bytes: int, buffer_bytes: int) -> bool:
    return (
        part.copy.source.file == last.copy.source.file
        and part.file_offset == last.file_offset + last.size_bytes
        and size_bytes + part.size_bytes <= buffer_bytes
    )


def _read(parts: list[Part], size_bytes: int) -> Read:
    return Read(parts[0].copy.source.file, parts[0].file_offset, size_bytes, tuple(parts))


def _parts(copy: Copy, buffer_bytes: int) -> Iterator[Part]:
    source, target = copy.source, copy.target
    if copy.scale is not None:
        yield from _bands(copy, buffer_bytes)
        return
    width = dtype_bytes(source.dtype)
    step = max(1, buffer_bytes // width) * width
    for start in range(0, source.size_bytes, step):
        done = start // width * dtype_bytes(target.dtype)
        yield Part(
            copy,
            source.offset_bytes + start,
            min(step, source.size_bytes - start),
            target.offset_bytes + copy.position_bytes + done,
        )


def _bands(copy: Copy, buffer_bytes: int) -> Iterator[Part]:
    """Bands of whole rows of blocks."""
    assert copy.scale is not None  # noqa: S101 - the caller has looked
    source, target, columns = copy.source, copy.target, copy.source.shape[-1]
    row_bytes = columns * dtype_bytes(source.dtype)
    band_bytes = BLOCK * row_bytes
    bands = max(1, buffer_bytes // band_bytes)
    scales_a_band = -(-columns // BLOCK) * _BLOCK_SCALE_BYTES
    for index, start in enumerate(range(0, source.size_bytes, bands * band_bytes)):
        rows = start // row_bytes
        yield Part(
            copy,
            source.offset_bytes + start,
            min(bands * band_bytes, source.size_bytes - start),
            target.offset_bytes + copy.position_bytes + rows * columns,
            copy.scale.offset_bytes + copy.scale_position_bytes + index * bands * scales_a_band,
        )
