"""Prints `docs/METRICS.md` from the registry: `python -m supervisor.observe.metrics_doc > FILE`."""

import sys

from prometheus_client.core import Metric

from supervisor.observe.devicememory import DeviceMemoryReport, EngineUse
from supervisor.observe.metrics import Metrics
from supervisor.topology.schema import Topology

__all__ = ["render_metrics_doc"]

_HEAD = """\
# Metrics

Printed from the registry by `python -m supervisor.observe.metrics_doc`; do not edit.

`GET /metrics` on the admin address. Every series of the topology's names is there from the first
scrape, but those of device memory: groups on a GPU have them, while they are known. Counters of
gateway workers are summed per place (`gateway-0`), across restarts of its process, so they never
go backwards while the supervisor lives. State sets are one-hot: exactly one state has the value 1.
Durations are seconds, sizes are bytes.

| metric | type | labels | meaning |
|---|---|---|---|
"""

_EXAMPLE = {
    "version": 1,
    "name": "example",
    "state_dir": "run",
    "groups": [
        {
            "name": "chat",
            "model": {"path": "model"},
            "engines": [
                {"name": "a", "role": "primary"},
                {"name": "b", "role": "standby"},
                {"name": "c", "role": "batch"},
            ],
        }
    ],
}
_SHOWN_SUFFIX = {"counter": "_total"}


def render_metrics_doc() -> str:
    """The whole document."""
    metrics = Metrics(Topology.model_validate(_EXAMPLE))
    metrics.admin_request("GET", "/v1/status", 200, 0.0)  # its labels come with the first request
    engines = (EngineUse("a", 1, 1),)  # those of device memory come with the first answer
    memory = DeviceMemoryReport("cuda:0", total_bytes=1, engines=engines, age_s=0.0)
    metrics.set_device_memory("chat", memory)
    families = sorted(metrics.registry.collect(), key=lambda family: family.name)
    return _HEAD + "".join(_row(family) for family in families)


def _row(family: Metric) -> str:
    name = family.name + _SHOWN_SUFFIX.get(family.type, "")
    labels: dict[str, None] = {}
    for sample in family.samples:
        labels.update(dict.fromkeys(key for key in sample.labels if key != "le"))
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |\n"


if __name__ == "__main__":
    sys.stdout.write(render_metrics_doc())
