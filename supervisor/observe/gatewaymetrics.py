"""Counters of the gateway workers, which are other processes, as families of our registry.

A worker reports totals since its own start, as `GatewayStatus`. Label `worker` is the worker's
place (`gateway-0`), which outlives its processes, and a counter must never go backwards: when a
new instance takes the place, what the old one had counted last stays in as an offset. Dashboards
keep one series per place. What an old instance still says after it was replaced is ignored.

Everything here is called on the event loop, except `collect`, which renders in another thread and
reads values that are replaced as a whole.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from supervisor.gateway.protocol import (
    OVERHEAD_BUCKETS_S,
    TTFT_BUCKETS_S,
    GatewayStatus,
    GroupCounters,
)

__all__ = ["GatewayCollector"]

_REMEMBERED_INSTANCES: Final = 16

_COUNTERS: Final = (
    ("requests", "Requests received."),
    ("retried", "Requests sent to an engine again before their first byte."),
    ("tokens", "Tokens passed on to clients."),
    ("completed", "Answers that were completed."),
    ("cancelled", "Requests whose client went away."),
    ("failed", "Streams that ended with an error event."),
    ("poisoned", "Requests ended because engines kept crashing while they had them."),
)
_GAUGES: Final = (
    ("streams_open", "Streams under way."),
    ("parked", "Requests that wait for a primary."),
)


@dataclass(slots=True)
class _Worker:
    """One place: its current process, and what earlier ones had counted."""

    status: GatewayStatus | None = None
    is_up: bool = False
    totals: dict[str, GroupCounters] = field(default_factory=dict)  # by model; offsets included
    offsets: dict[str, GroupCounters] = field(default_factory=dict)
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_INSTANCES))


class GatewayCollector(Collector):
    """Takes what workers report; gives families named `understudy_gateway_*`."""

    def __init__(
        self, workers: Iterable[str], models: Iterable[str], groups: Iterable[str] = ()
    ) -> None:
        self._groups = tuple(groups)
        self._models = tuple(models)
        self._workers = {name: self._new_worker() for name in workers}

    def update(self, worker: str, status: GatewayStatus) -> None:
        """A report of the process that holds this place."""
        place = self._workers.setdefault(worker, self._new_worker())
        if status.instance in place.retired:
            return
        if place.status is not None and place.status.instance != status.instance:
            place.retired.append(place.status.instance)
            place.offsets = place.totals
        totals = {model: GroupCounters(model) for model in self._models} | place.offsets
        for counters in status.groups:
            offset = place.offsets.get(counters.model)
            totals[counters.model] = counters if offset is None else _add(counters, offset)
        place.totals = totals
        place.status = status
        place.is_up = True

    def down(self, worker: str) -> None:
        """The process that held this place is gone."""
        place = self._workers.setdefault(worker, self._new_worker())
        place.is_up = False

    def collect(self) -> Iterator[Metric]:
        """All families, also before the first report."""
        workers = dict(self._workers)
        yield from self._worker_gauges(workers)
        rows = [(name, w.is_up, c) for name, w in workers.items() for c in w.totals.values()]
        yield from _model_gauges(rows)
        yield from _model_counters(rows)
        yield from _histograms(rows)

    def describe(self) -> Iterator[Metric]:
        """Names only, for the registry's check on duplicates."""
        return self.collect()

    def _new_worker(self) -> _Worker:
        return _Worker(totals={model: GroupCounters(model) for model in self._models})

    def _worker_gauges(self, workers: dict[str, _Worker]) -> Iterator[Metric]:
        up = _gauge("up", "1 while the worker's process lives and reports.", "worker")
        connections = _gauge("connections", "Client connections.", "worker")
        tasks = _gauge("tasks", "Unfinished tasks of the worker's event loop.", "worker")
        lag = _gauge("loop_lag_seconds", "How late the worker's event loop runs.", "worker")
        epoch = _gauge("epoch", "Epoch of the route in force.", "worker", "group")
        for name, worker in workers.items():
            live = worker.status if worker.is_up else None
            up.add_metric([name], float(worker.is_up))
            connections.add_metric([name], live.connections if live else 0)
            tasks.add_metric([name], live.tasks if live else 0)
            lag.add_metric([name], live.loop_lag_s if live else 0)
            epochs = dict.fromkeys(self._groups, 0) | (live.epochs if live else {})
            for group, value in epochs.items():
                epoch.add_metric([name, group], value)
        yield from (up, connections, tasks, lag, epoch)


