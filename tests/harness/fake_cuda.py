"""A CUDA driver made of host memory, so that code which speaks to one can be tested without a GPU.

Device memory is memfds, device addresses are host addresses, streams do their work at once. It
keeps the rules that matter here: memory lives as long as a descriptor or a mapping, sizes must be
whole granules, an allocation is mapped whole, access must be set before use, and a write to a
read-only range is an illegal access that the context never recovers from.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from cache import cudadriver
from cache.checksum import mix128
from cache.mapping import _libc, _map

__all__ = ["GRANULE", "FakeDriver", "installed", "tensor_on_host"]

GRANULE = 2 << 20
_ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    101: "CUDA_ERROR_INVALID_DEVICE",
    400: "CUDA_ERROR_INVALID_HANDLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
}
_FIXED, _NORESERVE = 0x10, 0x4000


class _Refusal(Exception):  # noqa: N818 - becomes a status
    def __init__(self, status: int) -> None:
        self.status = status


def _driver_call(method: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: "FakeDriver", *arguments: Any) -> tuple[Any, ...]:
        if self.is_lost:
            return (700,)
        try:
            result = method(self, *arguments)
        except _Refusal as refusal:
            return (refusal.status,)
        return (0,) if result is None else (0, result)

    return answer


class FakeDriver(ModuleType):
    """Stands in for `cuda.bindings.driver`."""

    def __init__(self, *, devices: int = 1, capacity_bytes: int = 1 << 40) -> None:
        super().__init__("cuda.bindings.driver")
        self.devices, self.capacity_bytes = devices, capacity_bytes
        self.is_lost = False
        self.contexts = 0
        self.handles: dict[int, int] = {}  # handle -> memfd
        self.ranges: dict[int, int] = {}  # mapped address -> bytes
        self.access: dict[int, tuple[int, bool]] = {}  # address -> bytes, writable
        self.blocks: dict[int, Any] = {}
        self._next = 1000
        flags = SimpleNamespace
        self.CUmemAllocationHandleType = flags(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.CUmemAllocationType = flags(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = flags(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationGranularity_flags = flags(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
        self.CUmemAccess_flags = flags(
            CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3
        )
        self.CUmemAllocationProp = lambda: flags(location=flags(), requestedHandleTypes=0)
        self.CUmemAccessDesc = lambda: flags(location=flags())

    def _number(self) -> int:
        self._next += 1
        return self._next

    # ------------------------------------------------------------------ devices and contexts

    @_driver_call
    def cuInit(self, _flags: int) -> None: ...  # noqa: N802

    @_driver_call
    def cuDeviceGet(self, ordinal: int) -> int:  # noqa: N802
        if ordinal >= self.devices:
            raise _Refusal(101)
        return ordinal

    @_driver_call
    def cuDeviceGetUuid(self, _device: int) -> Any:  # noqa: N802
        return SimpleNamespace(bytes=bytes(range(16)))

    @_driver_call
    def cuCtxGetCurrent(self) -> int:  # noqa: N802
        return self.contexts

    @_driver_call
    def cuCtxGetDevice(self) -> int:  # noqa: N802
        return 0

    @_driver_call
    def cuDevicePrimaryCtxRetain(self, _device: int) -> int:  # noqa: N802
        return 1

    @_driver_call
    def cuCtxSetCurrent(self, context: int) -> None:  # noqa: N802
        self.contexts = context

    @_driver_call
    def cuCtxSynchronize(self) -> None: ...  # noqa: N802

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return (0, _ERRORS[status].encode())

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return (0, _ERRORS[status].removeprefix("CUDA_ERROR_").lower().encode())

    # ------------------------------------------------------------------ shareable memory

    @_driver_call
    def cuMemGetAllocationGranularity(self, _properties: Any, _flag: int) -> int:  # noqa: N802
        return GRANULE

    @_driver_call
    def cuMemCreate(self, size: int, properties: Any, _flags: int) -> int:  # noqa: N802
        if size % GRANULE or size <= 0:
            raise _Refusal(1)
        if size > self.capacity_bytes:
            raise _Refusal(2)
        self.capacity_bytes -= size
        handle = self._number()
        self.handles[handle] = os.memfd_create(f"fake-cuda-{properties.location.id}")
        os.ftruncate(self.handles[handle], size)
        return handle

    @_driver_call
    def cuMemExportToShareableHandle(self, handle: int, _kind: int, _flags: int) -> int:  # noqa: N802
        fd = os.dup(self.handles[handle])
        os.set_inheritable(fd, True)
        return fd

    @_driver_call
    def cuMemImportFromShareableHandle(self, fd: int, _kind: int) -> int:  # noqa: N802
        if "fake-cuda-" not in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115
            raise _Refusal(400)
        handle = self._number()
        self.handles[handle] = os.dup(fd)
        return handle

    @_driver_call
    def cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> Any:  # noqa: N802
        name = os.readlink(f"/proc/self/fd/{self.handles[handle]}")  # noqa: PTH115
        number = name.partition("fake-cuda-")[2].split()[0]
        return SimpleNamespace(location=SimpleNamespace(id=int(number)))

    @_driver_call
    def cuMemRelease(self, handle: int) -> None:  # noqa: N802
        os.close(self.handles.pop(handle))

    @_driver_call
    def cuMemAddressReserve(self, size: int, *_rest: int) -> int:  # noqa: N802
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        return _map(0, size, 0, flags)

    @_driver_call
    def cuMemMap(self, address: int, size: int, _offset: int, handle: int, _flags: int) -> None:  # noqa: N802
        fd = self.handles[handle]
        if os.fstat(fd).st_size != size:
            raise _Refusal(1)
        _map(address, size, 0, mmap.MAP_SHARED | _FIXED, fd)
        self.ranges[address] = size

    @_driver_call
    def cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], _count: int) -> None:  # noqa: N802
        writable = descriptions[0].flags == 3
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mprotect(address, size, prot):
            raise _Refusal(1)
        self.access[address] = (size, writable)

    @_driver_call
    def cuMemUnmap(self, address: int, size: int) -> None:  # noqa: N802
        if self.ranges.pop(address, None) != size:
            raise _Refusal(1)
        _map(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED)

    @_driver_call
    def cuMemAddressFree(self, address: int, size: int) -> None:  # noqa: N802
        _libc.munmap(address, size)
        self.access = {
            start: found
            for start, found in self.access.items()
            if not address <= start < address + size
        }

    # ------------------------------------------------------------------ private memory, copies

    @_driver_call
    def cuMemAlloc(self, size: int) -> int:  # noqa: N802
        block = (ctypes.c_ubyte * (size + 512))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = block
        return address

    @_driver_call
    def cuMemFree(self, address: int) -> None:  # noqa: N802
        del self.blocks[address]

    cuMemHostAlloc = _driver_call(lambda self, size, _flags: self.cuMemAlloc(size)[1])  # noqa: N815
    cuMemFreeHost = cuMemFree  # noqa: N815

    def _written(self, address: int, size: int) -> None:
        for start, (length, writable) in self.access.items():
            if start < address + size and address < start + length and not writable:
                self.is_lost = True
                raise _Refusal(700)

    @_driver_call
    def cuMemsetD8(self, address: int, value: int, size: int) -> None:  # noqa: N802
        self._written(address, size)
        ctypes.memset(address, value, size)

    @_driver_call
    def cuMemsetD8Async(self, address: int, value: int, size: int, _stream: int) -> None:  # noqa: N802
        self._written(address, size)
        ctypes.memset(address, value, size)

    def _copy(self, target: int, source: int, size: int, *_stream: int) -> None:
        self._written(target, size)
        ctypes.memmove(target, source, size)

    cuMemcpyDtoH = cuMemcpyHtoD = _driver_call(_copy)  # noqa: N815
    cuMemcpyHtoDAsync = cuMemcpyDtoDAsync = _driver_call(_copy)  # noqa: N815

    # ------------------------------------------------------------------ streams, events, kernels

    cuStreamCreate = cuEventCreate = _driver_call(lambda self, _flags: self._number())  # noqa: N815
    cuStreamSynchronize = cuEventSynchronize = _driver_call(lambda _self, _it: None)  # noqa: N815
    cuStreamDestroy = cuEventDestroy = _driver_call(lambda _self, _it: None)  # noqa: N815
    cuEventRecord = _driver_call(lambda _self, _event, _stream: None)  # noqa: N815
    cuModuleLoadData = _driver_call(lambda self, _image: self._number())  # noqa: N815
    cuModuleGetFunction = _driver_call(lambda _self, _module, name: name)  # noqa: N815
    cuModuleUnload = _driver_call(lambda _self, _module: None)  # noqa: N815

    @_driver_call
    def cuLaunchKernel(self, name: bytes, *arguments: Any) -> None:  # noqa: N802
        assert name == b"mix128"
        (address, size, result), _kinds = arguments[-2]
        found = int(mix128(ctypes.string_at(address, size)), 16)
        sums = (ctypes.c_uint64 * 2).from_address(result)
        sums[0], sums[1] = found >> 64, found & ((1 << 64) - 1)


def tensor_on_host(address: int, size_bytes: int, dtype: Any, _index: int) -> Any:
    """What `tensor_at_device` is for addresses of this driver."""
    import torch

    memory = (ctypes.c_char * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@contextmanager
def installed(driver: FakeDriver) -> Iterator[FakeDriver]:
    """Make `cudadriver` find the fake."""
    names = ("cuda", "cuda.bindings", "cuda.bindings.driver")
    before = {name: sys.modules.get(name) for name in names}
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    sys.modules |= {"cuda": ModuleType("cuda"), names[1]: package, names[2]: driver}
    _forget()
    try:
        yield driver
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        _forget()


def _forget() -> None:
    for cached in (cudadriver.bindings, cudadriver.granularity, cudadriver._primary_context):
        cached.cache_clear()
