"""What a zygote does for engines on a GPU, without touching the GPU itself.

CUDA's libraries are gigabytes of files: on a cold machine the first process that uses them waits
3 s for pages from the disk. One throw-away fork pays that before anybody waits for an engine. It
computes what an engine computes first and ends; whether it succeeds matters to nobody else.

What libraries work out once in each process is worked out here, and inherited: Triton alone reads
and hashes its own hundreds of megabytes before its first kernel (0.5 s, measured).
"""

import importlib
import logging
import os
import select
import signal
from pathlib import Path
from typing import Final, NoReturn

from cache.fingerprint import fingerprint_of
from cache.protocol import LoadSpec

__all__ = ["GPU_ENVIRONMENT", "opened_gpu_files", "warm_gpu_libraries"]

log = logging.getLogger(__name__)

GPU_ENVIRONMENT: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Makes `torch.cuda.is_available` ask the driver's management library instead of initialising
CUDA: some library that we import may ask. To be set before torch is imported."""

_SLOW_IMPORTS: Final = (
    "cache.cuda",
    "cuda.bindings.driver",
    "engines.native.decode_attention",
    "engines.native.fp8_kernels",
    "cache.devicetensor",
    "triton.backends.nvidia.compiler",
    "triton.backends.nvidia.driver",
    "triton.compiler.code_generator",
    "triton.experimental.gluon",
)
_TIMEOUT_MS: Final = 60_000


def opened_gpu_files() -> list[str]:
    """Files of the GPU driver that this process holds open: none before CUDA is initialised."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return sorted(set(found))


def warm_gpu_libraries(load: LoadSpec) -> None:
    """Fork once, use CUDA there, wait for the end; bounded in time, never an error."""
    _work_out_once(load)
    pid = os.fork()
    if pid == 0:
        _use_gpu(load)
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(_TIMEOUT_MS):
        log.warning("the first use of the GPU took longer than %d s", _TIMEOUT_MS // 1000)
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    if status:
        log.warning("the first use of the GPU ended with wait status %d", status)


def _work_out_once(load: LoadSpec) -> None:
    """Fill what libraries keep for the life of a process; a release that has it not does without.

    Of Triton: the hash of itself, the sources of our kernels, its assembler's version, and where
    the driver's library lies. Of ours: what a fingerprint says of this machine and of the
    checkpoint, and the digest of the code that a proof is kept with.
    """
    try:
        for module in _SLOW_IMPORTS:
            importlib.import_module(module)
        fingerprint_of(load)
        from triton import knobs
        from triton.backends.nvidia import driver
        from triton.runtime import cache

        from engines.native import decode_attention, fp8_kernels
        from engines.native.proofs import code_digest

        code_digest()

        for kernel in (*decode_attention.KERNELS, *fp8_kernels.KERNELS):
            _ = kernel.cache_key
        cache.triton_key()
        _ = knobs.nvidia.ptxas
        driver.library_dirs()
    except Exception as error:  # noqa: BLE001 - this only saves time: who needs it will say so
        log.warning("engines start slower: %r", error)


def _use_gpu(load: LoadSpec) -> NoReturn:
    """Context, matrix product and attention, in the dtype of the model."""
    status = 1
    try:
        import torch
        import torch.nn.functional as F  # noqa: N812 - the name everybody knows

        from engines.native.device import device_of

        device = device_of(load.device)
        device.prepare(load.dtype)
        dtype = getattr(torch, load.dtype)
        values = torch.zeros(16, 128, device=device.torch_device, dtype=dtype)
        (values @ values.t()).float().argmax(dim=-1)
        heads = torch.zeros(2, 2, 128, 64, device=device.torch_device, dtype=dtype)
        mask = torch.zeros(2, 1, 1, 128, device=device.torch_device, dtype=dtype)
        F.scaled_dot_product_attention(heads[:, :, :1], heads, heads, attn_mask=mask)
        device.synchronize()
        status = 0
    except Exception:
        log.exception("the GPU cannot be used")
    finally:
        os._exit(status)
