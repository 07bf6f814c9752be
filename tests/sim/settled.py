"""Whether a system has come to rest: everything whole, or broken for a reason that it states."""

from collections.abc import Iterator
from typing import Final

from supervisor.core.states import EngineState
from supervisor.runtime.group import GroupRuntime
from tests.sim.driver import Life
from tests.sim.fakeengine import FakeEngine
from tests.sim.fakes import FakeCache, FakeGateway
from tests.sim.proc import ProcState
from tests.sim.world import World

__all__ = ["missing_of"]

_S = EngineState
_RESTING: Final = frozenset({_S.PRIMARY, _S.STANDBY, _S.BATCH, _S.FROZEN, _S.EVICTED, _S.FATAL})


def missing_of(world: World, life: Life) -> Iterator[str]:
    """What is not as it should be, as sentences."""
    if life.is_gone or not life.runtime.is_ready:
        yield "the supervisor is not ready"
    if life.operations:
        yield f"operations have not ended: {', '.join(sorted(life.operations.values()))}"
    for group in life.runtime.groups:
        if group.lock.locked() or list(group.tasks):
            yield f"under way: {sorted(group.tasks)}"
        yield from _states(group)
        yield from _ill(world, life, group)
        yield from _gateways(world, life, group)
        yield from _zygote(world, group)
        yield from _cache(world, group)
    yield from _unowned(world, life)


def _states(group: GroupRuntime) -> Iterator[str]:
    """Redundant, unless an engine is FATAL or UNKILLABLE, which the status says."""
    states = {e.name: e.state for e in group.engines}
    is_stuck = _S.UNKILLABLE in states.values()
    for name, state in states.items():
        if state not in _RESTING and not (is_stuck and state in (_S.UNKILLABLE, _S.READY)):
            yield f"{name} is {state}"
    serving = [e for e in group.engines if not e.is_batch and states[e.name] in _RESTING]
    is_lost = all(states[e.name] in (_S.FATAL, _S.EVICTED) for e in serving)
    if group.primary is None and not (is_stuck or is_lost):
        yield "there is no primary"
    if _S.FATAL not in states.values() and not is_stuck and group.state != "redundant":
        yield f"the group is {group.state}"


def _ill(world: World, life: Life, group: GroupRuntime) -> Iterator[str]:
    """Nobody who hangs or answers wrongly is kept, unless BLOCKED or without a successor.

    Nobody is a successor beside one that cannot be killed and might act as primary.

    Wrong is what differs from the group's answer. That comes from the journal as long as an engine
    of the time lives. Where the journal was lost, or everything was stopped (the next start may be
    one with other weights), the first answer counts, the primary's before others: nobody is left
    who could tell, and nobody promised to find out.
    """
    if group.former_golden not in (None, group.golden) and life.has_adopted_an_engine(group):
        yield "the group has forgotten the known answer"
    may_act = any(e.state is _S.UNKILLABLE and e.may_act and not e.is_batch for e in group.engines)
    has_choice = bool(group.standbys) and not group.is_blocked and not may_act
    for unit in group.engines:
        proc = world.find(unit.name)
        is_kept = unit.state is _S.FROZEN or (unit is group.primary and not has_choice)
        if not isinstance(proc, FakeEngine) or is_kept:
            continue
        if proc.is_hung:
            yield f"{proc} hangs"
        if proc.answer != group.golden and not proc.has_work:  # else its canary is skipped
            yield f"{proc} answers wrongly"


def _unowned(world: World, life: Life) -> Iterator[str]:
    away = (_S.EVICTED, _S.FATAL, _S.STOPPED, _S.ABSENT)
    owned = {u.instance for u in life.runtime.units() if u.handle is not None}
    owned -= {e.instance for g in life.runtime.groups for e in g.engines if e.state in away}
    for proc in world.living():
        if proc.instance not in owned and proc.evidence_delay_s is None:
            yield f"nobody owns {proc}, which lives"


def _gateways(world: World, life: Life, group: GroupRuntime) -> Iterator[str]:
    wanted = group.route()
    for unit in life.runtime.fleet.workers:
        worker = world.find(unit.name)
        if not isinstance(worker, FakeGateway) or worker.state is not ProcState.RUNNING:
            yield f"{unit.name} does not run"
        elif worker.route(group.name) != wanted:
            yield f"{unit.name} has other routes: {worker.route(group.name)} not {wanted}"


def _zygote(world: World, group: GroupRuntime) -> Iterator[str]:
    unit = group.zygote
    zygote = world.find(unit.name)
    is_running = zygote is not None and zygote.state is ProcState.RUNNING
    if not unit.starts.has_given_up and not (is_running and unit.is_ready):
        yield "there is no zygote that works"


def _cache(world: World, group: GroupRuntime) -> Iterator[str]:
    unit = group.cache
    if unit is None:
        return
    daemon = world.find(unit.name)
    if not isinstance(daemon, FakeCache) or not daemon.is_serving:
        yield "no cache daemon serves"
    elif unit.held is None:
        yield "the supervisor holds no memory"
