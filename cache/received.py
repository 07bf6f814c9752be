"""What a client checks of the memory it was sent, before it maps any of it."""

import ctypes
import os
import platform
import stat
from collections.abc import Sequence
from typing import Final

import msgspec

from cache.errors import FingerprintMismatchError, ProtocolError
from cache.manifest import check_manifest
from cache.protocol import Fingerprint, KvGeometry, KvOpened, Manifest

__all__ = ["are_same_memory", "check_attached", "check_opened", "is_same_memory", "mismatch"]

_KCMP_FILE: Final = 0
_SYS_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(platform.machine())

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def mismatch(held: Fingerprint, wanted: Fingerprint) -> FingerprintMismatchError:
    """The error that names the fields in which the two differ."""
    return FingerprintMismatchError(
        held.differing(wanted),
        held=msgspec.structs.asdict(held),
        wanted=msgspec.structs.asdict(wanted),
    )


def are_same_memory(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two lists of descriptors are the same memory, extent by extent."""
    if len(some) != len(others):
        return False
    return all(is_same_memory(one, other) for one, other in zip(some, others, strict=True))


def is_same_memory(one: int, other: int) -> bool:
    """Whether two descriptors are the same memory.

    Host memory is a file of its own inode. Device memory is not: all its descriptors are one
    device node, but each export is an open file of its own, which duplicates and copies sent to
    other processes share. Where the kernel cannot compare open files the answer is no, and the
    memory is treated as a copy.
    """
    first, second = os.fstat(one), os.fstat(other)
    if (first.st_dev, first.st_ino) != (second.st_dev, second.st_ino):
        return False
    return stat.S_ISREG(first.st_mode) or _is_same_open_file(one, other)


def _is_same_open_file(one: int, other: int) -> bool:
    if _SYS_KCMP is None:
        return False
    pid = os.getpid()
    return bool(_libc.syscall(_SYS_KCMP, pid, pid, _KCMP_FILE, one, other) == 0)


def check_attached(manifest: Manifest, fds: Sequence[int], wanted: Fingerprint) -> None:
    """Whether manifest and extents belong together and are the weights that were asked for.

    Raises:
        FingerprintMismatchError, ManifestError, ProtocolError: they are not.
    """
    if manifest.fingerprint != wanted:
        raise mismatch(manifest.fingerprint, wanted)
    check_manifest(manifest)
    if len(fds) != len(manifest.extent_bytes) or sum(manifest.extent_bytes) < manifest.total_bytes:
        raise ProtocolError("the daemon sent other extents than its manifest lists")
    _check_sizes(fds, manifest.extent_bytes)


def check_opened(opened: KvOpened, fds: Sequence[int], geometry: KvGeometry) -> None:
    """Whether what came is the KV arena that was asked for.

    Raises:
        ProtocolError: it is not.
    """
    if opened.geometry != geometry or len(fds) != len(opened.extent_bytes) + 1:
        raise ProtocolError("the daemon answered kv.open with another arena")
    if sum(opened.extent_bytes) < geometry.total_bytes:
        raise ProtocolError("the KV arena is smaller than its geometry")
    _check_sizes(fds, [*opened.extent_bytes, opened.table_bytes])


def _check_sizes(fds: Sequence[int], sizes: Sequence[int]) -> None:
    for fd, size_bytes in zip(fds, sizes, strict=True):
        info = os.fstat(fd)
        # Device memory shows no size here; the driver refuses another one when it is mapped, and
        # so does the host's mapping with anything that is not a file of that size.
        if stat.S_ISREG(info.st_mode) and info.st_size != size_bytes:
            raise ProtocolError(f"an extent has {info.st_size} bytes instead of {size_bytes}")