_Rows = list[tuple[str, bool, GroupCounters]]


def _model_gauges(rows: _Rows) -> Iterator[Metric]:
    for attribute, text in _GAUGES:
        gauge = _gauge(attribute, text, "worker", "model")
        for worker, is_up, counters in rows:
            gauge.add_metric([worker, counters.model], getattr(counters, attribute) * is_up)
        yield gauge


def _model_counters(rows: _Rows) -> Iterator[Metric]:
    for attribute, text in _COUNTERS:
        family = _counter(attribute, text, "worker", "model")
        for worker, _, counters in rows:
            family.add_metric([worker, counters.model], getattr(counters, attribute))
        yield family
    resumed = _counter(
        "resumed", "Streams that went on after a cut, by how.", "worker", "model", "source"
    )
    refused = _counter(
        "refused", "Requests answered with an error status.", "worker", "model", "status"
    )
    for worker, _, counters in rows:
        resumed.add_metric([worker, counters.model, "slot"], counters.resumed_slot)
        resumed.add_metric([worker, counters.model, "replay"], counters.resumed_replay)
        for status in sorted({"429", "503"} | counters.refused.keys()):
            count = counters.refused.get(status, 0)
            refused.add_metric([worker, counters.model, status], count)
    yield resumed
    yield refused


def _histograms(rows: _Rows) -> Iterator[Metric]:
    labels = ["worker", "model"]
    ttft = HistogramMetricFamily(
        "understudy_gateway_time_to_first_token_seconds",
        "From the request's last byte to the answer's first token.",
        labels=labels,
    )
    overhead = HistogramMetricFamily(
        "understudy_gateway_overhead_seconds",
        "The worker's own share of the time to the first token.",
        labels=labels,
    )
    for worker, _, c in rows:
        key = [worker, c.model]
        ttft.add_metric(key, _buckets(TTFT_BUCKETS_S, c.ttft_buckets), c.ttft_sum_s)
        overhead.add_metric(key, _buckets(OVERHEAD_BUCKETS_S, c.overhead_buckets), c.overhead_sum_s)
    yield ttft
    yield overhead


def _buckets(bounds_s: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Cumulative buckets with their bounds; zeros where a worker has not reported any."""
    padded = counts if len(counts) == len(bounds_s) else [0] * len(bounds_s)
    names = ["+Inf" if bound == float("inf") else repr(float(bound)) for bound in bounds_s]
    return [(name, float(count)) for name, count in zip(names, padded, strict=True)]


def _add(now: GroupCounters, offset: GroupCounters) -> GroupCounters:
    """The counters of a process on top of what its predecessors counted; gauges are its own."""
    added = {name: getattr(now, name) + getattr(offset, name) for name, _ in _COUNTERS}
    for name in ("resumed_slot", "resumed_replay", "ttft_sum_s", "overhead_sum_s"):
        added[name] = getattr(now, name) + getattr(offset, name)
    return GroupCounters(
        model=now.model,
        streams_open=now.streams_open,
        parked=now.parked,
        refused={
            status: now.refused.get(status, 0) + offset.refused.get(status, 0)
            for status in now.refused.keys() | offset.refused.keys()
        },
        ttft_buckets=_add_lists(now.ttft_buckets, offset.ttft_buckets),
        overhead_buckets=_add_lists(now.overhead_buckets, offset.overhead_buckets),
        **added,
    )


def _add_lists(now: list[int], offset: list[int]) -> list[int]:
    if not now or not offset:
        return now or offset
    return [a + b for a, b in zip(now, offset, strict=False)]


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"understudy_gateway_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"understudy_gateway_{name}", text, labels=labels)
