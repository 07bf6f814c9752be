"""The units of one group, made from its section of the topology."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cache.protocol import LoadSpec
from engines.contract import ChildRecord
from supervisor.core.deaths import DeathRecord
from supervisor.core.restart import RestartPolicy
from supervisor.runtime.cache import CacheUnit
from supervisor.runtime.engine import EngineUnit
from supervisor.runtime.pulse import BEAT_S, Pulse
from supervisor.runtime.services import Services, policy_of
from supervisor.runtime.zygote import ZygoteUnit
from supervisor.topology.schema import Group

__all__ = ["Members", "members_of"]


@dataclass(frozen=True)
class Members:
    """Who belongs to a group, and the pulses of its helpers."""

    load: LoadSpec
    engines: list[EngineUnit]
    zygote: ZygoteUnit
    zygote_pulse: Pulse
    cache: CacheUnit | None
    cache_pulse: Pulse | None


def members_of(
    services: Services,
    group: Group,
    *,
    deaths: DeathRecord,
    on_change: Callable[[], None],
    on_exit_report: Callable[[ChildRecord], None],
) -> Members:
    """The units; nothing is started yet."""
    load = _load_of(group)
    policy = policy_of(group.failover, device=load.device)
    engines = [
        EngineUnit(services, group, engine, load=load, policy=policy, deaths=deaths,
                   on_change=on_change)
        for engine in group.engines
    ]  # fmt: skip
    zygote = ZygoteUnit(
        services, name=f"zygote-{group.name}", group=group.name, policy=policy,
        on_change=on_change, on_exit_report=on_exit_report,
    )  # fmt: skip
    zygote_pulse = Pulse(zygote, "children", is_starting=lambda: zygote.is_starting,
                         rejoin=lambda: zygote.rejoin(timeout_s=BEAT_S))  # fmt: skip
    cache = _cache_of(services, group, load, policy, on_change)
    cache_pulse = _pulse_of_cache(cache) if cache is not None else None
    return Members(load, engines, zygote, zygote_pulse, cache, cache_pulse)


def _load_of(group: Group) -> LoadSpec:
    model, device = group.model, group.devices[0]
    if model is None:  # servers that load their own weights, and are told of them by their commands
        return LoadSpec(model_path="", dtype="float32", quantization="none", revision="",
                        device=device)  # fmt: skip
    return LoadSpec(
        model_path=str(Path(model.path).resolve()),
        dtype=model.dtype,
        quantization=model.quantization,
        revision=model.revision,
        device=device,
    )


def _cache_of(
    services: Services,
    group: Group,
    load: LoadSpec,
    policy: RestartPolicy,
    on_change: Callable[[], None],
) -> CacheUnit | None:
    """Only where the daemon is ours."""
    if group.cache.mode != "daemon":
        return None
    return CacheUnit(services, group=group.name, load=load, policy=policy,
                     load_timeout_s=group.cache.load_timeout, on_change=on_change)  # fmt: skip


def _pulse_of_cache(cache: CacheUnit) -> Pulse:
    return Pulse(cache, "status", is_starting=lambda: cache.is_in_short_step,
                 rejoin=lambda: cache.rejoin(timeout_s=BEAT_S))  # fmt: skip
