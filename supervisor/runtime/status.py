"""The body of `GET /v1/status`: a stable schema (design section 10); keys are only ever added."""

from collections.abc import Sequence
from typing import Any

import msgspec

from supervisor.core.states import EngineState
from supervisor.observe.devicememory import DeviceMemoryReport
from supervisor.runtime.engine import EngineUnit
from supervisor.runtime.gateways import GatewayFleet
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.worker import GatewayUnit

__all__ = ["engine_status", "gateway_status", "group_status"]

_ROLES = {
    EngineState.PRIMARY: "primary",
    EngineState.STANDBY: "standby",
    EngineState.BATCH: "batch",
    EngineState.FROZEN: "batch",
}


def group_status(
    group: GroupRuntime, device_memory: Sequence[DeviceMemoryReport] = ()
) -> dict[str, Any]:
    """One group, and the memory of its cards; none for a group on the CPU."""
    primary = group.primary
    return {
        "name": group.name,
        "state": group.state,
        "epoch": group.epoch,
        "primary": primary.name if primary is not None else None,
        "standby": [e.name for e in group.standbys],
        "judging_blocked": group.is_blocked,
        "blocked": group.is_blocked,
        "blocked_for_s": round(group.blocked_for_s, 1),
        "unkillable": [e.name for e in group.engines if e.state is EngineState.UNKILLABLE],
        "crashed": group.deaths.crashed,
        "zygote": {
            "wanted": group.has_zygote,
            "pid": group.zygote.pid,
            "ready": group.zygote.is_ready,
            "given_up": group.zygote.starts.has_given_up,
            "trouble": group.zygote.starts.trouble or None,
        },
        "cache": [_cache_status(group)] if group.cache is not None else [],
        "device_memory": [report.as_status() for report in device_memory],
        "engines": [engine_status(e) for e in group.engines],
    }


def _cache_status(group: GroupRuntime) -> dict[str, Any]:
    cache = group.cache
    assert cache is not None  # noqa: S101 - checked by the caller
    status = cache.status
    kv_bytes = status.kv_bytes if status is not None else 0
    return {
        "device": group.load.device,
        "pid": cache.pid,
        "instance": cache.instance,
        "state": status.state if status is not None else "down",
        "weights_bytes": status.weights_bytes if status is not None else 0,
        "kv_bytes": kv_bytes,
        "attached": [c.instance for c in status.attached] if status is not None else [],
        "loads": status.loads if status is not None else 0,
        "donations": status.donations if status is not None else 0,
        "load_s": status.load_s if status is not None else None,
        "progress": msgspec.to_builtins(cache.progress) if cache.progress is not None else None,
        "held_by_supervisor": cache.held is not None,
        "trouble": cache.starts.trouble or None,
    }


def engine_status(engine: EngineUnit) -> dict[str, Any]:
    """One engine."""
    own = engine.status
    return {
        "name": engine.name,
        "kind": engine.settings.kind.value,
        "role": _ROLES.get(engine.state, "none"),
        "configured_role": engine.settings.role.value,
        "state": engine.state.value,
        "verdict": engine.verdict.value,
        "pid": engine.pid,
        "instance": engine.instance or None,
        "restarts": engine.starts.record.restarts,
        "uptime_s": round(engine.uptime_s, 3),
        "exact": own.exact if own is not None else None,
        "resumable": own.resumable if own is not None else None,
        "active": engine.active,
        "queued": engine.queue_depth,
        "parked": own.parked if own is not None else 0,
        "slots": own.slots if own is not None else 0,
        "attach_ms": own.attach_ms if own is not None else None,
        "device_memory": msgspec.to_builtins(own.device_memory) if own is not None else None,
        "error": engine.failure or (own.error if own is not None else "") or None,
        "trouble": engine.starts.trouble or None,
    }


def gateway_status(fleet: GatewayFleet, worker: GatewayUnit) -> dict[str, Any]:
    """One gateway worker."""
    status = worker.status
    return {
        "name": worker.name,
        "pid": worker.pid,
        "state": "ready" if worker.is_connected else "starting",
        "instance": worker.instance or None,
        "restarts": worker.starts.record.restarts,
        "trouble": worker.starts.trouble or None,
        "connections": status.connections if status is not None else 0,
        "address": fleet.address,
    }
