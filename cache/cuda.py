"""The CUDA backend: extents are device allocations that travel as file descriptors.

Made with `cuInit` alone: the owner has no CUDA context, runs no kernel and costs the card 4 MiB.
The memory lives as long as any process holds a descriptor or a mapping, so neither the death of
the daemon nor that of an engine frees it. The slot table stays in host memory.

Invariants
    1. Readers map with `PROT_READ`; only the loader and the holder of the KV lease map read-write.
    2. KV is cleared by a short-lived process before anyone gets it (`reserve`): the contents of
       new device memory are not promised to be zero, and NaN behind a mask still poisons.
    3. Out of memory says who holds what; the look at the card runs in a process with a deadline.

WARNING: device memory knows no seals. Whoever has a descriptor can map it read-write; protection
guards against bugs, not against hostile engines. Descriptors only leave through the daemon's
socket, which serves our own uid.
"""

import os
from collections.abc import Sequence
from typing import Final

from cache.arena import Arena, Purpose
from cache.cudadriver import (
    OUT_OF_MEMORY,
    allocation_properties,
    call,
    device_ordinal,
    device_uuid,
    fd_handle_type,
    granularity,
    initialise,
)
from cache.cudamapping import CudaMapping
from cache.cudaworker import zero_in_child
from cache.errors import ArenaMemoryError, CudaError, SealError, UnderstudyError
from cache.gpumemory import describe_use
from cache.received import is_same_memory
from cache.wire import MAX_FDS_PER_FRAME

__all__ = ["CudaBackend", "split_device_extents"]

_GIB: Final = 1 << 30
_LARGE_ARENA_BYTES: Final = 64 * _GIB
"""Above this, extents of 2 GiB: the cost of mapping is per extent."""

_MAX_EXTENTS: Final = MAX_FDS_PER_FRAME // 2 - 1
"""A donation carries weights, KV and one slot table in one frame."""


def split_device_extents(total_bytes: int, granule_bytes: int) -> list[int]:
    """Sizes of the extents of an arena: whole granules, equal but for the last, few enough."""
    total_bytes = max(1, -(-total_bytes // granule_bytes)) * granule_bytes
    wanted = _GIB if total_bytes <= _LARGE_ARENA_BYTES else 2 * _GIB
    largest = max(wanted, -(-total_bytes // _MAX_EXTENTS))
    largest = -(-largest // granule_bytes) * granule_bytes
    count, rest = divmod(total_bytes, largest)
    return [largest] * count + ([rest] if rest else [])


class CudaBackend:
    """Arenas in the memory of one device."""

    def __init__(self, device: str) -> None:
        """Find the device.

        Raises:
            BackendNotBuiltError: `device` is not `cuda:N`.
            CudaBindingsMissingError, CudaError: no bindings, no driver, or no such device.
        """
        self.device: Final = device
        self.ordinal: Final = device_ordinal(device)
        initialise(self.ordinal)
        self.device_uuid: Final = device_uuid(self.ordinal)

    def create(self, purpose: Purpose, total_bytes: int) -> Arena:
        """See `ArenaBackend.create`; takes the memory at once, 0.2 ms an extent."""
        arena = Arena(purpose, [], [])
        try:
            for size_bytes in split_device_extents(total_bytes, granularity(self.ordinal)):
                arena.fds.append(self._create_extent(size_bytes))
                arena.extent_bytes.append(size_bytes)
        except CudaError as error:
            arena.close()
            if error.error != OUT_OF_MEMORY:
                raise
            raise self._memory_error(purpose, total_bytes, "memory") from error
        except BaseException:
            arena.close()
            raise
        return arena

    def _create_extent(self, size_bytes: int) -> int:
        handle = call("cuMemCreate", size_bytes, allocation_properties(self.ordinal), 0)
        try:
            fd = int(call("cuMemExportToShareableHandle", handle, fd_handle_type(), 0))
        finally:
            call("cuMemRelease", handle)  # the descriptor holds the memory from here on
        os.set_inheritable(fd, False)
        return fd

    def _memory_error(self, purpose: Purpose, total_bytes: int, lack: str) -> ArenaMemoryError:
        use = describe_use(self.device_uuid)
        return ArenaMemoryError(
            purpose,
            total_bytes,
            f"{self.device} has not enough {lack} left ({use.text})",
            hint="stop what else holds the card, or use fewer KV slots, a shorter max_length or "
            "a smaller model",
            details={"device": self.device, **use.details},
        )

    def reserve(self, arena: Arena) -> None:
        """Clear KV in a short-lived process; weights are overwritten anyway.

        Raises:
            ArenaMemoryError: the process found no memory for its CUDA context.
            RemoteError, LoadFailedError, DeadlineExceededError: the memory cannot be cleared.
        """
        if arena.purpose == "weights":
            return
        try:
            zero_in_child(self.device, arena.fds, arena.extent_bytes)
        except UnderstudyError as error:
            if error.details.get("error") != OUT_OF_MEMORY:
                raise
            lack = "memory for the process that clears it"
            raise self._memory_error(arena.purpose, arena.total_bytes, lack) from error

    def map(
        self,
        fds: Sequence[int],
        extent_bytes: Sequence[int],
        *,
        writable: bool = False,
        tail_bytes: int = 0,
    ) -> CudaMapping:
        """See `ArenaBackend.map`; makes the device's primary context current in this thread."""
        return CudaMapping(
            self.ordinal, fds, extent_bytes, writable=writable, tail_bytes=tail_bytes
        )

    def seal_after_publish(self, arena: Arena) -> None:
        """Nothing to do: device memory knows no seals."""

    def seal_after_commit(self, arena: Arena) -> None:
        """Nothing to do: device memory knows no seals."""

    def check_donated(self, arena: Arena) -> None:
        """See `ArenaBackend.check_donated`. Sizes show when the extents are mapped.

        Raises:
            SealError: a descriptor is not shareable memory of this device, or came twice.
        """
        for index, fd in enumerate(arena.fds):
            if any(is_same_memory(fd, other) for other in arena.fds[:index]):
                raise SealError(f"a donated {arena.purpose} extent was given twice")
            self._check_extent(arena.purpose, fd)

    def _check_extent(self, purpose: Purpose, fd: int) -> None:
        try:
            handle = call("cuMemImportFromShareableHandle", fd, fd_handle_type())
        except CudaError as error:
            raise SealError(
                f"a donated {purpose} extent is not shareable device memory: {error.message}"
            ) from error
        try:
            found = call("cuMemGetAllocationPropertiesFromHandle", handle)
        finally:
            call("cuMemRelease", handle)
        if int(found.location.id) != self.ordinal:
            raise SealError(
                f"a donated {purpose} extent lies on cuda:{int(found.location.id)}, "
                f"not on {self.device}"
            )
