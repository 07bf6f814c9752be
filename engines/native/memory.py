"""The memory an engine serves from: KV and slot table, shared with its peer or its own.

Shared memory starts read-only. `raise_to_writer` is the heart of a promotion: two changes of
protection and a claim of the table, no daemon and no disk. Private memory (batch engines, cache
mode `off`) is always writable and dies with the process.
"""

import ctypes
import fcntl
import mmap
import os
from typing import Final, Protocol

from cache.arena import backend_for
from cache.errors import StaleEpochError
from cache.mapping import Mapping, keep_out_of_dumps
from cache.protocol import KvGeometry, KvOpened
from cache.slots import SlotTable
from engines.contract import ProgressPage
from engines.native.device import HOST, Device
from engines.native.kv import KvMemoryView, tail_bytes_for
from engines.native.predecessor import FencedWriters, own_identity

__all__ = ["Ballast", "PrivateMemory", "ServingMemory", "SharedMemory", "progress_file"]


class ServingMemory(Protocol):
    """Where rows live. Used by the model thread alone, but for `is_shared`."""

    kv: KvMemoryView
    table: SlotTable
    is_shared: bool
    is_writer: bool

    def raise_to_writer(self, epoch: int) -> None:
        """Become the one writer, after the predecessor was fenced.

        Raises:
            StaleEpochError: the table has seen a higher epoch.
            MappingError: the kernel refuses.
        """

    def drop_to_reader(self) -> None:
        """Give the right to write away; the next write would be SIGSEGV."""

    def is_settled(self) -> bool:
        """Whether nobody but us can still write: only then slots may be used anew."""


class SharedMemory:
    """The serving pair's KV arena and slot table, mapped for the life of the process."""

    is_shared = True

    def __init__(
        self, opened: KvOpened, kv_fds: list[int], table_fd: int, *, device: Device = HOST
    ) -> None:
        geometry = opened.geometry
        shared_bytes = sum(opened.extent_bytes)
        self._device = device
        self._kv_mapping = backend_for(device.name).map(
            kv_fds,
            opened.extent_bytes,
            tail_bytes=tail_bytes_for(geometry, device.chunk_tokens),
        )
        # The table is host memory whatever the device: gateways' ids, not the model's numbers.
        self._table_mapping = Mapping([table_fd], [opened.table_bytes])
        self.kv = KvMemoryView.of_mapping(
            geometry,
            self._kv_mapping.address,
            shared_bytes=shared_bytes,
            tail_bytes=self._kv_mapping.size_bytes - shared_bytes,
            device=device,
        )
        self.table = SlotTable(self._table_mapping.view())
        self.is_writer = False
        self._own = own_identity()  # now: a promotion must not need a descriptor for it
        self._predecessors: FencedWriters | None = None

    def raise_to_writer(self, epoch: int) -> None:
        """See `ServingMemory`."""
        self._table_mapping.protect(writable=True)
        before = self.table.writers
        try:
            self.table.claim(epoch, self._own)
        except StaleEpochError:  # somebody newer was here: stay the reader that we were
            self._table_mapping.protect(writable=False)
            raise
        if self._device.is_cuda:
            self._watch_no_more()
            self._predecessors = FencedWriters(self.table, before, self._own)
        else:  # the fence is enough: nothing works in the background
            for writer in before:
                self.table.strike(writer)
        self._kv_mapping.protect(writable=True)
        self.is_writer = True

    def drop_to_reader(self) -> None:
        """See `ServingMemory`."""
        if not self.is_writer:
            return  # mapped read-only from the start
        self._device.synchronize()
        self.table.resign()
        self._kv_mapping.protect(writable=False)
        self._table_mapping.protect(writable=False)
        self._watch_no_more()
        self.is_writer = False

    def _watch_no_more(self) -> None:
        if self._predecessors is not None:
            self._predecessors.close()
            self._predecessors = None

    def is_settled(self) -> bool:
        """See `ServingMemory`."""
        if self._predecessors is not None and self._predecessors.are_gone():
            self._predecessors = None
        return self._predecessors is None


class PrivateMemory:
    """Memory of this process alone, on its device."""

    is_shared = False

    def __init__(self, geometry: KvGeometry, *, device: Device = HOST) -> None:
        self.kv = KvMemoryView.private(geometry, device=device)
        if not device.is_cuda:
            keep_out_of_dumps(self.kv.flat.data_ptr(), self.kv.flat.nbytes)
        size_bytes = SlotTable.size_bytes(geometry.slots, geometry.max_length)
        self._memory = mmap.mmap(-1, size_bytes)
        self._memory.madvise(mmap.MADV_DONTDUMP)
        view = memoryview(self._memory)
        SlotTable.format(view, geometry.slots, geometry.max_length)
        self.table = SlotTable(view)
        self.is_writer = True

    def raise_to_writer(self, epoch: int) -> None:
        """Nothing to raise: there is no other writer."""
        self.table.claim(epoch)

    def drop_to_reader(self) -> None:
        """Nothing to drop."""

    def is_settled(self) -> bool:
        """Always: there was nobody before."""
        return True


class Ballast:
    """Touched private memory of a given size: lets tests see how a big process dies."""

    def __init__(self, size_bytes: int) -> None:
        self._memory: Final = mmap.mmap(-1, size_bytes) if size_bytes else None
        if self._memory is not None:
            first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            ctypes.memset(first, 1, size_bytes)


def progress_file() -> tuple[int, mmap.mmap]:
    """A page of shared memory for `ProgressPage`: descriptor and mapping.

    Sealed against resizing: truncated by a reader it would be SIGBUS in the model thread.
    """
    fd = os.memfd_create("understudy-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ProgressPage.SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd, mmap.mmap(fd, ProgressPage.SIZE_BYTES)
