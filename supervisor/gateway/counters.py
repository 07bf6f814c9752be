"""Counters of one worker, per model id: plain numbers, copied into `GroupCounters` on request."""

from bisect import bisect_left
from collections import Counter

from supervisor.gateway.protocol import OVERHEAD_BUCKETS_S, TTFT_BUCKETS_S, GroupCounters

__all__ = ["Counters", "Histogram", "ModelCounters"]


class Histogram:
    """Counts per bucket; the last bound is infinite."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * len(bounds_s)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self.sum_s += value_s

    @property
    def cumulative(self) -> list[int]:
        """How many values lie at or below each bound."""
        total = 0
        return [total := total + count for count in self._counts]


class ModelCounters:
    """What happened to the requests of one model since the worker started."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.requests = 0
        self.streams_open = 0
        self.parked = 0
        self.resumed_slot = 0
        self.resumed_replay = 0
        self.retried = 0
        self.tokens = 0
        self.completed = 0
        self.cancelled = 0
        self.failed = 0
        self.poisoned = 0
        self.refused: Counter[str] = Counter()
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.overhead = Histogram(OVERHEAD_BUCKETS_S)

    def snapshot(self) -> GroupCounters:
        """The numbers now."""
        return GroupCounters(
            model=self.model,
            requests=self.requests,
            streams_open=self.streams_open,
            parked=self.parked,
            resumed_slot=self.resumed_slot,
            resumed_replay=self.resumed_replay,
            retried=self.retried,
            tokens=self.tokens,
            completed=self.completed,
            cancelled=self.cancelled,
            failed=self.failed,
            poisoned=self.poisoned,
            refused=dict(self.refused),
            ttft_buckets=self.ttft.cumulative,
            ttft_sum_s=self.ttft.sum_s,
            overhead_buckets=self.overhead.cumulative,
            overhead_sum_s=self.overhead.sum_s,
        )


class Counters:
    """All models that were ever in the table, and "" for requests that named none of them.

    Bounded by the table: a client cannot add a model by asking for it.
    """

    def __init__(self) -> None:
        self._models = {"": ModelCounters("")}

    def of(self, model_id: str) -> ModelCounters:
        """The counters of a model in the table; made at the first call."""
        counters = self._models.get(model_id)
        if counters is None:
            counters = self._models[model_id] = ModelCounters(model_id)
        return counters

    def snapshot(self) -> list[GroupCounters]:
        """All numbers now."""
        return [counters.snapshot() for counters in self._models.values()]
