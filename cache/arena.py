"""The arena: an ordered list of extents, and the port to the memory that they live in.

`backend_for` is the one place that turns a device string into a backend. Everything else of the
cache speaks to `ArenaBackend`, so another kind of memory is one module and one line here.

An extent is one physical allocation, known by a descriptor. An arena owns its descriptors and
closes them exactly once. The memory lives as long as any process holds a descriptor or a mapping.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from cache.errors import BackendNotBuiltError

__all__ = ["Arena", "ArenaBackend", "ArenaMapping", "Purpose", "backend_for"]

Purpose = Literal["weights", "kv", "slots"]


@dataclass(slots=True)
class Arena:
    """Descriptors and sizes of the extents, in order. `close` is idempotent."""

    purpose: Purpose
    fds: list[int]
    extent_bytes: list[int]

    @property
    def total_bytes(self) -> int:
        """Size of all extents together."""
        return sum(self.extent_bytes)

    def close(self) -> None:
        """Close every descriptor; the memory goes with its last holder."""
        while self.fds:
            os.close(self.fds.pop())
        self.extent_bytes = []


class ArenaMapping(Protocol):
    """An arena in this process's address space."""

    @property
    def address(self) -> int:
        """First byte of the range; never changes."""
        ...

    @property
    def shared_bytes(self) -> int:
        """The extents together."""
        ...

    @property
    def tail_bytes(self) -> int:
        """The private part behind them, as large as was asked for or a little larger."""
        ...

    @property
    def size_bytes(self) -> int:
        """Shared part and private tail together."""
        ...

    def protect(self, *, writable: bool) -> None:
        """Raise the shared part to read-write or drop it; on the promotion path."""
        ...

    def view(self) -> memoryview:
        """All bytes, where the memory is addressable by the CPU.

        Raises:
            MappingError: it is device memory.
        """
        ...

    def close(self) -> None:
        """Unmap; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exc: object) -> None: ...


class ArenaBackend(Protocol):
    """Where the memory of an arena comes from.

    The daemon creates, seals and checks; loader and engines map. All methods are blocking and
    short, except `reserve`, which takes as long as the kernel needs to find the pages.
    """

    @property
    def device(self) -> str:
        """The device string that `backend_for` was given."""
        ...

    @property
    def device_uuid(self) -> str:
        """The name that the driver's own tools give the device; empty for host memory."""
        ...

    def create(self, purpose: Purpose, total_bytes: int) -> Arena:
        """Make the extents of a new arena. Host memory reads as zero from the start.

        Called by the daemon at `publish` and `kv.open`. KV and slot table are sealed against
        resizing from the start; weights are sealed later, see below.

        Raises:
            ArenaMemoryError: the memory is not there, or a limit was reached. Nothing is left.
        """
        ...

    def reserve(self, arena: Arena) -> None:
        """Take the physical pages now, so that no later write can fail for lack of memory.

        Called in a thread, by the daemon for KV and slot table; both read as zero afterwards.

        Raises:
            ArenaMemoryError: not enough memory. The arena stays open.
        """
        ...

    def map(
        self,
        fds: Sequence[int],
        extent_bytes: Sequence[int],
        *,
        writable: bool = False,
        tail_bytes: int = 0,
    ) -> ArenaMapping:
        """Map extents in a row, with a private writable tail behind them."""
        ...

    def seal_after_publish(self, arena: Arena) -> None:
        """At `commit`: no new writable mapping, no resizing. Only the loader's lives on.

        Afterwards the arena's descriptors allow reading only, for every receiver.

        Raises:
            SealError: the kernel refuses.
        """
        ...

    def seal_after_commit(self, arena: Arena) -> None:
        """Once the loader's exit was seen: nobody can ever write or unseal again.

        Raises:
            SealError: a writable mapping is still alive somewhere.
        """
        ...

    def check_donated(self, arena: Arena) -> None:
        """Whether foreign extents are what they claim: sizes, seals, each one distinct.

        Weights that lack the last seals get them, or are refused.

        Raises:
            SealError: they are not safe to map or to hand out.
        """
        ...


def backend_for(device: str) -> ArenaBackend:
    """The backend of a device string such as `cpu` or `cuda:0`.

    Raises:
        BackendNotBuiltError: this release has none for it.
        CudaBindingsMissingError, CudaError: a CUDA device that cannot be used, and why.
    """
    if device == "cpu":
        from cache.host import HostBackend

        return HostBackend()
    if device.startswith("cuda:"):
        from cache.cuda import CudaBackend

        return CudaBackend(device)
    raise BackendNotBuiltError(device)
