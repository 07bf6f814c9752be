"""Checks of a manifest: what a daemon accepts from a loader or a donor, and a client from both.

A manifest decides which addresses become tensors, so nothing in it is believed: every entry must
lie inside the arena, aligned, as long as its shape says, and overlap no other.
"""

import math
from typing import Final

import msgspec

from cache.checksum import CHECKSUM_ALGORITHMS
from cache.errors import ManifestError
from cache.protocol import TENSOR_ALIGNMENT_BYTES, Manifest, TensorEntry, dtype_bytes

__all__ = [
    "CHECKSUM_BYTES",
    "check_checksums",
    "check_manifest",
    "completed",
    "contiguous_stride",
    "owned_tensors",
]

CHECKSUM_BYTES: Final = 16
_MAX_TENSORS: Final = 1_000_000


def owned_tensors(manifest: Manifest) -> list[TensorEntry]:
    """The tensors that have bytes of their own: all but aliases."""
    return [entry for entry in manifest.tensors if entry.alias_of is None]


def check_manifest(manifest: Manifest) -> None:
    """Whether the manifest describes memory that can be mapped safely.

    Raises:
        ManifestError: the first contradiction found.
    """
    if not 0 < len(manifest.tensors) <= _MAX_TENSORS:
        raise ManifestError(f"a manifest of {len(manifest.tensors)} tensors")
    if manifest.checksum_algorithm not in CHECKSUM_ALGORITHMS:
        raise ManifestError(f"unknown checksum algorithm {manifest.checksum_algorithm!r}")
    by_name: dict[str, TensorEntry] = {}
    layouts: set[object] = set()  # layers are alike: each layout is looked at once
    for entry in manifest.tensors:
        if entry.name in by_name:
            raise ManifestError(f"{entry.name} is listed twice")
        by_name[entry.name] = entry
        layout = (entry.dtype, entry.size_bytes, (*entry.shape,), (*entry.stride,))
        if layout not in layouts:
            _check_layout(entry)
            layouts.add(layout)
        if entry.offset_bytes % TENSOR_ALIGNMENT_BYTES:
            raise ManifestError(f"{entry.name} is not aligned: offset {entry.offset_bytes}")
        if entry.offset_bytes < 0 or entry.offset_bytes + entry.size_bytes > manifest.total_bytes:
            raise ManifestError(f"{entry.name} leaves the arena of {manifest.total_bytes} bytes")
    for entry in manifest.tensors:
        if entry.alias_of is not None:
            _check_alias(entry, by_name.get(entry.alias_of))
    _check_overlaps(owned_tensors(manifest))


def check_checksums(manifest: Manifest, checksums: dict[str, str]) -> None:
    """Whether there is one well-formed checksum for each tensor that has bytes of its own.

    Raises:
        ManifestError: some are missing, unknown or malformed.
    """
    wanted = {entry.name for entry in owned_tensors(manifest)}
    if wanted != checksums.keys():
        odd = sorted(wanted ^ checksums.keys())
        raise ManifestError(f"checksums and tensors differ in {len(odd)} names, {odd[0]!r} first")
    for name, value in checksums.items():
        if len(value) != 2 * CHECKSUM_BYTES or not set(value) <= set("0123456789abcdef"):
            raise ManifestError(f"the checksum of {name} is malformed")


def completed(manifest: Manifest, checksums: dict[str, str], extent_bytes: list[int]) -> Manifest:
    """The manifest as it is served: with extents and checksums (an alias has its target's)."""
    tensors = [
        msgspec.structs.replace(entry, checksum=checksums[entry.alias_of or entry.name])
        for entry in manifest.tensors
    ]
    return msgspec.structs.replace(manifest, extent_bytes=extent_bytes, tensors=tensors)


def _check_layout(entry: TensorEntry) -> None:
    try:
        element_bytes = dtype_bytes(entry.dtype)
    except KeyError:
        raise ManifestError(f"{entry.name} has the unknown dtype {entry.dtype!r}") from None
    if any(length < 0 for length in entry.shape) or len(entry.shape) > 16:
        raise ManifestError(f"{entry.name} has the shape {entry.shape}")
    if entry.stride != contiguous_stride(entry.shape):
        raise ManifestError(f"{entry.name} is not contiguous")
    if entry.size_bytes != math.prod(entry.shape) * element_bytes:
        raise ManifestError(f"{entry.name} has {entry.size_bytes} bytes for {entry.shape}")


def _check_alias(entry: TensorEntry, target: TensorEntry | None) -> None:
    if target is None or target.alias_of is not None:
        raise ManifestError(f"{entry.name} is an alias of {entry.alias_of}, which has no bytes")
    same = ("offset_bytes", "size_bytes", "shape", "dtype")
    if any(getattr(entry, field) != getattr(target, field) for field in same):
        raise ManifestError(f"{entry.name} and {target.name} are tied but differ")


def _check_overlaps(entries: list[TensorEntry]) -> None:
    end, before = 0, ""
    for entry in sorted(entries, key=lambda e: e.offset_bytes):
        if entry.size_bytes and entry.offset_bytes < end:
            raise ManifestError(f"{before} and {entry.name} overlap")
        if entry.size_bytes:
            end, before = entry.offset_bytes + entry.size_bytes, entry.name


def contiguous_stride(shape: list[int]) -> list[int]:
    """Strides in elements of a contiguous tensor."""
    stride, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        stride[axis] = step
        step *= max(shape[axis], 1)
    return stride
