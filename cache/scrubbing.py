"""Re-computing checksums of weights in memory, in a thread, at a bounded rate.

Memory that nobody can write may still decay. A scrub maps the weights read-only, hashes every
tensor and compares. It sleeps between chunks, so that it takes a bounded share of the memory
bandwidth, and it runs at the lowest CPU priority.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from cache.arena import ArenaBackend
from cache.checksum import MIX128
from cache.cudaworker import Job, scrub_in_child
from cache.manifest import CHECKSUM_BYTES, owned_tensors
from cache.protocol import Manifest, Scrubbed, TensorEntry

__all__ = ["ScrubStopped", "scrub", "spot_sample"]

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 4 << 20


class ScrubStopped(Exception):  # noqa: N818 - a request, not a failure
    """The scrub was told to stop before it had finished."""


def scrub(
    backend: ArenaBackend,
    fds: list[int],
    manifest: Manifest,
    *,
    entries: Iterable[TensorEntry] | None = None,
    rate_bytes_per_s: float,
    stop: threading.Event,
) -> Scrubbed:
    """Hash `entries` (all tensors by default) and compare. Blocking: call it in a thread.

    The thread must be the scrub's own where its rate is bounded: its priority is lowered for good.

    Owns `fds` and closes them.

    Raises:
        ScrubStopped: `stop` was set.
        MappingError: the weights cannot be mapped.
    """
    chosen = list(entries if entries is not None else owned_tensors(manifest))
    if manifest.checksum_algorithm == MIX128:
        rate = None if rate_bytes_per_s == float("inf") else rate_bytes_per_s
        job = Job(backend.device, list(fds), manifest.extent_bytes, chosen, rate)
        return _scrub_device(job, fds, stop)
    started_s = time.monotonic()
    try:
        mapping = backend.map(fds, manifest.extent_bytes)
    finally:
        while fds:
            os.close(fds.pop())
    mismatches: list[str] = []
    checked = 0
    view = mapping.view()
    try:
        if rate_bytes_per_s != float("inf"):
            _lower_priority()
        for entry in chosen:
            digest = blake2b(digest_size=CHECKSUM_BYTES)
            end = entry.offset_bytes + entry.size_bytes
            for start in range(entry.offset_bytes, end, _CHUNK_BYTES):
                part = view[start : min(start + _CHUNK_BYTES, end)]
                digest.update(part)
                checked += len(part)
                ahead_s = checked / rate_bytes_per_s - (time.monotonic() - started_s)
                if stop.wait(max(0.0, ahead_s)):
                    raise ScrubStopped
            if digest.hexdigest() != entry.checksum:
                mismatches.append(entry.name)
    finally:
        view.release()
        mapping.close()
    return Scrubbed(checked, mismatches, time.monotonic() - started_s)


def _scrub_device(job: Job, fds: list[int], stop: threading.Event) -> Scrubbed:
    """In a process of its own: we have no context to read device memory with."""
    try:
        result = scrub_in_child(job, stop=stop)
    finally:
        while fds:
            os.close(fds.pop())
    if result is None:
        raise ScrubStopped
    return result


def spot_sample(manifest: Manifest, bound_bytes: int) -> list[TensorEntry]:
    """Tensors from all over the arena, together at most `bound_bytes`."""
    owned = [entry for entry in owned_tensors(manifest) if entry.size_bytes <= bound_bytes]
    chosen: list[TensorEntry] = []
    left = bound_bytes
    step = max(1, len(owned) // 16)
    for entry in owned[::step]:
        if entry.size_bytes <= left:
            chosen.append(entry)
            left -= entry.size_bytes
    return chosen


def _lower_priority() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    except OSError as error:  # the bound on the rate still holds
        log.debug("cannot lower the scrub's priority: %s", error)
