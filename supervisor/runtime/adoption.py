"""A new supervisor finds what the last one left: it adopts what answers, and ends the rest.

Processes are found by the marker in their environment, so a journal that is lost or behind does
not matter; what they are is read from their instance name, who they are is proven by pid, start
time and an answer at their own socket. Streams are not touched: the epoch goes on from the
highest that anybody reports.

Invariants
    1. Nothing is started, and nobody promoted, before everything found was looked at: a port or a
       socket is never "taken" by our own worker.
    2. At most one primary per group is adopted, the one of the highest epoch; any other is fenced,
       and until that is proven nobody is promoted.
    3. While automation is paused, nothing that was found is signalled.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from signal import SIGCONT
from typing import TYPE_CHECKING, Final

from cache.errors import UnderstudyError
from supervisor.core.states import EngineState, Facts, StateEvent
from supervisor.runtime.lack import is_our_lack
from supervisor.runtime.machine import LeftBehind
from supervisor.runtime.strays import unit_name
from supervisor.runtime.unit import Unit

if TYPE_CHECKING:
    from supervisor.runtime.engine import EngineUnit
    from supervisor.runtime.group import GroupRuntime
    from supervisor.runtime.supervisor import SupervisorRuntime
    from supervisor.runtime.worker import GatewayUnit

__all__ = ["Adoption", "adopt"]

log = logging.getLogger(__name__)

_ANSWER_S: Final = 2.0
_REFUSED_S: Final = 10.0  # by a socket whose backlog is full, perhaps for a moment only
_RETRY_S: Final = 0.1


@dataclass
class Adoption:
    """What was found and what became of it."""

    adopted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


async def adopt(runtime: "SupervisorRuntime") -> Adoption:
    """Adopt every process that carries the marker of this state directory.

    What does not answer, is not fit or belongs to nobody is handed on: to the group, which fences
    it like any other engine, to its pulse, or to the strays. Nothing here raises for one process.
    """
    found = await runtime.services.machine.left_behind(runtime.services.state_id)
    outcome = Adoption()
    taken: dict[Unit, LeftBehind] = {}
    for left in sorted(found, key=lambda f: f.process.start_ticks, reverse=True):
        unit = _unit_of(runtime, left.instance)
        if left.instance in runtime.services.attested:
            continue  # cannot be killed and can do no harm, the operator says
        if unit is None or unit in taken:
            runtime.strays.add(left)
        else:
            taken[unit] = left
    outcome.ended += await runtime.strays.end_all()
    await asyncio.gather(*(_take(runtime, u, left, outcome) for u, left in taken.items()))
    for group in runtime.groups:
        await _settle_roles(group, outcome)
    return outcome


def _unit_of(runtime: "SupervisorRuntime", instance: str) -> Unit | None:
    """The unit of an instance name, which is `<unit name>-<8 hex>`."""
    return next((u for u in runtime.units() if u.name == unit_name(instance)), None)


async def _take(
    runtime: "SupervisorRuntime", unit: Unit, left: LeftBehind, outcome: Adoption
) -> None:
    services = runtime.services
    if left.is_stopped and not services.is_paused:
        # A stopped process can neither answer nor be judged.
        services.machine.signal(left.process, SIGCONT)
    try:
        await _take_over(runtime, unit, left)
    except (UnderstudyError, OSError) as error:
        log.warning("%s does not answer: %s", left.instance, error)
        unit.emit("not_adopted", f"{unit.name} does not answer: {error}", pid=left.process.pid)
        return
    outcome.adopted.append(left.instance)
    unit.emit("adopted", f"{unit.name} was adopted", pid=left.process.pid, instance=left.instance)


async def _take_over(runtime: "SupervisorRuntime", unit: Unit, left: LeftBehind) -> None:
    """Own it and connect to it.

    What we lack ourselves is not its fault, and is waited for as long as it lives: it goes on
    without us, whereas one that nobody has looked at could only be ended.
    """
    deadline = runtime.services.patience.deadline(_REFUSED_S)
    has_told = False
    while True:
        try:
            unit.take(left.process, left.instance)
            await runtime.join(unit, timeout_s=_ANSWER_S)
        except (UnderstudyError, OSError) as error:
            is_over = unit.died.done() or runtime.stop_requested.is_set()
            is_ours = is_our_lack(error)
            if is_over or not (is_ours or (isinstance(error, OSError) and not deadline.has_passed)):
                raise
            if is_ours and not has_told:
                has_told = True
                unit.emit("adoption_waits", f"{unit.name} cannot be adopted yet: {error}",
                          pid=left.process.pid)  # fmt: skip
            await asyncio.sleep(_RETRY_S)
        else:
            return


async def _settle_roles(group: "GroupRuntime", outcome: Adoption) -> None:
    """Give every engine that was found the state that its own report proves."""
    there = [e for e in group.engines if e.handle is not None]
    if any(e.is_alive and e.status is not None for e in there):
        group.golden = group.former_golden  # a wrong engine that answers first must not set it
    if serving := _primaries(there):  # who serves sets the answer where no journal has it
        await _is_fit(group, serving[-1])
    fit = await asyncio.gather(*(_is_fit(group, e) for e in there))
    # Only now: what the last supervisor left in a connection was read meanwhile.
    await asyncio.gather(*(_ask_epochs(w) for w in group.fleet.workers if w.is_connected))
    primaries = _primaries(there)
    reported = [e.status.epoch for e in there if e.is_alive and e.status is not None]
    for engine, is_fit in zip(there, fit, strict=True):
        engine.apply(StateEvent.ADOPTED)
        if is_fit and engine.is_alive and (engine not in primaries[:-1]):
            _confirm(engine)
        elif _is_frozen_by_order(engine):
            engine.apply(StateEvent.BATCH_CONFIRMED)
            engine.apply(StateEvent.FROZEN)
        else:
            engine.apply(StateEvent.CONDEMNED)  # the group fences it once it is open
            outcome.ended.append(engine.instance)
    for engine in group.engines:
        was_sent_away = engine.former_state == EngineState.EVICTED
        if engine.handle is None and was_sent_away and (engine.is_held or outcome.adopted):
            engine.apply(StateEvent.EVICTION_COMPLETED)  # and it stays away
    # A living primary has seen every epoch that matters. Without one, an epoch may have died with
    # its engine: then the journal's ceiling is above it.
    ceiling = 0 if group.primary is not None else group.epoch_ceiling
    group.epoch = max(ceiling, *reported, *group.fleet_epochs(), 0)
    await _raise_epoch(group)


async def _ask_epochs(worker: "GatewayUnit") -> None:
    try:
        await worker.refresh(timeout_s=_ANSWER_S)
    except UnderstudyError as error:
        log.warning("%s does not say which epochs it knows: %s", worker.name, error)


def _primaries(engines: "list[EngineUnit]") -> "list[EngineUnit]":
    """Those that say they are primary, lowest epoch first."""
    alive = [(e.status.epoch, e) for e in engines
             if e.is_alive and e.status is not None and e.status.role == "primary"]  # fmt: skip
    return [e for _, e in sorted(alive, key=lambda pair: pair[0])]


async def _raise_epoch(group: "GroupRuntime") -> None:
    """Bring a primary that is behind the gateways up to their epoch, or nobody would reach it."""
    primary = group.primary
    if primary is None or primary.role_epoch >= group.epoch:
        return
    try:
        await primary.assume("primary", group.epoch, timeout_s=_ANSWER_S)
    except UnderstudyError as error:
        log.warning("%s did not take epoch %d: %s", primary.name, group.epoch, error)
        return  # it is silent or wrong; progress will judge it
    primary.role_epoch = group.epoch


async def _is_fit(group: "GroupRuntime", engine: "EngineUnit") -> bool:
    """Whether it is past its start and answers the canary as the group does.

    Its status is read behind that: an order that was given before the canary has its effect now.
    """
    if not engine.is_alive or engine.status is None:
        return False
    if engine.status.state not in ("ready", "standby", "serving"):
        return False
    is_right = await _answers_rightly(group, engine)
    status = await engine.refresh(timeout_s=_ANSWER_S) or engine.status
    if is_right is None:  # it may be busy; progress will judge it
        return status is not None and status.role == "primary"
    return is_right


async def _answers_rightly(group: "GroupRuntime", engine: "EngineUnit") -> bool | None:
    """Whether it gives the group's answer; None when it gives none."""
    try:
        await engine.reach(timeout_s=_ANSWER_S)
        return await group.chores.prove(engine, timeout_s=_ANSWER_S)
    except UnderstudyError:
        return None


def _is_frozen_by_order(engine: "EngineUnit") -> bool:
    """Whether it cannot be asked because it was frozen by order, and it may not be woken now.

    By the operator's order, or by the ladder's, which goes on with it behind the pause. It is
    connected to, and says its epoch, when it is thawed.
    """
    return (
        engine.services.is_paused
        and engine.former_state == EngineState.FROZEN
        and engine.is_alive
        and engine.is_stopped_by_signal
    )


def _confirm(engine: "EngineUnit") -> None:
    assert engine.status is not None  # noqa: S101 - checked by the caller
    engine.role_epoch = engine.status.epoch
    match engine.status.role:
        case "primary":
            engine.apply(StateEvent.PRIMARY_CONFIRMED, Facts(predecessor_fenced=True))
        case "standby":
            engine.apply(StateEvent.STANDBY_CONFIRMED)
        case "batch":
            engine.apply(StateEvent.BATCH_CONFIRMED)
        case "none":
            log.info("%s has no role yet", engine.name)
