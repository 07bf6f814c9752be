"""Device memory of a group: what the cache daemon holds, and what the driver says of the card.

The first two figures are ours and always right; total, free and what a process uses are the
driver's, asked from time to time (`supervisor.runtime.devicememory`).
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["STALE_S", "DeviceMemoryCollector", "DeviceMemoryReport", "EngineUse"]

STALE_S: Final = 30.0
"""Older than this, what the driver said is history: nobody could be asked since."""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """One engine as the driver reports it. What it shares is not in it."""

    name: str
    pid: int | None
    used_bytes: int | None  # None: the driver does not list it, or gives no figure


@dataclass(frozen=True, slots=True)
class DeviceMemoryReport:
    """One card of one group. None: not known."""

    device: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    engines: tuple[EngineUse, ...] = ()
    others_bytes: int | None = None  # processes that are not of this supervisor
    age_s: float | None = None  # of what the driver says: its last good answer
    error: str | None = None  # why there is no newer answer

    def as_status(self) -> dict[str, Any]:
        """For `GET /v1/status`."""
        return asdict(self)


class DeviceMemoryCollector(Collector):
    """Takes reports; gives families named `understudy_device_*`.

    Groups on the CPU have no series. A figure that is not known has none either: zero free bytes
    would be a lie, and so would yesterday's, so without an answer the driver's figures vanish.
    """

    def __init__(self, cards: Iterable[tuple[str, str]]) -> None:
        """`cards` are the groups that are on a card, each with its device."""
        self._reports = {(group, device): DeviceMemoryReport(device) for group, device in cards}
        self._lock = threading.Lock()

    def update(self, group: str, report: DeviceMemoryReport) -> None:
        """The newest about this group and `report.device`."""
        with self._lock:
            self._reports[group, report.device] = report

    def collect(self) -> Iterator[Metric]:
        """All families, also before the first report."""
        up = GaugeMetricFamily(
            "understudy_device_memory_up",
            "1 while nvidia-smi says how much memory of the card is used.",
            labels=["group", "device"],
        )
        parts = GaugeMetricFamily(
            "understudy_device_memory_bytes",
            "Memory of the card: total, free, others (processes that are not ours) as the driver "
            "reports it; weights and kv as the cache daemon holds them. Absent while unknown.",
            labels=["group", "device", "part"],
        )
        engines = GaugeMetricFamily(
            "understudy_device_engine_memory_bytes",
            "Memory of the card that an engine uses, as the driver reports it: its context, "
            "buffers and private KV, not what it shares. Absent while unknown.",
            labels=["group", "device", "engine"],
        )
        with self._lock:
            reports = dict(self._reports)
        for (group, device), report in reports.items():
            age_s = report.age_s
            is_up = report.error is None and age_s is not None and age_s <= STALE_S
            up.add_metric([group, device], float(is_up))
            for part, value in _parts(report, is_up=is_up).items():
                if value is not None:
                    parts.add_metric([group, device, part], value)
            for engine in report.engines if is_up else ():
                if engine.used_bytes is not None:
                    engines.add_metric([group, device, engine.name], engine.used_bytes)
        yield from (up, parts, engines)

    def describe(self) -> Iterator[Metric]:
        """Names only, for the registry's check on duplicates."""
        return self.collect()


def _parts(report: DeviceMemoryReport, *, is_up: bool) -> dict[str, int | None]:
    ours = {"weights": report.weights_bytes, "kv": report.kv_bytes}
    if not is_up:
        return ours
    return ours | {
        "total": report.total_bytes,
        "free": report.free_bytes,
        "others": report.others_bytes,
    }
