"""The seam between the engine and what computes: `cpu`, or one GPU as `cuda:N`.

Everything that differs between the two and is not a whole algorithm lives here: the size of a
prefill chunk, tensors over mapped memory, buffers that the host fills, and waiting. Two things
differ by more and have modules of their own: graphs of steps (`graphs`) and choosing tokens from
logits that stay on the device (`logits`).

Invariants
    1. Nothing here, and nothing imported here, touches CUDA before `prepare`: a zygote that did
       could not fork engines.
    2. One stream, the default one: whatever is ordered in Python is ordered on the device.

WARNING: on CUDA a mapped address is a device pointer; the host must never follow it.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch

from cache.cudadriver import use_context
from engines.contract import DeviceMemory
from engines.native.errors import TorchWithoutCudaError
from engines.native.heap import keep_heap

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["HOST", "Device", "DeviceFault", "InputBuffer", "device_of", "on_device"]

DeviceFault = Literal["device_error", "device_write", "device_memory"]
"""What may be ordered to go wrong, see `engines.native.faults`."""

_HOST_CHUNK_TOKENS: Final = 64
_CUDA_CHUNK_TOKENS: Final = 256
"""A longer chunk is a longer pause for the rows that decode; a shorter one leaves a GPU idle."""

_ONE_CONNECTION: Final = ("CUDA_DEVICE_MAX_CONNECTIONS", "1")
"""Hardware queues of a context. One stream needs one; the default of eight takes 290 ms to make
beside an engine that decodes, one takes 145 (H200). The driver reads it when it starts."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where an engine computes."""

    name: str  # as topologies write it

    @property
    def is_cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.name != "cpu"

    @property
    def torch_device(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.name)

    @property
    def index(self) -> int:
        """Number of the GPU."""
        return int(self.name.partition(":")[2] or 0)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one prefill chunk. Part of what makes a stream's bits: never per request."""
        return _CUDA_CHUNK_TOKENS if self.is_cuda else _HOST_CHUNK_TOKENS

    def set_up_process(self) -> None:
        """What the driver and the C library read once: before threads of ours allocate memory."""
        if self.is_cuda:
            os.environ.setdefault(*_ONE_CONNECTION)
            keep_heap()

    def prepare(self, dtype: str) -> None:
        """Make the device ready in this process; on CUDA this creates the context.

        Args:
            dtype: of the model, as torch names it; decides which attention kernels may run.

        Raises:
            CudaError: there is no such device, or no driver.
            TorchWithoutCudaError: torch was built for machines without a GPU.
        """
        torch.set_num_threads(1)
        if self.is_cuda:
            self.set_up_process()
            if torch.version.cuda is None:
                raise TorchWithoutCudaError(torch.__version__, self.name)
            # Torch would make the context too, but let no other thread run Python meanwhile.
            use_context(self.index)
            torch.cuda.set_device(self.index)
            torch.cuda.init()
            torch.empty(1, device=self.torch_device)
            _use_one_attention(dtype)

    def tensor_at(self, address: int, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor over memory that outlives it; the caller sees to that."""
        if self.is_cuda:
            from cache.devicetensor import tensor_at_device

            return tensor_at_device(address, size_bytes, dtype, self.index)
        # A ctypes array is a writable buffer to Python, so that torch does not warn about
        # read-only memory; whether a write is legal is the mapping's business.
        memory = (ctypes.c_char * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)

    def synchronize(self) -> None:
        """Wait until everything ordered so far is done.

        Raises:
            RuntimeError: something of it failed; on CUDA the context is lost for good.
        """
        if self.is_cuda:
            torch.cuda.synchronize(self.index)

    def release_unused(self) -> None:
        """Give memory back that torch keeps for later: others on this GPU need it."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def fail_on_purpose(self) -> None:
        """Lose the device's context, for chaos tests.

        Raises:
            RuntimeError: the error that every later call would meet, too.
            IndexError: the same on the CPU, which gets over it.
        """
        behind_the_end = torch.ones(1, dtype=torch.int64, device=self.torch_device)
        torch.zeros(1, device=self.torch_device).index_select(0, behind_the_end)
        self.synchronize()

    def memory(self) -> DeviceMemory | None:
        """What this process holds beside the shared arenas, and what the GPU has left."""
        if not self.is_cuda:
            return None
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        reserved_bytes = torch.cuda.memory_reserved(self.index)
        return DeviceMemory(
            reserved_bytes=reserved_bytes, free_bytes=free_bytes, total_bytes=total_bytes
        )


HOST: Final = Device("cpu")


def device_of(name: str) -> Device:
    """The device of a load spec."""
    return HOST if name == "cpu" else Device(name)


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers that were made on the host, for work on `device`; without waiting for the copy.

    Making them on a GPU would load kernels first. Waiting would be for a turn of the card, some
    milliseconds each time beside an engine that decodes; work ordered later finds them there.
    """
    return values.to(device, non_blocking=True)


def _use_one_attention(dtype: str) -> None:
    """Leave one attention kernel, so that no heuristic picks another.

    For half precision cuDNN's: it reads slots with a mask at the speed of memory, and a row's bits
    depend on neither neighbours nor index. Float32, which it does not do, takes the plain formula.
    """
    is_half = dtype in ("bfloat16", "float16")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(is_half)
    torch.backends.cuda.enable_math_sdp(not is_half)


class InputBuffer:
    """Integers that the host writes and a step reads, at addresses that never change.

    On the host both are the same memory. On CUDA `upload` copies a page-locked buffer; it may be
    written again once a step that came after has been waited for.
    """

    def __init__(self, device: Device, shape: tuple[int, ...]) -> None:
        host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.is_cuda)
        self.host: npt.NDArray[np.int64] = host.numpy()
        self._pinned = host
        self.tensor = torch.zeros_like(host, device=device.torch_device) if device.is_cuda else host

    def upload(self) -> None:
        """Make what the host wrote visible to the next step."""
        if self.tensor is not self._pinned:
            self.tensor.copy_(self._pinned, non_blocking=True)
