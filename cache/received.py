"""What a client checks of the memory it was sent, before it maps any of it."""

import os
from collections.abc import Sequence

import msgspec

from cache.errors import FingerprintMismatchError, ProtocolError
from cache.manifest import check_manifest
from cache.protocol import Fingerprint, KvGeometry, KvOpened, Manifest

__all__ = ["check_attached", "check_opened", "memory_identity", "mismatch"]


def mismatch(held: Fingerprint, wanted: Fingerprint) -> FingerprintMismatchError:
    """The error that names the fields in which the two differ."""
    return FingerprintMismatchError(
        held.differing(wanted),
        held=msgspec.structs.asdict(held),
        wanted=msgspec.structs.asdict(wanted),
    )


def memory_identity(fds: Sequence[int]) -> list[tuple[int, int]]:
    """What tells whether two sets of descriptors are the same memory: device and inode of each."""
    found = [os.fstat(fd) for fd in fds]
    return [(info.st_dev, info.st_ino) for info in found]


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
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes != size_bytes:
            raise ProtocolError(f"an extent has {actual_bytes} bytes instead of {size_bytes}")
