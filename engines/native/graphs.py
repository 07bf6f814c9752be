"""CUDA graphs of serving steps: one launch in place of a thousand.

A graph is captured for one KV memory, one kind of step and one attended length. Its inputs are
buffers at fixed addresses; its results land in buffers shared by all graphs of a kind, so a result
is valid until the next step of that kind. All graphs share one memory pool: they never run at
the same time.

Capturing computes nothing, so a standby captures against KV memory that it may only read; the one
step before it, which loads kernels and makes attention plans, runs with no row active.

A capture takes some 80 ms for 32 layers. The step that is captured may raise
`StepAbandonedError` between two layers, when something more urgent came: nothing is kept then.

WARNING: the driver gives up the capture under way when a graph is destroyed meanwhile, whoever
does it. So no garbage is collected during a capture, and a graph that was given up is destroyed
as soon as its capture has ended.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from engines.native.kv import KvMemoryView
from engines.native.logits import summarise

__all__ = ["StepAbandonedError", "StepGraphs", "StepKind"]

StepKind = Literal["decode", "prefill"]
_ERROR_MODE: Final = "thread_local"
"""Other threads of the process may ask the driver something during a capture."""


class StepAbandonedError(Exception):
    """Something more urgent came: the capture, or the canary, can be begun again later."""


@dataclass(frozen=True, slots=True)
class _Key:
    kind: StepKind
    memory: int
    attended_tokens: int


@dataclass(slots=True)
class _Results:
    """Where all graphs of one kind put what they computed."""

    logits: torch.Tensor
    summary: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = self.logits.shape[0]
        self.summary = torch.zeros(2, rows, dtype=torch.int64, device=self.logits.device)


class StepGraphs:
    """Captured steps of one model. Used by the model thread alone."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        def results(rows: int) -> _Results:
            return _Results(torch.zeros(rows, vocabulary, device=device))

        self._results = {"decode": results(slots), "prefill": results(1)}
        # The memory is kept beside each graph: a graph holds addresses, and its key an identity.
        self._graphs: dict[_Key, tuple[torch.cuda.CUDAGraph, KvMemoryView]] = {}
        self._launched: set[_Key] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def logits(self, kind: StepKind) -> torch.Tensor:
        """Where all graphs of a kind put their logits: `[rows, vocabulary]`, zeros at first."""
        return self._results[kind].logits

    def has(self, kind: StepKind, kv: KvMemoryView, attended_tokens: int) -> bool:
        """Whether this step is captured."""
        return _Key(kind, id(kv), attended_tokens) in self._graphs

    def waits_for_launch(self, kind: StepKind, kv: KvMemoryView, attended_tokens: int) -> bool:
        """Whether this step is captured and has never run."""
        key = _Key(kind, id(kv), attended_tokens)
        return key in self._graphs and key not in self._launched

    def capture(
        self,
        kind: StepKind,
        kv: KvMemoryView,
        attended_tokens: int,
        *,
        rehearse: Callable[[], object],
        step: Callable[[], torch.Tensor],
    ) -> None:
        """Capture `step`, which gives float32 logits, after one `rehearse`.

        Raises:
            StepAbandonedError: `step` gave up; as if it had never been begun.
        """
        results = self._results[kind]
        rehearse()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _nothing_collected(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode=_ERROR_MODE),
            ):
                logits = step()
                results.logits.copy_(logits)
                results.summary.copy_(summarise(logits))
        except StepAbandonedError:
            graph.reset()
            raise
        self._graphs[_Key(kind, id(kv), attended_tokens)] = (graph, kv)

    def replay(
        self, kind: StepKind, kv: KvMemoryView, attended_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Order one step; its logits and their summary, in buffers that the next one reuses."""
        key = _Key(kind, id(kv), attended_tokens)
        graph, _ = self._graphs[key]
        graph.replay()
        self._launched.add(key)
        results = self._results[kind]
        return results.logits, results.summary


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage waits: among it may be a graph, or memory of a pool that is captured into."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
