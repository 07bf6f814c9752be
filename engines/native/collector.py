"""The model thread's counters as Prometheus metrics, and how the engine is."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engines.contract import EngineStatus
from engines.native.meter import STEP_BUCKETS_S, Meter

__all__ = ["MeterCollector"]

_PREFIX: Final = "understudy_native_"

_COUNTERS: Final = {
    "decode_steps": "Decode steps of the full batch.",
    "prefill_chunks": "Prefill chunks.",
    "tokens": "Tokens committed to slots, replayed ones included.",
    "replayed_tokens": "Tokens that clients had already and that were forced again.",
    "replay_differences": "Forced tokens that the model would not have chosen.",
    "requests": "Requests that were queued.",
    "resumes_from_slot": "Streams continued from a slot, nothing recomputed.",
    "resumes_by_replay": "Streams continued by prefill and forced decode.",
    "adopted_slots": "Slots taken over from a predecessor.",
    "expired_slots": "Parked slots that nobody resumed in time.",
    "refused_requests": "Requests refused because the queue was full.",
    "failed_requests": "Requests ended because of non-finite numbers.",
    "canaries": "Canaries answered.",
}
_GAUGES: Final = {
    "active": "Rows that compute.",
    "parked": "Rows that wait for their gateway.",
    "queued": "Requests that wait for a slot.",
    "paused": "Rows whose gateway does not read.",
}
_DEVICE_GAUGES: Final = {
    "reserved_bytes": "GPU memory of this process beside the shared arenas and its context.",
    "free_bytes": "GPU memory that nobody uses.",
    "total_bytes": "GPU memory there is.",
}


class MeterCollector(Collector):
    """The model thread's counters as metric families, made anew at each scrape."""

    def __init__(
        self, group: str, status: Callable[[], EngineStatus], meter: Callable[[], Meter]
    ) -> None:
        self._group = group
        self._status = status
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        """All families; zeros from the first scrape."""
        meter, status = self._meter(), self._status()
        labels, values = ["group", "engine"], [self._group, status.name]
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            counter.add_metric(values, getattr(meter.counters, name))
            yield counter
        for name, text in _GAUGES.items():
            yield _gauge(name, text, labels, values, getattr(meter, name))
        yield _gauge("slots", "Slots of this engine.", labels, values, status.slots)
        yield _gauge("epoch", "Epoch of the last role.", labels, values, status.epoch)
        yield _gauge("exact", "1 when resumes are bit-exact.", labels, values, status.exact)
        yield _gauge(
            "cache_registered", "1 when known to the cache daemon.", labels, values,
            status.cache_registered,
        )  # fmt: skip
        for name, text in _DEVICE_GAUGES.items():
            amount = getattr(meter.device_memory, name, 0)
            yield _gauge(f"device_{name}", text, labels, values, amount)
        yield _steps(meter, labels, values)


def _gauge(
    name: str, text: str, labels: list[str], values: list[str], value: float
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    family.add_metric(values, float(value))
    return family


def _steps(meter: Meter, labels: list[str], values: list[str]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        _PREFIX + "step_seconds", "Duration of decode steps and prefill chunks.", labels=labels
    )
    counts = list(meter.counters.step_buckets)
    bounds: Iterable[str] = (*(str(bound) for bound in STEP_BUCKETS_S), "+Inf")
    cumulative, buckets = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        cumulative += count
        buckets.append((bound, float(cumulative)))
    family.add_metric(values, buckets, meter.counters.step_seconds)
    return family
