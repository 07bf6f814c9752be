"""First uses of a GPU's libraries, in threads beside the rest of a start.

A kernel is loaded when it is first used, a library sets itself up at its first call, each some
milliseconds to a tenth of a second. Loading needs no order, so it runs in threads while the model
thread opens KV memory and makes its buffers, not sooner: beside the attach it doubled its time.
Three threads, because eight were slower (docs/benchmarks): the driver loads under one lock.

What is used here is what a step and a choice of tokens use, on tensors of no weight. An entry too
few costs milliseconds later, one too many costs them here; neither changes what is computed.

Invariants
    1. Nothing is captured before `wait` says that all is done.
    2. An error here is nobody's: who needs what failed will meet it, and say so.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from engines.native.device import Device

__all__ = ["FirstUses"]

log = logging.getLogger(__name__)

_WAIT_S: Final = 10.0
_WIDTH: Final = 1024
_ROWS: Final = 8
_HEADS: Final = 8
_HEAD_DIM: Final = 128
_TOKENS: Final = 128

Uses = Callable[[torch.device, torch.dtype], Iterator[object]]


class FirstUses:
    """Threads that use things for the first time. Does nothing without a GPU."""

    def __init__(self, device: Device, dtype: str) -> None:
        self._device = device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._threads = [
            threading.Thread(target=self._run, args=(uses,), name=uses.__name__, daemon=True)
            for uses in (_products, _attention, _layers_and_choices)
            if device.is_cuda
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, *, timeout_s: float = _WAIT_S) -> bool:
        """Until all are done; False when some are late: they go on, and are named in the log."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                log.warning("first uses of %s take over %s s", thread.name, timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, uses: Uses) -> None:
        try:
            torch.cuda.set_device(self._device.index)
            with torch.inference_mode():
                for _ in uses(self._device.torch_device, self._dtype):
                    pass
            torch.cuda.current_stream().synchronize()
        except Exception as error:  # noqa: BLE001 - see invariant 2
            log.info("first uses of %s: %r", uses.__name__, error)


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[object]:
    rows = torch.zeros(_ROWS, _WIDTH, device=device, dtype=dtype)
    yield F.linear(rows, torch.zeros(_WIDTH, _WIDTH, device=device, dtype=dtype))


def _attention(device: torch.device, dtype: torch.dtype) -> Iterator[object]:
    queries = torch.zeros(1, 4 * _HEADS, 2 * _TOKENS, _HEAD_DIM, device=device, dtype=dtype)
    keys = torch.zeros(1, _HEADS, _TOKENS, _HEAD_DIM, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 2 * _TOKENS, _TOKENS, device=device, dtype=dtype)
    yield F.scaled_dot_product_attention(queries, keys, keys, attn_mask=mask, enable_gqa=True)


def _layers_and_choices(device: torch.device, dtype: torch.dtype) -> Iterator[object]:
    table = torch.zeros(_WIDTH, _WIDTH, device=device, dtype=dtype)
    ids = torch.zeros(_ROWS, 1, device=device, dtype=torch.int64)
    rows = F.embedding(ids, table)
    yield rows
    wide = rows.to(torch.float32)
    yield (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    yield torch.cat((-rows, rows), dim=-1)
    yield F.silu(rows) * rows + rows
    yield ids.float().cos() * ids.float().sin()
    yield table.index_copy_(0, torch.arange(_ROWS, device=device), rows[:, 0])
    yield torch.where((ids != 0) & (ids <= 1), ids, ids + 1)
    logits = rows[:, 0].to(torch.float32)
    yield torch.stack((logits.argmax(-1), torch.isfinite(logits).all(-1).to(torch.int64)))
    weights = logits.to(torch.float64).div_(ids + 1.0)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    weights = F.pad(weights, (0, _WIDTH))
    yield weights.view(_ROWS, -1, 256).sum(-1)
    yield weights.view(_ROWS, -1, 256)[ids[:, 0], ids[:, 0]]
    yield weights[0][torch.sort(logits[0], descending=True, stable=True).indices]
