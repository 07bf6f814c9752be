"""What went wrong on a GPU, as an error of ours: code, reason, and what to do next.

Libraries raise `RuntimeError` for everything. What is of the GPU is told from a bug by the class
torch gives it, or by the name of the library that its text begins with.

Invariant
    A process that met one of these errors ends. After most of them its context is lost for good
    (`cache.cudadriver.STICKY_ERRORS`), and of the others nobody can tell what was left undone.
"""

from typing import Final

import torch

from cache.cudadriver import OUT_OF_MEMORY, device_ordinal, device_uuid
from cache.errors import CudaError, UnderstudyError
from cache.gpumemory import describe_use
from engines.native.device import Device
from engines.native.errors import DeviceFailedError, DeviceMemoryError

__all__ = ["explained"]

_LIBRARIES: Final = ("CUDA", "cuDNN", "CUBLAS", "cuBLAS", "cublas", "NCCL", "Triton Error [CUDA]")


def explained(error: BaseException, device: Device, *, may_ask: bool) -> BaseException:
    """The error itself, or one of ours that says more.

    Args:
        error: what a library or the driver raised.
        device: where the process computes.
        may_ask: whether there is time to ask who holds the card's memory; at a start there is,
            while streams wait for this process to be gone there is not.
    """
    if not device.is_cuda:
        return error
    if isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error):
        return DeviceMemoryError(device.name, f"{_one_line(error)}{_holders(device, may_ask)}")
    if isinstance(error, UnderstudyError):
        return error
    text = str(error)
    is_device = isinstance(error, torch.AcceleratorError) or text.startswith(_LIBRARIES)
    if isinstance(error, RuntimeError) and is_device:
        return DeviceFailedError(device.name, _one_line(error))
    return error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, CudaError) and error.error == OUT_OF_MEMORY


def _one_line(error: BaseException) -> str:
    """The first line says what happened; the others are advice for people who debug kernels."""
    return str(error).partition("\n")[0].strip()


def _holders(device: Device, may_ask: bool) -> str:
    if not may_ask:
        return ""
    try:
        return f" ({describe_use(device_uuid(device_ordinal(device.name))).text})"
    except UnderstudyError as error:  # the driver answers nothing any more
        return f" (who holds it is unknown: {error.message})"
