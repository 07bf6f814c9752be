"""Filling a device arena at speed: parallel reads into pinned memory, copies behind them.

Each thread has a stream and a few pinned buffers. It reads a stretch of a file into one buffer
while the copies out of the others are under way, so disk or page cache, the PCIe link and the GPU's
conversions work at the same time. A buffer is read into again once the event behind its copies has
passed. Checksums are computed at the end by the GPU, over what is in the arena, at the speed of
its memory: hashing on the CPU would be slower than everything else.

Torch is imported only where something is converted: without it the loader is ready in half a
second instead of five.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache.cudachecksum import Checksummer
from cache.cudadriver import Untyped, call, use_context
from cache.cudamapping import CudaMapping
from cache.errors import CheckpointMissingError, CudaError
from cache.filling import read_fully
from cache.manifest import owned_tensors
from cache.plan import LoadPlan
from cache.protocol import Progress
from cache.transfers import Read, plan_reads

if TYPE_CHECKING:
    from cache.deviceconvert import DeviceConverter

__all__ = ["BUFFER_BYTES", "CONVERTING_BUFFER_BYTES", "fill_device"]

BUFFER_BYTES: Final = 4 << 20
"""What one read takes. Measured on 16 cores: twice as much falls out of the CPU's cache and is a
fifth slower, half as much makes the interpreter the limit."""

CONVERTING_BUFFER_BYTES: Final = 32 << 20
"""The same where each read is followed by a dozen operations of torch, which cost per call: large
reads by few threads are twice as fast as small ones by many."""

_BUFFERS_A_THREAD: Final = 2
_MAX_THREADS: Final = 16
_MAX_CONVERTING_THREADS: Final = 8
_PROGRESS_EVERY_S: Final = 0.1
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_PORTABLE: Final = 1  # CU_MEMHOSTALLOC_PORTABLE


def fill_device(
    plan: LoadPlan,
    mapping: CudaMapping,
    *,
    threads: int | None = None,
    buffer_bytes: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, str]:
    """Copy every tensor of the plan into the arena; returns checksums by tensor name.

    `on_progress` is called in the calling thread, at most ten times a second.

    Raises:
        CheckpointCorruptError: a file ended early, or holds weights that are not finite.
        CheckpointMissingError: a file cannot be opened or read.
        CudaError: the driver refused something.
    """
    converts = any(copy.converts for copy in plan.copies)
    if buffer_bytes is None:
        buffer_bytes = CONVERTING_BUFFER_BYTES if converts else BUFFER_BYTES
    if threads is None:
        most = _MAX_CONVERTING_THREADS if converts else _MAX_THREADS
        threads = max(2, min(most, len(os.sched_getaffinity(0))))
    reads = plan_reads(plan, buffer_bytes)
    converter: DeviceConverter | None = None
    if converts:
        from cache import deviceconvert

        converter = deviceconvert.DeviceConverter(mapping.ordinal, mapping.address)
    run = _Run(reads, mapping, converter)
    count = min(threads, len(reads))
    with ExitStack() as stack:
        run.open_files(stack)
        pool = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="load"))
        pending = {pool.submit(run.work) for _ in range(count)}
        started_s = time.monotonic()
        while pending:
            _, pending = wait(pending, timeout=_PROGRESS_EVERY_S)
            if on_progress is not None:
                on_progress(run.progress(time.monotonic() - started_s))
    if run.failure is not None:
        raise run.failure
    if converter is not None:
        converter.check(plan)
    return _checksums(plan, mapping)


def _checksums(plan: LoadPlan, mapping: CudaMapping) -> dict[str, str]:
    entries = owned_tensors(plan.manifest)
    checksummer = Checksummer()
    try:
        found = checksummer.compute(
            (mapping.address + entry.offset_bytes, entry.size_bytes) for entry in entries
        )
    finally:
        checksummer.close()
    return {entry.name: value for entry, value in zip(entries, found, strict=True)}


class _Run:
    """What the threads of one load share. The first failure stops all of them."""

    def __init__(
        self, reads: list[Read], mapping: CudaMapping, converter: "DeviceConverter | None"
    ) -> None:
        self._reads = iter(reads)
        self._mapping = mapping
        self._converter = converter
        self._paths = sorted({read.file for read in reads})
        self._largest_bytes = max(read.size_bytes for read in reads)
        self._total_bytes = sum(read.size_bytes for read in reads)
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._done_bytes = 0
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

    def work(self) -> None:
        """What each thread does: take reads until there are none."""
        try:
            use_context(self._mapping.ordinal)
            lane = _Lane(self._largest_bytes, needs_staging=self._converter is not None)
            try:
                for read in self._next_reads():
                    self._transfer(read, lane)
                lane.finish()
            finally:
                lane.close()
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who raises it
            with self._lock:
                self.failure = self.failure or error

    def _next_reads(self) -> Iterator[Read]:
        while self.failure is None:
            with self._lock:
                read = next(self._reads, None)
            if read is None:
                return
            yield read

    def _transfer(self, read: Read, lane: "_Lane") -> None:
        buffer = lane.next_buffer()
        view = buffer.view[: read.size_bytes]
        read_fully(self._files[read.file], view, read.offset, read.parts[0].copy.source)
        if read.is_plain or self._converter is None:
            self._copy_plain(read, buffer, lane.stream)
        else:
            call("cuMemcpyHtoDAsync", buffer.staging, buffer.address, read.size_bytes, lane.stream)
            self._convert(read, buffer, lane.stream, self._converter)
        call("cuEventRecord", buffer.event, lane.stream)
        with self._lock:
            self._done_bytes += read.size_bytes

    def _copy_plain(self, read: Read, buffer: "_Buffer", stream: Untyped) -> None:
        for part in read.parts:
            start = part.file_offset - read.offset
            call(
                "cuMemcpyHtoDAsync",
                self._mapping.address + part.arena_offset,
                buffer.address + start,
                part.size_bytes,
                stream,
            )

    def _convert(
        self, read: Read, buffer: "_Buffer", stream: Untyped, converter: "DeviceConverter"
    ) -> None:
        with converter.on_stream(int(stream)):
            for part in read.parts:
                staged = buffer.staging + part.file_offset - read.offset
                if part.is_plain:
                    target = self._mapping.address + part.arena_offset
                    call("cuMemcpyDtoDAsync", target, staged, part.size_bytes, stream)
                else:
                    converter.convert(part, staged)


class _Buffer:
    """Pinned host memory, an event that says when it is free, and device memory to stage in."""

    def __init__(self, size_bytes: int, *, needs_staging: bool) -> None:
        self.address = int(call("cuMemHostAlloc", size_bytes, _PORTABLE))
        self.view = memoryview((ctypes.c_ubyte * size_bytes).from_address(self.address)).cast("B")
        self.event = call("cuEventCreate", _NO_TIMING)
        self.staging = int(call("cuMemAlloc", size_bytes)) if needs_staging else 0

    def close(self) -> None:
        self.view.release()
        call("cuEventDestroy", self.event)
        call("cuMemFreeHost", self.address)
        if self.staging:
            call("cuMemFree", self.staging)


class _Lane:
    """The stream and the buffers of one thread, used in turn."""

    def __init__(self, buffer_bytes: int, *, needs_staging: bool) -> None:
        self.stream = call("cuStreamCreate", _NON_BLOCKING)
        self._buffers = [
            _Buffer(buffer_bytes, needs_staging=needs_staging) for _ in range(_BUFFERS_A_THREAD)
        ]
        self._turn = 0

    def next_buffer(self) -> _Buffer:
        """The buffer that was used longest ago, once its copies are done."""
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        call("cuEventSynchronize", buffer.event)
        return buffer

    def finish(self) -> None:
        """Wait for all copies."""
        call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give everything back, once no copy uses it any more."""
        with suppress(CudaError):  # the thread's own error says more
            self.finish()
        for buffer in self._buffers:
            buffer.close()
        call("cuStreamDestroy", self.stream)
