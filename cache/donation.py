"""Checks of donated memory: a daemon that was restarted gets its predecessor's memory back.

The donor is the supervisor or an engine, of our own uid, and still nothing it says is believed:
every descriptor is looked at, the manifest must fit the extents, the slot table must be one.
"""

import math
import os
from dataclasses import dataclass

from cache.arena import Arena, ArenaBackend
from cache.errors import DonationRefusedError, ManifestError, SlotTableError
from cache.host import HostBackend
from cache.manifest import check_checksums, check_manifest, owned_tensors
from cache.protocol import Donate, KvGeometry, LoadSpec, Manifest, dtype_bytes
from cache.received import is_same_memory
from cache.slots import SlotTable
from cache.wire import close_all

__all__ = ["Donation", "KvArena", "check_geometry", "make_kv", "take_donation"]


@dataclass(slots=True)
class KvArena:
    """KV memory of the serving pair and its slot table."""

    geometry: KvGeometry
    arena: Arena
    table: Arena  # one extent

    @property
    def fds(self) -> list[int]:
        """Descriptors in the order of `kv.open`."""
        return [*self.arena.fds, *self.table.fds]

    def close(self) -> None:
        """Close all descriptors; idempotent."""
        self.arena.close()
        self.table.close()


@dataclass(slots=True)
class Donation:
    """Memory that has passed every check; it belongs to the daemon now."""

    manifest: Manifest
    spec: LoadSpec
    weights: Arena
    kv: KvArena | None

    def close(self) -> None:
        """Give everything back."""
        self.weights.close()
        if self.kv is not None:
            self.kv.close()


def check_geometry(geometry: KvGeometry) -> None:
    """Whether a KV arena of this shape can exist at all.

    Raises:
        SlotTableError: a number is not positive or absurd, or the dtype is unknown.
    """
    numbers = (
        geometry.layers, geometry.slots, geometry.kv_heads, geometry.max_length, geometry.head_dim,
    )  # fmt: skip
    if any(number <= 0 for number in numbers) or math.prod(numbers) > 1 << 50:
        raise SlotTableError(f"no KV arena has the shape {numbers}")
    try:
        dtype_bytes(geometry.dtype)
    except KeyError:
        raise SlotTableError(f"no KV arena has the dtype {geometry.dtype!r}") from None
    SlotTable.size_bytes(geometry.slots, geometry.max_length)


def make_kv(backend: ArenaBackend, geometry: KvGeometry) -> KvArena:
    """A new KV arena, zero-filled, its pages taken, and a formatted slot table. Blocking.

    Raises:
        ArenaMemoryError: no memory for it; nothing is left behind.
        SlotTableError: the table would not fit one extent.
    """
    arena = backend.create("kv", geometry.total_bytes)
    try:
        backend.reserve(arena)
        table = _make_table(geometry)
    except BaseException:
        arena.close()
        raise
    return KvArena(geometry, arena, table)


def _make_table(geometry: KvGeometry) -> Arena:
    backend = HostBackend()  # whatever the device: only CPUs read the table
    slots, max_length = geometry.slots, geometry.max_length
    size_bytes = SlotTable.size_bytes(slots, max_length)
    table = backend.create("slots", size_bytes)
    if len(table.fds) != 1:
        table.close()
        raise SlotTableError(f"a slot table of {size_bytes} bytes does not fit one extent")
    try:
        backend.reserve(table)
        mapping = backend.map(table.fds, table.extent_bytes, writable=True)
        try:
            SlotTable.format(mapping.view(), slots, max_length)
        finally:
            mapping.close()
    except BaseException:
        table.close()
        raise
    return table


def take_donation(backend: ArenaBackend, request: Donate, fds: list[int]) -> Donation:
    """Check everything and take ownership of `fds`; on any error they are closed.

    Raises:
        DonationRefusedError: number of descriptors, manifest, geometry or table do not fit.
        SealError: sizes or seals are not those of published memory.
    """
    counts = (len(request.manifest.extent_bytes), len(request.kv.extent_bytes) if request.kv else 0)
    if len(fds) != counts[0] + (counts[1] + 1 if request.kv else 0):
        close_all(fds)
        raise DonationRefusedError(f"{len(fds)} descriptors came, the donation lists {counts}")
    weights = Arena("weights", fds[: counts[0]], list(request.manifest.extent_bytes))
    kv = None
    if request.kv is not None:
        kv = KvArena(
            request.kv.geometry,
            Arena("kv", fds[counts[0] : -1], list(request.kv.extent_bytes)),
            Arena("slots", fds[-1:], [request.kv.table_bytes]),
        )
    donation = Donation(request.manifest, request.spec, weights, kv)
    try:
        _check_weights(backend, donation)
        if kv is not None:
            _check_kv(backend, kv)
            _check_apart(weights, kv.arena)
    except (ManifestError, SlotTableError) as error:
        donation.close()
        raise DonationRefusedError(f"the donation does not fit: {error.message}") from error
    except BaseException:
        donation.close()
        raise
    return donation


def _check_apart(weights: Arena, kv: Arena) -> None:
    """Weights donated as KV would be written to: device memory has no seals that forbid it."""
    if any(is_same_memory(one, other) for one in weights.fds for other in kv.fds):
        raise DonationRefusedError("the same memory was donated as weights and as KV")


def _check_weights(backend: ArenaBackend, donation: Donation) -> None:
    manifest, spec = donation.manifest, donation.spec
    check_manifest(manifest)
    check_checksums(manifest, {entry.name: entry.checksum for entry in owned_tensors(manifest)})
    if sum(manifest.extent_bytes) < manifest.total_bytes:
        raise ManifestError("the extents are smaller than the arena")
    if spec.device != backend.device:
        raise ManifestError(f"it was made for {spec.device}, this daemon serves {backend.device}")
    if manifest.fingerprint.model_path != os.path.realpath(spec.model_path) or any(
        getattr(manifest.fingerprint, field) != getattr(spec, field)
        for field in ("revision", "dtype", "tp_size", "tp_rank", "pp_size", "pp_rank")
    ):
        raise ManifestError("its fingerprint belongs to another spec")
    backend.check_donated(donation.weights)


def _check_kv(backend: ArenaBackend, kv: KvArena) -> None:
    check_geometry(kv.geometry)
    if kv.arena.total_bytes < kv.geometry.total_bytes:
        raise SlotTableError("the KV extents are smaller than the geometry")
    backend.check_donated(kv.arena)
    HostBackend().check_donated(kv.table)
    mapping = HostBackend().map(kv.table.fds, kv.table.extent_bytes)
    try:
        table = SlotTable(mapping.view())
        shape = (table.slots, table.max_length)
        table.release()
    finally:
        mapping.close()
    if shape != (kv.geometry.slots, kv.geometry.max_length):
        raise SlotTableError(f"the slot table is formatted for {shape}")
