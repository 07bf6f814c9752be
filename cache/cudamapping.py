"""One contiguous range of device addresses over shared extents: the CUDA twin of `cache.mapping`.

The range is reserved once and the extents are laid into it in a row, so a tensor may cross extents
and CUDA graphs captured against it stay valid for the life of the mapping. Behind the shared part
there may be a private tail: memory of this process alone, always writable.

Invariants
    1. `protect` changes the shared part only; the tail stays writable.
    2. The address never changes: neither tensors nor captured graphs notice `protect`.
    3. A failed construction leaves nothing mapped. The descriptors stay the caller's: the driver
       keeps the memory for as long as it is mapped, descriptors or not.

WARNING: a kernel that writes to a range mapped read-only gets an illegal-access error, which ends
its own context, and no other process's. `protect` and `close` change what queued kernels see:
synchronise the streams first. An extent that is shorter than announced is refused by the driver
when it is mapped.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

from cache.cudadriver import (
    Untyped,
    allocation_properties,
    bindings,
    call,
    fd_handle_type,
    granularity,
    use_context,
)
from cache.errors import CacheError, CudaError, MappingError

__all__ = ["CudaMapping"]


class CudaMapping:
    """The extents of one arena in a row on one device. Close it when done."""

    def __init__(
        self,
        ordinal: int,
        fds: Sequence[int],
        extent_bytes: Sequence[int],
        *,
        writable: bool = False,
        tail_bytes: int = 0,
    ) -> None:
        """Map all extents; makes the device's primary context current in this thread.

        Raises:
            MappingError: the extents are not whole granules, or are not what they claim.
            CudaError: the driver refuses.
        """
        use_context(ordinal)
        self.ordinal: Final = ordinal
        granule = granularity(ordinal)
        _check_extents(fds, extent_bytes, granule)
        self.shared_bytes: Final = sum(extent_bytes)
        self.tail_bytes: Final = -(-tail_bytes // granule) * granule
        self.size_bytes: Final = self.shared_bytes + self.tail_bytes
        self.is_writable = writable
        self._laid: list[tuple[int, int]] = []  # address and size of each mapped piece
        self.address: Final = int(call("cuMemAddressReserve", self.size_bytes, granule, 0, 0))
        self._is_open = True
        try:
            self._lay(fds, extent_bytes)
        except BaseException:
            self.close()
            raise

    def _lay(self, fds: Sequence[int], extent_bytes: Sequence[int]) -> None:
        position = self.address
        for index, (fd, size_bytes) in enumerate(zip(fds, extent_bytes, strict=True)):
            try:
                handle = call("cuMemImportFromShareableHandle", fd, fd_handle_type())
                self._map_piece(position, size_bytes, handle)
            except CudaError as error:
                raise MappingError(
                    f"extent {index} is not {size_bytes} bytes of memory of cuda:{self.ordinal}: "
                    f"{error.message}",
                    details=error.details,
                ) from error
            position += size_bytes
        if self.shared_bytes:
            self._set_access(self.address, self.shared_bytes, writable=self.is_writable)
        if self.tail_bytes:
            handle = call(
                "cuMemCreate",
                self.tail_bytes,
                allocation_properties(self.ordinal, shareable=False),
                0,
            )
            self._map_piece(position, self.tail_bytes, handle)
            self._set_access(position, self.tail_bytes, writable=True)
            call("cuMemsetD8", position, 0, self.tail_bytes)

    def _map_piece(self, address: int, size_bytes: int, handle: Untyped) -> None:
        """Map one allocation; our handle goes, the mapping keeps the memory."""
        try:
            call("cuMemMap", address, size_bytes, 0, handle, 0)
            self._laid.append((address, size_bytes))
        finally:
            call("cuMemRelease", handle)

    def _set_access(self, address: int, size_bytes: int, *, writable: bool) -> None:
        driver = bindings()
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        flags = driver.CUmemAccess_flags
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        call("cuMemSetAccess", address, size_bytes, [access], 1)

    def protect(self, *, writable: bool) -> None:
        """Raise the shared part to read-write, or drop it to read-only.

        30 ms for 64 GiB: this is on the promotion path.

        Raises:
            MappingError: the driver refuses.
        """
        try:
            use_context(self.ordinal)
            self._set_access(self.address, self.shared_bytes, writable=writable)
        except CudaError as error:
            raise MappingError(
                f"changing the protection of {self.shared_bytes} bytes failed: {error.message}",
                hint=error.hint,
                details=error.details,
            ) from error
        self.is_writable = writable

    def view(self) -> memoryview:
        """Device memory has no view for the CPU; see `copy_out`.

        Raises:
            MappingError: always.
        """
        raise MappingError("device memory cannot be read by the CPU; copy it out")

    def copy_out(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Copy bytes of the range to the host; waits for the copy. For checks, not for speed."""
        self._check_range(offset_bytes, size_bytes)
        use_context(self.ordinal)
        buffer = (ctypes.c_ubyte * size_bytes)()
        call("cuMemcpyDtoH", ctypes.addressof(buffer), self.address + offset_bytes, size_bytes)
        return bytes(buffer)

    def copy_in(self, offset_bytes: int, data: bytes) -> None:
        """Copy bytes of the host into the range; waits for the copy."""
        self._check_range(offset_bytes, len(data))
        use_context(self.ordinal)
        buffer = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        call("cuMemcpyHtoD", self.address + offset_bytes, ctypes.addressof(buffer), len(data))

    def zero(self) -> None:
        """Clear the shared part; waits until it is done.

        Raises:
            CudaError: the driver refuses, as it does where the part is mapped read-only.
        """
        use_context(self.ordinal)
        call("cuMemsetD8", self.address, 0, self.shared_bytes)
        call("cuCtxSynchronize")

    def close(self) -> None:
        """Unmap everything; idempotent. Nothing may use the range afterwards."""
        if not self._is_open:
            return
        self._is_open = False
        with suppress(
            CacheError
        ):  # after a sticky error the driver refuses; the memory goes with us
            use_context(self.ordinal)
            while self._laid:
                call("cuMemUnmap", *self._laid.pop())
            call("cuMemAddressFree", self.address, self.size_bytes)

    def _check_range(self, offset_bytes: int, size_bytes: int) -> None:
        if not self._is_open:
            raise MappingError("the mapping is closed")
        if offset_bytes < 0 or size_bytes <= 0 or offset_bytes + size_bytes > self.size_bytes:
            raise MappingError(f"{size_bytes} bytes at {offset_bytes} leave the mapping")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _check_extents(fds: Sequence[int], extent_bytes: Sequence[int], granule: int) -> None:
    if len(fds) != len(extent_bytes):
        raise MappingError(f"{len(fds)} descriptors for {len(extent_bytes)} extents")
    if not fds:
        raise MappingError("there is no extent to map")
    for size_bytes in extent_bytes:
        if size_bytes <= 0 or size_bytes % granule:
            raise MappingError(f"an extent of {size_bytes} bytes is not whole granules")
