"""One contiguous address range over many shared memory files.

A mapping reserves its whole range first and then lays the extents into it in a row, so a tensor
may cross extents and an address computed once stays valid for the life of the mapping. Behind
the shared part there may be a private tail: anonymous, writable, this process's alone. Rows that
must not touch shared memory (inactive slots, padding) are written there.

Invariants
    1. `protect` changes the shared part only; the tail stays writable.
    2. The address never changes. Tensors over the mapping survive `protect`.
    3. A failed construction leaves nothing mapped. The descriptors stay the caller's: the
       kernel keeps the memory for as long as it is mapped, descriptors or not.

WARNING: `view` is typed as writable even while the shared part is read-only, because
`torch.frombuffer` warns about read-only memory. A write through it is then SIGSEGV, in the
writer only. After `close` the view and all tensors over it point nowhere.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final, Self

from cache.errors import MappingError

__all__ = ["PAGE_BYTES", "Mapping", "keep_out_of_dumps", "round_to_page"]

PAGE_BYTES: Final = mmap.PAGESIZE

_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MADV_DONTDUMP: Final = 16
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_to_page(size_bytes: int) -> int:
    """The next multiple of the page size."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def keep_out_of_dumps(address: int, size_bytes: int) -> None:
    """Leave the whole pages of this range out of core dumps.

    Raises:
        MappingError: the kernel refuses.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    behind = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if behind > first and _libc.madvise(first, behind - first, _MADV_DONTDUMP):
        raise _refused("keeping core dumps out of", size_bytes)


class Mapping:
    """The extents of one arena in a row, and a private tail behind them. Close it when done."""

    def __init__(
        self,
        fds: Sequence[int],
        extent_bytes: Sequence[int],
        *,
        writable: bool = False,
        tail_bytes: int = 0,
    ) -> None:
        """Map all extents.

        Raises:
            MappingError: an extent is not a multiple of the page size, is shorter than announced
                (touching it would be SIGBUS), or the kernel refuses.
        """
        _check_extents(fds, extent_bytes)
        self.shared_bytes: Final = sum(extent_bytes)
        self.tail_bytes: Final = round_to_page(tail_bytes)
        self.size_bytes: Final = self.shared_bytes + self.tail_bytes
        self.is_writable = writable
        self.address: Final = _map(
            0, self.size_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
        self._is_open = True
        try:
            self._lay(fds, extent_bytes)
        except MappingError:
            self.close()
            raise

    def _lay(self, fds: Sequence[int], extent_bytes: Sequence[int]) -> None:
        position = self.address
        for fd, size_bytes in zip(fds, extent_bytes, strict=True):
            _map(position, size_bytes, _prot(self.is_writable), mmap.MAP_SHARED | _MAP_FIXED, fd)
            position += size_bytes
        if self.tail_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _map(position, self.tail_bytes, _prot(writable=True), flags)
        # Memfds count as anonymous shared memory, which the kernel dumps by default: the dump of
        # a crashed engine would hold the whole weights and the text of every user.
        keep_out_of_dumps(self.address, self.size_bytes)

    def protect(self, *, writable: bool) -> None:
        """Raise the shared part to read-write, or drop it to read-only.

        0.2 ms for 256 MiB: this is on the promotion path.

        Raises:
            MappingError: the kernel refuses, as it does for sealed weights.
        """
        if self.shared_bytes and _libc.mprotect(self.address, self.shared_bytes, _prot(writable)):
            raise _refused("changing the protection of", self.shared_bytes)
        self.is_writable = writable

    def populate(self) -> None:
        """Fill the page tables of the shared part now, so that first use does not fault.

        Best effort: kernels before 5.14 do not know the request, and then first use faults.
        """
        advice = _MADV_POPULATE_WRITE if self.is_writable else _MADV_POPULATE_READ
        if self.shared_bytes and _libc.madvise(self.address, self.shared_bytes, advice):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise _refused("populating", self.shared_bytes)

    def view(self) -> memoryview:
        """All bytes, the tail included; see the warning at the top of the module."""
        if not self._is_open:
            raise MappingError("the mapping is closed")
        array = (ctypes.c_ubyte * self.size_bytes).from_address(self.address)
        return memoryview(array).cast("B")

    def close(self) -> None:
        """Unmap everything; idempotent. Nothing may use the range afterwards."""
        if self._is_open:
            self._is_open = False
            if _libc.munmap(self.address, self.size_bytes):
                raise _refused("unmapping", self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _check_extents(fds: Sequence[int], extent_bytes: Sequence[int]) -> None:
    if len(fds) != len(extent_bytes):
        raise MappingError(f"{len(fds)} descriptors for {len(extent_bytes)} extents")
    if not fds:
        raise MappingError("there is no extent to map")
    for fd, size_bytes in zip(fds, extent_bytes, strict=True):
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise MappingError(f"an extent of {size_bytes} bytes is not whole pages")
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes < size_bytes:
            raise MappingError(f"an extent of {size_bytes} bytes has a file of {actual_bytes}")


def _prot(writable: bool) -> int:
    return mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)


def _map(address: int, size_bytes: int, prot: int, flags: int, fd: int = -1) -> int:
    got = _libc.mmap(address or None, size_bytes, prot, flags, fd, 0)
    if got is None or got == _FAILED:
        raise _refused("mapping", size_bytes)
    return int(got)


def _refused(what: str, size_bytes: int) -> MappingError:
    code = ctypes.get_errno()
    return MappingError(
        f"{what} {size_bytes} bytes failed: {os.strerror(code)}",
        details={"errno": errno.errorcode.get(code, str(code))},
    )
