"""Topologies that are simulated: with and without batch, cache daemon, second worker or standby."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.topology.schema import Topology

__all__ = ["NEIGHBOURS", "Shape", "group_of", "serving_of", "topology_of"]

NEIGHBOURS: Final = ("x", "y")
_ROLES: Final = ("primary", "standby")


@dataclass(frozen=True, slots=True)
class Shape:
    """What varies."""

    workers: int = 1
    standbys: int = 1
    has_batch: bool = True
    has_ladder: bool = False
    has_cache: bool = True
    has_load: bool = True
    has_neighbour: bool = False  # a second group: a pair that shares nothing but the workers

    @property
    def engines(self) -> list[str]:
        """Names of all engines."""
        pair = NEIGHBOURS if self.has_neighbour else ()
        return [*"abc"[: 1 + self.standbys], *(["batch"] if self.has_batch else []), *pair]

    @property
    def helpers(self) -> list[str]:
        """Names of everything else."""
        groups = ["chat", "side"] if self.has_neighbour else ["chat"]
        caches = [f"cache-{g}" for g in groups] if self.has_cache else []
        return [*(f"zygote-{g}" for g in groups), "gateway-0", *caches]


def group_of(engine: str) -> str:
    """The group that an engine belongs to."""
    return "side" if engine in NEIGHBOURS else "chat"


def serving_of(engine: str) -> tuple[str, ...]:
    """The engines that may serve in the group of an engine."""
    return NEIGHBOURS if engine in NEIGHBOURS else ("a", "b", "c")


@functools.cache
def topology_of(shape: Shape) -> Topology:
    """The shape as a checked topology, in a folder that lasts as long as this process."""
    engines: list[dict[str, Any]] = [{"name": "a", "role": "primary"}]
    engines += [{"name": n, "role": "standby"} for n in "bc"[: shape.standbys]]
    if shape.has_batch:
        engines.append({"name": "batch", "role": "batch"})
    batch = {"freeze_when": "queue > 0", "evict_after": "2s", "resume_after": "3s"}
    groups = [_group("chat", engines, shape) | {"batch": batch if shape.has_ladder else {}}]
    if shape.has_neighbour:
        pair = [{"name": n, "role": r} for n, r in zip(NEIGHBOURS, _ROLES, strict=True)]
        groups.append(_group("side", pair, shape))
    return Topology.model_validate({
        "version": 1,
        "name": "sim",
        "state_dir": _folder(),
        "gateway": {"listen": "127.0.0.1:0", "workers": shape.workers},
        "groups": groups,
    })  # fmt: skip


def _group(name: str, engines: list[dict[str, Any]], shape: Shape) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"path": "m"},
        "cache": {"mode": "daemon" if shape.has_cache else "off", "load_timeout": "20s"},
        "engines": engines,
        "health": {"start_timeout": "20s"},
        "failover": {"intensity": 3, "period": "30s", "max_backoff": "2s"},
    }


@functools.cache
def _keeper() -> "tempfile.TemporaryDirectory[str]":
    memory = Path("/dev/shm")  # noqa: S108 - only where start files go fastest; random name below
    return tempfile.TemporaryDirectory(prefix="sim-", dir=memory if memory.is_dir() else None)


@functools.cache
def _folder() -> Path:
    return Path(_keeper().name)
