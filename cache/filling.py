"""Filling a host arena: parallel reads, conversion where the dtype changes, checksums on the way.

Each tensor of the arena is one task of a small thread pool. A task reads a chunk into a buffer that
stays in the CPU's cache, converts or quantises it where that is asked for, hashes it there and
writes it to the arena: reading, hashing and copying of different tensors overlap, and the
interpreter lock is free during all three. A fused tensor is read part by part, in order.

Why `pwrite` and not a mapping: a first touch through a mapping costs a page fault and a cleared
page for each 4 KiB (measured: 1.9 GiB/s against 2.5 GiB/s on two cores), and a page that cannot
be had is SIGBUS, while `pwrite` answers ENOSPC or ENOMEM, which is a sentence.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cache.blocks import BLOCK
from cache.checkpoint import TensorSource
from cache.errors import ArenaMemoryError, CheckpointCorruptError, CheckpointMissingError
from cache.manifest import CHECKSUM_BYTES
from cache.plan import Copy, LoadPlan
from cache.protocol import Progress, TensorEntry

if TYPE_CHECKING:
    import torch

__all__ = ["CHUNK_BYTES", "ArenaWriter", "HostWriter", "fill", "read_fully"]

CHUNK_BYTES: Final = 1 << 20

_PROGRESS_EVERY_S: Final = 0.1


class ArenaWriter(Protocol):
    """Where the bytes go. Called from several threads at once, never for the same bytes."""

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write all of `data` at `offset_bytes` of the arena."""
        ...


class HostWriter:
    """Writes at arena offsets, across extents. Thread-safe: `pwrite` keeps no position."""

    def __init__(self, fds: Sequence[int], extent_bytes: Sequence[int]) -> None:
        self._extents: list[tuple[int, int, int]] = []  # first offset, end offset, descriptor
        start = 0
        for fd, size_bytes in zip(fds, extent_bytes, strict=True):
            self._extents.append((start, start + size_bytes, fd))
            start += size_bytes
        self._total_bytes = start

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write all of `data` at `offset_bytes`.

        Raises:
            ArenaMemoryError: the pages for it are not to be had.
        """
        for start, end, fd in self._extents:
            while data and start <= offset_bytes < end:
                part = data[: end - offset_bytes]
                try:
                    written = os.pwrite(fd, part, offset_bytes - start)
                except OSError as error:
                    reason = error.strerror or "unknown reason"
                    raise ArenaMemoryError("weights", self._total_bytes, reason) from error
                data = data[written:]
                offset_bytes += written


class _Cancelled(Exception):  # noqa: N818 - not an error: another task has failed already
    """Another tensor failed; this one stops."""


def fill(
    plan: LoadPlan,
    writer: ArenaWriter,
    *,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, str]:
    """Copy every tensor of the plan into the arena; returns checksums by tensor name.

    `on_progress` is called in the calling thread, at most ten times a second.

    Raises:
        CheckpointCorruptError: a file ended early.
        CheckpointMissingError: a file cannot be opened or read.
        ArenaMemoryError: the arena's memory is not there after all.
    """
    run = _Run(plan, writer)
    count = threads or max(4, min(8, len(os.sched_getaffinity(0))))
    with ExitStack() as stack:
        run.open_files(stack)
        pool = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="load"))
        pending = {pool.submit(run.fill, copies) for copies in plan.by_target()}
        started_s = time.monotonic()
        while pending:
            _, pending = wait(pending, timeout=_PROGRESS_EVERY_S)
            if on_progress is not None:
                on_progress(run.progress(time.monotonic() - started_s))
    if run.failure is not None:
        raise run.failure
    return run.checksums


class _Run:
    """State shared by the threads of one fill. The first failure stops all of them."""

    def __init__(self, plan: LoadPlan, writer: ArenaWriter) -> None:
        self._writer = writer
        self._paths = sorted({copy.source.file for copy in plan.copies})
        self._total_bytes = plan.source_bytes
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._done_bytes = 0
        self.checksums: dict[str, str] = {}
        self.failure: BaseException | None = None

    def open_files(self, stack: ExitStack) -> None:
        for path in self._paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointMissingError(f"{path} cannot be read: {error.strerror}") from error
            stack.callback(os.close, fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._files[path] = fd

    def progress(self, elapsed_s: float) -> Progress:
        done = self._done_bytes
        rate = done / elapsed_s if elapsed_s > 0 else 0.0
        eta_s = (self._total_bytes - done) / rate if rate > 0 else None
        return Progress(done, self._total_bytes, rate, eta_s)

    def fill(self, copies: list[Copy]) -> None:
        """All that goes into one target."""
        try:
            sinks = self._fill(copies)
        except _Cancelled:
            return
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who raises it
            with self._lock:
                self.failure = self.failure or error
            return
        with self._lock:
            self.checksums |= {sink.name: sink.digest.hexdigest() for sink in sinks}

    def _fill(self, copies: list[Copy]) -> list["_Sink"]:
        first = copies[0]
        sink = _Sink(self._writer, first.target)
        if first.scale is not None:
            scale = _Sink(self._writer, first.scale)
            for copy in copies:
                self._quantise(copy, sink, scale)
            return [sink, scale]
        for copy in copies:
            convert = (
                _converter(copy.source.dtype, copy.target.dtype) if copy.converts else _unchanged
            )
            for part in self._chunks(copy.source, CHUNK_BYTES):
                sink.put(convert(part))
        return [sink]

    def _quantise(self, copy: Copy, values: "_Sink", scales: "_Sink") -> None:
        """A band of whole blocks at a time."""
        quantise = _quantiser(copy.source)
        band_bytes = BLOCK * copy.source.size_bytes // copy.source.shape[-2]
        for part in self._chunks(copy.source, band_bytes):
            value, scale = quantise(part)
            values.put(value)
            scales.put(scale)

    def _chunks(self, source: TensorSource, chunk_bytes: int) -> Iterator[memoryview]:
        """The source in pieces, each in the same buffer."""
        buffer = memoryview(bytearray(min(chunk_bytes, source.size_bytes)))
        done = 0
        while done < source.size_bytes:
            part = buffer[: source.size_bytes - done]
            self._read(source, part, done)
            yield part
            done += len(part)

    def _read(self, source: TensorSource, into: memoryview, position: int) -> None:
        """Fill `into` from `position` bytes behind the tensor's start."""
        if self.failure is not None:
            raise _Cancelled
        read_fully(self._files[source.file], into, source.offset_bytes + position, source)
        with self._lock:
            self._done_bytes += len(into)


