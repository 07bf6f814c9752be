"""The CUDA driver, through NVIDIA's own Python bindings: one way to call it, typed errors.

The bindings are imported at the first call, so a machine without a GPU never needs them. Nothing
here imports torch: the cache daemon uses this module, and takes device memory with `cuInit` alone,
without ever making a CUDA context.

Invariants
    1. Every status other than success becomes a `CudaError` that names the call and the status.
    2. A context is made only by `use_context`, never as a side effect: an owner of memory costs
       the card 4 MiB, a context hundreds.

WARNING: nothing of CUDA survives a fork: a process that will fork engines calls nothing here.
"""

from functools import lru_cache
from typing import Any, Final

from cache.errors import BackendNotBuiltError, CudaBindingsMissingError, CudaError

__all__ = [
    "OUT_OF_MEMORY",
    "STICKY_ERRORS",
    "Untyped",
    "allocation_properties",
    "bindings",
    "call",
    "device_ordinal",
    "device_uuid",
    "fd_handle_type",
    "granularity",
    "initialise",
    "is_sticky",
    "use_context",
]

Untyped = Any
"""An object of the bindings, which carry no types."""

OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"

STICKY_ERRORS: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT", "CONTEXT_IS_DESTROYED", "ECC_UNCORRECTABLE", "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE", "UNKNOWN",
    )
)  # fmt: skip
"""Errors that a context never recovers from: the process must be replaced."""

_HINTS: Final = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "name a device that nvidia-smi -L lists, such as cuda:0",
    OUT_OF_MEMORY: "free device memory: nvidia-smi lists the processes that hold it",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated: restart the machine",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the fabric manager, or restart the machine",
    "CUDA_ERROR_NOT_SUPPORTED": "the driver, or this virtual machine, cannot share device memory",
    "CUDA_ERROR_OPERATING_SYSTEM": "raise RLIMIT_NOFILE; see the kernel's log (dmesg) for NVRM",
    "CUDA_ERROR_INVALID_HANDLE": "the descriptor is not device memory, or of another machine",
    "NO_DRIVER": "install the NVIDIA driver (libcuda.so.1), or use device cpu",
}


@lru_cache(maxsize=1)
def bindings() -> Untyped:
    """The module `cuda.bindings.driver`.

    Raises:
        CudaBindingsMissingError: it is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaBindingsMissingError(str(error)) from error
    return driver


def call(name: str, *arguments: Untyped) -> Untyped:
    """Call one function of the driver; its result, a tuple of several, or None.

    Raises:
        CudaError: any status but success.
        CudaBindingsMissingError: there are no bindings.
    """
    driver = bindings()
    try:
        status, *values = getattr(driver, name)(*arguments)
    except (RuntimeError, AttributeError) as error:  # no libcuda, or one without this function
        raise CudaError(name, "NO_DRIVER", str(error), hint=_HINTS["NO_DRIVER"]) from error
    if int(status) != 0:
        raise _error(driver, name, status)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def is_sticky(error: CudaError) -> bool:
    """Whether the context that met this error is lost."""
    return error.error in STICKY_ERRORS


def device_ordinal(device: str) -> int:
    """The number in `cuda:N`.

    Raises:
        BackendNotBuiltError: another kind of device.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise BackendNotBuiltError(device)
    return int(number)


def initialise(ordinal: int) -> None:
    """Initialise the driver and see that the device is there; makes no context.

    Raises:
        CudaError: no driver, or no such device.
    """
    call("cuInit", 0)
    call("cuDeviceGet", ordinal)


def device_uuid(ordinal: int) -> str:
    """The name by which NVML and nvidia-smi know the device, whatever the order of either."""
    raw = bytes(call("cuDeviceGetUuid", call("cuDeviceGet", ordinal)).bytes)
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def use_context(ordinal: int) -> None:
    """Make the device's primary context, the one torch uses too, current in this thread."""
    call("cuInit", 0)
    current = call("cuCtxGetCurrent")
    if int(current) != 0 and int(call("cuCtxGetDevice")) == ordinal:
        return
    call("cuCtxSetCurrent", _primary_context(ordinal))


@lru_cache(maxsize=64)
def _primary_context(ordinal: int) -> Untyped:
    """Retained for the life of the process, as torch does it."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


def fd_handle_type() -> Untyped:
    """The handle type of memory that travels as a file descriptor."""
    return bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def allocation_properties(ordinal: int, *, shareable: bool = True) -> Untyped:
    """Properties of memory on the device; `shareable` memory can be exported as a descriptor."""
    driver = bindings()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    if shareable:
        properties.requestedHandleTypes = fd_handle_type()
    return properties


@lru_cache(maxsize=64)
def granularity(ordinal: int) -> int:
    """Sizes of device memory are multiples of this."""
    flag = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    properties = allocation_properties(ordinal)
    return int(call("cuMemGetAllocationGranularity", properties, flag))


def _error(driver: Untyped, name: str, status: Untyped) -> CudaError:
    found, text = driver.cuGetErrorName(status), driver.cuGetErrorString(status)
    error = _text(found[1]) or f"CUDA_ERROR_{int(status)}"
    return CudaError(name, error, _text(text[1]), hint=_HINTS.get(error, ""))


def _text(value: Untyped) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
