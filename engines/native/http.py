"""Health and metrics over HTTP, on a Unix socket: no port to steal, none to reach a fenced engine.

`/health` answers from the event loop: it says that the process lives and what it thinks of
itself. Whether the model still moves is the progress page's and the canary's business.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cache.wire import listen_unix
from engines.contract import EngineStatus
from engines.native.faults import Faults
from engines.native.meter import STEP_BUCKETS_S, Meter

__all__ = ["HttpServer", "MeterCollector"]

_HEALTHY: Final = frozenset({"ready", "standby", "serving"})
_BACKLOG: Final = 8
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


class HttpServer:
    """Serves `/health` and `/metrics` at a Unix socket."""

    def __init__(
        self,
        path: Path,
        group: str,
        status: Callable[[], EngineStatus],
        meter: Callable[[], Meter],
        faults: Faults,
    ) -> None:
        self._path = path
        self._faults = faults
        self._status = status
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(MeterCollector(group, status, meter))
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Bind and serve."""
        await self._runner.setup()
        # asyncio accepts as often as `backlog` says, and logs a traceback for each that fails.
        await web.SockSite(self._runner, listen_unix(self._path), backlog=_BACKLOG).start()

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()
        self._path.unlink(missing_ok=True)

    async def _health(self, _request: web.Request) -> web.Response:
        is_true = await self._faults.health()
        status = self._status()
        is_healthy = is_true and status.state in _HEALTHY
        body = {"state": status.state, "role": status.role, "epoch": status.epoch}
        return web.json_response(body, status=200 if is_healthy else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
