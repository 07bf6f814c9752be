"""The host backend: extents are memfds, protection is seals.

Seals, in the order in which they are set:

weights   at commit            FUTURE_WRITE | SHRINK | GROW   only the loader's mapping can write
          after loader's exit  WRITE | SEAL                   nobody can write or unseal, ever
kv,slots  at creation          SHRINK | GROW | SEAL           writable, but never resized

Invariants
    1. A file that is mapped by others cannot shrink: an unsealed memfd truncated by a peer is
       SIGBUS in every holder.
    2. After commit the weights leave this process through read-only descriptors only. On kernels
       before 6.7 a reader's shared mapping of a read-write descriptor counts as writable and
       would make the last seal fail (EBUSY).
    3. Memory that is not there is refused before it is taken. Without the check the kernel
       promises it and kills some process, perhaps a serving engine, at the first touch.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cache.arena import Arena, Purpose
from cache.errors import ArenaMemoryError, SealError
from cache.mapping import Mapping, round_to_page
from cache.wire import MAX_FDS_PER_FRAME

__all__ = ["MAX_EXTENT_BYTES", "HostBackend", "available_bytes", "split_extents"]

MAX_EXTENT_BYTES: Final = 1 << 30
"""Largest extent, as long as an arena has few enough of them to travel in one frame."""

_MAX_EXTENTS: Final = MAX_FDS_PER_FRAME // 2 - 1
"""A donation carries weights, KV and one slot table in one frame."""

_RESERVE_BYTES: Final = 64 << 20
"""Memory that an arena never takes: the machine must still be able to say what went wrong."""

_F_SEAL_FUTURE_WRITE: Final = 0x0010  # linux/fcntl.h since 5.1; Python 3.11 has no name for it

_PUBLISHED_SEALS: Final = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FINAL_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_SHARED_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_NAMES: Final[dict[Purpose, str]] = {
    "weights": "understudy-weights",
    "kv": "understudy-kv",
    "slots": "understudy-slots",
}


def split_extents(total_bytes: int) -> list[int]:
    """Sizes of the extents of an arena: whole pages, equal but for the last, few enough."""
    total_bytes = max(round_to_page(total_bytes), round_to_page(1))
    largest = max(MAX_EXTENT_BYTES, round_to_page(-(-total_bytes // _MAX_EXTENTS)))
    count, rest = divmod(total_bytes, largest)
    return [largest] * count + ([rest] if rest else [])


def available_bytes(
    *, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that could be taken now: the machine's, or less where a cgroup says so."""
    machine = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    return min([machine, *_cgroup_rooms(proc, cgroup_root)])


def _cgroup_rooms(proc: Path, cgroup_root: Path) -> Iterator[int]:
    """Bytes left below `memory.max` in this process's cgroup and each one above it (cgroup v2)."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:  # no cgroups here: the machine's figure stands alone
        return
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return
    group = cgroup_root / own.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(cgroup_root):
            return
        try:
            limit = (directory / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((directory / "memory.current").read_text())
            counters = (directory / "memory.stat").read_text().split()
        except OSError:  # the root group has no such files
            continue
        # Page cache counts as used, but gives way; shared memory is not in these two lists.
        named = dict(zip(counters[::2], counters[1::2], strict=False))
        reclaimable = int(named.get("inactive_file", 0)) + int(named.get("active_file", 0))
        yield max(0, int(limit) - used + reclaimable)


class HostBackend:
    """Arenas in memfds. Stateless: the arenas own everything."""

    device: Final = "cpu"
    device_uuid: Final = ""

    def create(self, purpose: Purpose, total_bytes: int) -> Arena:
        """See `ArenaBackend.create`."""
        sizes = split_extents(total_bytes)
        room = available_bytes() - _RESERVE_BYTES
        if sum(sizes) > room:
            raise ArenaMemoryError(purpose, total_bytes, f"only {max(0, room)} bytes are available")
        arena = Arena(purpose, [], [])
        try:
            with _as_memory_error(purpose, total_bytes):
                for size_bytes in sizes:
                    fd = os.memfd_create(_NAMES[purpose], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                    arena.fds.append(fd)
                    os.ftruncate(fd, size_bytes)
                    arena.extent_bytes.append(size_bytes)
                    if purpose != "weights":
                        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHARED_SEALS)
        except BaseException:
            arena.close()
            raise
        return arena

    def reserve(self, arena: Arena) -> None:
        """See `ArenaBackend.reserve`; 4 GiB/s and more, the pages are cleared at first touch."""
        with _as_memory_error(arena.purpose, arena.total_bytes):
            for fd, size_bytes in zip(arena.fds, arena.extent_bytes, strict=True):
                os.posix_fallocate(fd, 0, size_bytes)

    def map(
        self,
        fds: Sequence[int],
        extent_bytes: Sequence[int],
        *,
        writable: bool = False,
        tail_bytes: int = 0,
    ) -> Mapping:
        """See `ArenaBackend.map`."""
        return Mapping(fds, extent_bytes, writable=writable, tail_bytes=tail_bytes)

    def seal_after_publish(self, arena: Arena) -> None:
        """See `ArenaBackend.seal_after_publish`."""
        for index, fd in enumerate(arena.fds):
            _add_seals(fd, _PUBLISHED_SEALS)
            arena.fds[index] = _reopen(fd, os.O_RDONLY)
            os.close(fd)

    def seal_after_commit(self, arena: Arena) -> None:
        """See `ArenaBackend.seal_after_commit`."""
        for fd in arena.fds:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FINAL_SEALS != _FINAL_SEALS:
                _add_final_seals(fd)

    def check_donated(self, arena: Arena) -> None:
        """See `ArenaBackend.check_donated`."""
        inodes = set()
        for fd, size_bytes in zip(arena.fds, arena.extent_bytes, strict=True):
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != size_bytes:
                raise SealError(
                    f"a donated {arena.purpose} extent has {info.st_size} bytes, not {size_bytes}"
                )
            inodes.add((info.st_dev, info.st_ino))
            self._check_seals(arena.purpose, fd)
        if len(inodes) != len(arena.fds):
            raise SealError(f"a donated {arena.purpose} extent was given twice")
        if arena.purpose == "weights":
            self.seal_after_commit(arena)

    @staticmethod
    def _check_seals(purpose: Purpose, fd: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise SealError(f"a donated {purpose} extent is not a sealable memory file") from error
        forbids_writing = fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE
        if purpose == "weights":
            lacking = (_PUBLISHED_SEALS & ~forbids_writing) & ~seals
            if lacking or not seals & forbids_writing:
                raise SealError(f"donated weights were never committed (seals {seals:#x})")
        elif seals & forbids_writing or seals & _SHARED_SEALS != _SHARED_SEALS:
            raise SealError(f"a donated {purpose} extent has the wrong seals ({seals:#x})")


def _reopen(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _add_final_seals(fd: int) -> None:
    writable = _reopen(fd, os.O_RDWR)  # sealing needs a writable descriptor; ours only reads
    try:
        _add_seals(writable, _FINAL_SEALS)
    finally:
        os.close(writable)


def _add_seals(fd: int, seals: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise SealError(
                "the weights cannot be sealed: some process can still write them",
                hint="find it in /proc/*/maps ('understudy-weights' with 'rw-s') and stop it",
            ) from error
        raise SealError(f"the weights cannot be sealed: {error.strerror}") from error


@contextmanager
def _as_memory_error(purpose: Purpose, total_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise ArenaMemoryError(purpose, total_bytes, reason) from error
