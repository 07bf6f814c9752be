"""What the model thread tells about itself: counters for `/metrics` and the progress page.

Written by the model thread alone, read by others without locks; a reader may see a step half
counted, which only matters to someone who expects sums to agree to the last unit.
"""

import time
from dataclasses import dataclass, field
from typing import Final

from engines.contract import DeviceMemory, ProgressPage

__all__ = ["STEP_BUCKETS_S", "Counters", "Meter"]

STEP_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    decode_steps: int = 0
    prefill_chunks: int = 0
    tokens: int = 0  # committed, replayed ones included
    replayed_tokens: int = 0
    replay_differences: int = 0  # forced tokens that the model would not have chosen
    requests: int = 0
    resumes_from_slot: int = 0
    resumes_by_replay: int = 0
    adopted_slots: int = 0
    expired_slots: int = 0
    refused_requests: int = 0
    failed_requests: int = 0
    canaries: int = 0
    step_seconds: float = 0.0
    step_buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))


class Meter:
    """Counts, and keeps the progress page up to date. Used by the model thread."""

    def __init__(self, page: ProgressPage) -> None:
        self.counters = Counters()
        self.active = 0
        self.parked = 0
        self.queued = 0
        self.paused = 0
        self.device_memory: DeviceMemory | None = None
        self._page = page
        self._started_ns = 0
        self._runnable = 0
        self._posted = 0
        self._handled = 0

    def step_begins(self) -> None:
        """A decode step or prefill chunk starts now."""
        self._started_ns = time.monotonic_ns()
        self._page.set("step_started_ns", self._started_ns)

    def step_ends(self, *, is_prefill: bool) -> None:
        """It ended; its tokens are committed."""
        now_ns = time.monotonic_ns()
        counters = self.counters
        if is_prefill:
            counters.prefill_chunks += 1
        else:
            counters.decode_steps += 1
        duration_s = (now_ns - self._started_ns) * 1e-9
        counters.step_seconds += duration_s
        for index, bound_s in enumerate(STEP_BUCKETS_S):  # noqa: B007 - index is used below
            if duration_s <= bound_s:
                break
        else:
            index = len(STEP_BUCKETS_S)
        counters.step_buckets[index] += 1
        page = self._page
        page.set("tokens", counters.tokens)
        page.set("step_finished_ns", now_ns)
        page.set("steps", counters.decode_steps + counters.prefill_chunks)

    def command_posted(self) -> None:
        """The model thread was given something to do. Called by the thread that listens."""
        self._posted += 1
        self._page.set("posted", self._posted)

    def command_handled(self) -> None:
        """It has carried it out."""
        self._handled += 1
        self._page.set("handled", self._handled)

    def publish(
        self, *, active: int, parked: int, queued: int, paused: int, free_slots: int
    ) -> None:
        """How many rows and requests there are now."""
        if active != self.active:
            self._page.set("active", active)
        if queued != self.queued:
            self._page.set("queued", queued)
        runnable = active - paused + min(queued, free_slots)
        if runnable != self._runnable:
            self._page.set("runnable", runnable)
            self._runnable = runnable
        self.active, self.parked, self.queued, self.paused = active, parked, queued, paused

    def set_epoch(self, epoch: int) -> None:
        """The epoch after `assume`."""
        self._page.set("epoch", epoch)