class _Sink:
    """One target being written front to back."""

    def __init__(self, writer: ArenaWriter, target: TensorEntry) -> None:
        self.name = target.name
        self.digest = blake2b(digest_size=CHECKSUM_BYTES)
        self._writer = writer
        self._position = target.offset_bytes

    def put(self, data: memoryview) -> None:
        self.digest.update(data)
        self._writer.write(self._position, data)
        self._position += len(data)


def read_fully(fd: int, into: memoryview, offset: int, source: TensorSource) -> None:
    """Fill `into` from byte `offset` of the file in which `source` lies.

    Raises:
        CheckpointMissingError: it cannot be read.
        CheckpointCorruptError: it ends early.
    """
    filled = 0
    while filled < len(into):
        try:
            got = os.preadv(fd, [into[filled:]], offset + filled)
        except OSError as error:
            raise CheckpointMissingError(
                f"{source.file} cannot be read at byte {offset + filled}: {error.strerror}"
            ) from error
        if got == 0:
            raise CheckpointCorruptError(
                str(source.file), f"it ends at byte {offset + filled}, inside {source.name}"
            )
        filled += got


def _unchanged(data: memoryview) -> memoryview:
    return data


def _converter(source: str, target: str) -> Callable[[memoryview], memoryview]:
    """Bytes of one floating dtype to bytes of another, rounding as torch does.

    Torch is imported only here: a checkpoint that has its dtype already loads without it.
    """
    import torch

    torch.set_num_threads(1)  # the pool is the parallelism
    from_dtype, to_dtype = getattr(torch, source), getattr(torch, target)

    def convert(data: memoryview) -> memoryview:
        return _bytes_of(torch.frombuffer(data, dtype=from_dtype).to(to_dtype))

    return convert


def _quantiser(source: TensorSource) -> Callable[[memoryview], tuple[memoryview, memoryview]]:
    """Bytes of rows of a matrix to bytes of FP8 values and of scales."""
    import torch

    from cache.fp8 import quantise_blocks

    torch.set_num_threads(1)
    dtype, columns = getattr(torch, source.dtype), source.shape[-1]

    def quantise(data: memoryview) -> tuple[memoryview, memoryview]:
        matrix = torch.frombuffer(data, dtype=dtype).view(-1, columns)
        values, scales = quantise_blocks(matrix)
        if not bool(torch.isfinite(scales).all()):
            raise CheckpointCorruptError(str(source.file), f"{source.name} is not finite")
        return _bytes_of(values), _bytes_of(scales)

    return quantise


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    # numpy knows neither bfloat16 nor FP8, so the bytes are taken at their address and copied.
    size_bytes = tensor.numel() * tensor.element_size()
    return memoryview(ctypes.string_at(tensor.data_ptr(), size_bytes))
