"""What the cache daemons hold, as families of our registry.

Loads and donations are totals of one daemon process; a restarted one begins at zero, so what its
predecessors counted stays in as an offset, as for gateway workers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.protocol import CacheState, CacheStatus

__all__ = ["CacheCollector"]

_STATES: Final = get_args(CacheState)


@dataclass(slots=True)
class _Daemon:
    """One device of a group: the daemon that serves it, and what earlier ones had counted."""

    status: CacheStatus | None = None
    is_up: bool = False
    loads_offset: int = 0
    donations_offset: int = 0


class CacheCollector(Collector):
    """Takes `CacheStatus`; gives families named `understudy_cache_*`, `_weights_*`, `_kv_*`."""

    def __init__(self, devices: Iterable[tuple[str, str]]) -> None:
        self._daemons = {key: _Daemon() for key in devices}

    def update(self, group: str, status: CacheStatus) -> None:
        """A report of the daemon of this group and `status.device`."""
        daemon = self._daemons.setdefault((group, status.device), _Daemon())
        last = daemon.status
        if last is not None and last.instance != status.instance:
            daemon.loads_offset += last.loads
            daemon.donations_offset += last.donations
        daemon.status = status
        daemon.is_up = True

    def down(self, group: str) -> None:
        """The daemon of this group is gone. Its memory may live on, in other hands."""
        for (owner, _), daemon in self._daemons.items():
            if owner == group:
                daemon.is_up = False

    def collect(self) -> Iterator[Metric]:
        """All families, also before the first report."""
        rows = [(group, device, d) for (group, device), d in list(self._daemons.items())]
        yield _state_set(rows)
        yield from _sizes(rows)
        yield from _totals(rows)

    def describe(self) -> Iterator[Metric]:
        """Names only, for the registry's check on duplicates."""
        return self.collect()


_Rows = list[tuple[str, str, _Daemon]]


def _state_set(rows: _Rows) -> Metric:
    family = GaugeMetricFamily(
        "understudy_cache_state",
        "State of the cache daemon, one-hot.",
        labels=["group", "device", "state"],
    )
    for group, device, daemon in rows:
        state = daemon.status.state if daemon.status and daemon.is_up else "down"
        for name in (*_STATES, "down"):
            family.add_metric([group, device, name], float(name == state))
    return family


def _sizes(rows: _Rows) -> Iterator[Metric]:
    up = _gauge("cache_up", "1 while the cache daemon serves: new engines can attach.")
    attached = _gauge("cache_attached", "Clients that hold a registration.")
    weights = _gauge("weights_bytes", "Memory of the one copy of the weights.")
    kv = _gauge("kv_bytes", "Memory of the KV arena of the serving pair.")
    load = _gauge("weights_load_seconds", "How long the last load from disk took.")
    progress = _gauge("weights_load_progress_ratio", "Share of the weights that is loaded.")
    for group, device, daemon in rows:
        status, key = daemon.status, [group, device]
        is_serving = daemon.is_up and status is not None and status.state == "serving"
        up.add_metric(key, float(is_serving))
        attached.add_metric(key, len(status.attached) if status and daemon.is_up else 0)
        weights.add_metric(key, status.weights_bytes if status else 0)
        kv.add_metric(key, status.kv_bytes if status else 0)
        load.add_metric(key, (status.load_s or 0.0) if status else 0.0)
        progress.add_metric(key, _progress(status))
    yield from (up, attached, weights, kv, load, progress)


def _progress(status: CacheStatus | None) -> float:
    if status is None:
        return 0.0
    if status.state == "serving":
        return 1.0
    done = status.progress
    return done.bytes_done / done.bytes_total if done and done.bytes_total else 0.0


def _totals(rows: _Rows) -> Iterator[Metric]:
    loads = CounterMetricFamily(
        "understudy_cache_loads", "Loads from disk.", labels=["group", "device"]
    )
    donations = CounterMetricFamily(
        "understudy_cache_donations",
        "Times a new daemon was handed the memory of a dead one.",
        labels=["group", "device"],
    )
    for group, device, daemon in rows:
        status, key = daemon.status, [group, device]
        loads.add_metric(key, daemon.loads_offset + (status.loads if status else 0))
        donations.add_metric(key, daemon.donations_offset + (status.donations if status else 0))
    yield loads
    yield donations


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"understudy_{name}", text, labels=["group", "device"])
