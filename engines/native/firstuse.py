"""First uses of a GPU's kernels, in threads beside the rest of a start.

A kernel is loaded when it is first used, some milliseconds to a tenth of a second each: 0.6 s of
an engine's start beside another that decodes. Loading needs no order, and the driver loads several
at once, so errands that use one or two kernels each are taken, longest first, by whichever thread
is free. They begin behind the attach and not sooner: beside it they doubled its time.

What is used here is what a step and a choice of tokens use beside matrix products and attention,
on tensors of no weight. An errand too few costs milliseconds later, one too many costs them here;
neither changes what is computed. Products and attention are left to the model thread, which uses
them meanwhile in the model's own shapes: their libraries keep handles and plans by thread.

Invariants
    1. Nothing is captured before `wait` says that all is done.
    2. An error here is nobody's: who needs what failed will meet it, and say so.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from engines.native.device import Device

__all__ = ["FirstUses"]

log = logging.getLogger(__name__)

_THREADS: Final = 8
_WAIT_S: Final = 10.0
_WIDTH: Final = 1024
_ROWS: Final = 8
_BLOCK: Final = 256

Errand = Callable[[], object]


class FirstUses:
    """Threads that use things for the first time. Does nothing without a GPU."""

    def __init__(self, device: Device, dtype: str) -> None:
        self._device = device
        self._errands: queue.SimpleQueue[Errand] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if not device.is_cuda:
            return
        for errand in _Samples(device.torch_device, getattr(torch, dtype)).errands():
            self._errands.put(errand)
        for number in range(_THREADS):
            name = f"first-uses-{number}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def wait(self, *, timeout_s: float = _WAIT_S) -> bool:
        """Until all are done; False when some are late: they go on, and the log says so."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        late = sum(thread.is_alive() for thread in self._threads)
        if late:
            log.warning("first uses: %d threads take over %s s", late, timeout_s)
        return not late

    def _run(self) -> None:
        torch.cuda.set_device(self._device.index)
        with torch.inference_mode():
            while True:
                try:
                    errand = self._errands.get_nowait()
                except queue.Empty:
                    break
                try:
                    errand()
                except Exception as error:  # noqa: BLE001 - see invariant 2
                    log.info("first use: %r", error)


class _Samples:
    """Small tensors of every kind, made without a kernel, and what is done with them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        def zeros(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=of).to(device)  # filled on the host: no kernel

        self._device = device
        self._dtype = dtype
        self._rows = zeros(_ROWS, _WIDTH, of=dtype)
        self._wide = zeros(_ROWS, _WIDTH, of=torch.float32)
        self._exact = zeros(_ROWS, _WIDTH, of=torch.float64)
        self._ids = zeros(_ROWS, 1, of=torch.int64)
        self._flags = zeros(_ROWS, 1, of=torch.bool)

    def errands(self) -> tuple[Errand, ...]:
        """Longest first, as measured on an H200 beside an engine that decodes."""
        return (
            lambda: F.embedding(self._ids, self._rows),
            lambda: self._wide.mean(-1, keepdim=True),
            lambda: torch.where(self._flags, self._ids, self._ids),
            lambda: self._wide.pow(2),
            lambda: torch.sort(self._wide[0], descending=True, stable=True).indices,
            lambda: self._exact.amax(-1, keepdim=True),
            lambda: self._exact.view(_ROWS, -1, _BLOCK).sum(-1),
            lambda: self._exact.view(_ROWS, -1, _BLOCK)[self._ids[:, 0], self._ids[:, 0]],
            lambda: self._wide.argmax(-1),
            lambda: torch.isfinite(self._wide).all(-1).to(torch.int64),
            lambda: (self._wide.to(self._dtype), self._rows.to(torch.float32)),
            lambda: (self._rows * self._rows, self._wide * self._wide),
            lambda: (self._rows + self._rows, self._wide + 1e-5, self._ids + 1),
            lambda: torch.rsqrt(self._wide),
            lambda: torch.cat((-self._rows, self._rows), dim=-1),
            lambda: self._rows.clone().index_copy_(0, self._ids[:1, 0], self._rows[:1]),
            lambda: ((self._ids != 0) & (self._ids <= 1), self._ids.clamp(min=0)),
            lambda: (self._wide.to(torch.float64), self._ids.to(torch.float32)),
            lambda: F.silu(self._rows),
            lambda: (self._wide.cos(), self._wide.sin()),
            lambda: F.pad(self._exact.div(1.0).sub(0.0).exp(), (0, _WIDTH)),
            lambda: torch.stack((self._ids, self._ids)),
            lambda: torch.zeros(_ROWS, device=self._device, dtype=self._dtype),
            lambda: torch.zeros(_ROWS, device=self._device, dtype=torch.int64),
        )
