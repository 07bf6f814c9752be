"""What the adapter itself knows as Prometheus metrics; the server's own are at the server."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.contract import EngineStatus

__all__ = ["StatusCollector"]

_GAUGES: Final = {
    "active": "Requests that the server computes.",
    "queued": "Requests that wait at the server.",
    "epoch": "Epoch of the last role.",
}


class StatusCollector(Collector):
    """A few words of the engine's status, made anew at each scrape."""

    def __init__(self, group: str, status: Callable[[], EngineStatus]) -> None:
        self._group = group
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All families; zeros from the first scrape."""
        status = self._status()
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"understudy_command_{name}", text,
                                       labels=["group", "engine"])  # fmt: skip
            family.add_metric([self._group, status.name], float(getattr(status, name)))
            yield family
