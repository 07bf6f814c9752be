"""Errors of a GPU are told from bugs, and say what to do."""

import pytest
import torch

from cache.errors import CudaError, MappingError
from engines.native.device import HOST, Device
from engines.native.devicefaults import explained
from engines.native.errors import DeviceFailedError, DeviceMemoryError

CARD = Device("cuda:0")

FAILED = (
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nFor debugging"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( ... )`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
)
OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has ..."),
    CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY"),
)


@pytest.mark.parametrize("error", FAILED, ids=lambda e: str(e)[:12])
def test_an_error_of_the_card_is_one_line_with_a_hint(error: Exception) -> None:
    found = explained(error, CARD, may_ask=False)
    assert isinstance(found, DeviceFailedError)
    assert found.stable_code == "device_failed"
    assert "cuda:0" in found.message
    assert "\n" not in found.message
    assert "dmesg" in str(found.hint)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "driver"])
def test_lack_of_memory_says_so_and_asks_who_holds_it_only_when_there_is_time(
    error: Exception,
) -> None:
    quick = explained(error, CARD, may_ask=False)
    slow = explained(error, CARD, may_ask=True)
    for found in (quick, slow):
        assert isinstance(found, DeviceMemoryError)
        assert found.stable_code == "device_out_of_memory"
    assert isinstance(slow, DeviceMemoryError)
    assert "held by" in slow.message or "unknown" in slow.message or "MiB are free" in slow.message
    assert "unknown" not in str(quick)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error: looks like one"),
        MappingError("an extent is too short"),
        KeyError("CUDA"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_bug_stays_what_it_is(error: Exception) -> None:
    assert explained(error, CARD, may_ask=True) is error


def test_on_the_host_nothing_is_of_a_gpu() -> None:
    for error in (*FAILED, *OUT_OF_MEMORY):
        assert explained(error, HOST, may_ask=True) is error
