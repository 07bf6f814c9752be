"""Topologies that are simulated: with and without batch, cache daemon, second worker or standby."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.topology.schema import Topology

__all__ = ["Shape", "topology_of"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What varies."""

    workers: int = 1
    standbys: int = 1
    has_batch: bool = True
    has_ladder: bool = False
    has_cache: bool = True
    has_load: bool = True

    @property
    def engines(self) -> list[str]:
        """Names of all engines."""
        return [*"abc"[: 1 + self.standbys], *(["batch"] if self.has_batch else [])]


@functools.cache
def topology_of(shape: Shape) -> Topology:
    """The shape as a checked topology, in a folder that lasts as long as this process."""
    engines: list[dict[str, Any]] = [{"name": "a", "role": "primary"}]
    engines += [{"name": n, "role": "standby"} for n in "bc"[: shape.standbys]]
    if shape.has_batch:
        engines.append({"name": "batch", "role": "batch"})
    batch = {"freeze_when": "queue > 0", "evict_after": "2s", "resume_after": "3s"}
    return Topology.model_validate({
        "version": 1,
        "name": "sim",
        "state_dir": _folder(),
        "gateway": {"listen": "127.0.0.1:0", "workers": shape.workers},
        "groups": [{
            "name": "chat",
            "model": {"path": "m"},
            "cache": {"mode": "daemon" if shape.has_cache else "off", "load_timeout": "20s"},
            "engines": engines,
            "health": {"start_timeout": "20s"},
            "failover": {"intensity": 3, "period": "30s", "max_backoff": "2s"},
            "batch": batch if shape.has_ladder else {},
        }],
    })  # fmt: skip


@functools.cache
def _keeper() -> "tempfile.TemporaryDirectory[str]":
    memory = Path("/dev/shm")  # noqa: S108 - only where start files go fastest; random name below
    return tempfile.TemporaryDirectory(prefix="sim-", dir=memory if memory.is_dir() else None)


@functools.cache
def _folder() -> Path:
    return Path(_keeper().name)
