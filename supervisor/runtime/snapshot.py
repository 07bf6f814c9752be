"""The snapshot of a group that its next decision is taken from: the border to the pure core."""

from typing import TYPE_CHECKING

from supervisor.core.decide import EngineView, GroupSnapshot
from supervisor.core.verdict import Verdict

if TYPE_CHECKING:
    from supervisor.runtime.engine import EngineUnit
    from supervisor.runtime.group import GroupRuntime

__all__ = ["snapshot_of"]


def snapshot_of(group: "GroupRuntime") -> GroupSnapshot:
    """Everything that a decision depends on. What is under way may not be begun again."""
    zygote, cache, is_free = group.zygote, group.cache, group.tasks.is_free
    pair = [e.name for e in group.engines if not e.is_batch]
    return GroupSnapshot(
        name=group.name,
        epoch=group.epoch,
        engines=tuple(_view_of(e) for e in group.engines),
        preferred_primary=group.preferred,
        is_paused=group.services.is_paused,
        is_judging_blocked=group.is_blocked,
        has_stray=group.strays.has_engine_of(pair),
        zygote_is_ready=zygote.is_ready,
        zygote_is_silent=group.zygote_pulse.is_silent and is_free("end zygote"),
        zygote_may_start=group.has_zygote
        and not zygote.is_alive
        and not zygote.starts.has_given_up
        and zygote.starts.may_start
        and is_free("zygote"),
        zygote_has_given_up=not group.has_zygote or zygote.starts.has_given_up,
        cache_is_silent=group.cache_pulse is not None
        and group.cache_pulse.is_silent
        and is_free("end cache"),
        cache_may_start=cache is not None
        and cache.needs_start
        and cache.starts.may_start
        and is_free("cache"),
    )


def _view_of(engine: "EngineUnit") -> EngineView:
    return EngineView(
        name=engine.name,
        is_batch=engine.is_batch,
        state=engine.state,
        verdict=_sound_verdict(engine),
        may_start=engine.starts.may_start,
        has_given_up=engine.starts.has_given_up,
        is_proven=engine.is_proven,
        is_being_fenced=engine.is_being_fenced,
        is_gone=engine.is_lost,
        may_act=engine.may_act,
        is_held=engine.is_held,
    )


def _sound_verdict(engine: "EngineUnit") -> Verdict:
    """A judgement from before a stall of ours is void until the engine was looked at again."""
    is_judgement = engine.verdict is Verdict.HUNG
    is_void = is_judgement and engine.services.lag.stalled_since(engine.judged_ns)
    return Verdict.BUSY if is_void else engine.verdict
