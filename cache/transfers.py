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

__all__ = ["Part", "Read", "plan_reads"]

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


def plan_reads(plan: LoadPlan, buffer_bytes: int) -> list[Read]:
    """All reads of a plan. A buffer holds at least one band of blocks of the widest matrix."""
    by_file: dict[Path, list[Copy]] = {}
    for copy in plan.copies:
        by_file.setdefault(copy.source.file, []).append(copy)
    reads: list[Read] = []
    for file in sorted(by_file):
        copies = sorted(by_file[file], key=lambda copy: copy.source.offset_bytes)
        reads += _reads_of_file(file, copies, buffer_bytes)
    return reads


def _reads_of_file(file: Path, copies: list[Copy], buffer_bytes: int) -> Iterator[Read]:
    together: list[Part] = []
    start = size_bytes = 0
    for copy in copies:
        for part in _parts(copy, buffer_bytes):
            follows = part.file_offset == start + size_bytes
            if together and (not follows or size_bytes + part.size_bytes > buffer_bytes):
                yield Read(file, start, size_bytes, tuple(together))
                together = []
            if not together:
                start, size_bytes = part.file_offset, 0
            together.append(part)
            size_bytes += part.size_bytes
    if together:
        yield Read(file, start, size_bytes, tuple(together))


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
