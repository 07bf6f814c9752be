"""A new supervisor finds what the last one left: it adopts what answers, and ends the rest.

Processes are found by the marker in their environment, so a journal that is lost or behind does
not matter; what they are is read from their instance name, who they are is proven by pid, start
time and an answer at their own socket. Streams are not touched: the epoch goes on from the
highest that anybody reports.

Invariants
    1. Nothing is started before everything found was adopted or proven dead: a port or a socket
       is never "taken" by our own worker.
    2. At most one primary per group is adopted, the one of the highest epoch; any other is fenced.
"""

import logging
import os
from dataclasses import dataclass, field
from signal import SIGCONT
from typing import TYPE_CHECKING, Final

import msgspec

from cache.errors import UnderstudyError
from engines.contract import Descriptors
from supervisor.core.states import EngineState, Facts, StateEvent
from supervisor.process import Marker, ProcessId, ProcessTree
from supervisor.runtime.machine import LeftBehind
from supervisor.runtime.unit import Unit

if TYPE_CHECKING:
    from supervisor.runtime.engine import EngineUnit
    from supervisor.runtime.group import GroupRuntime
    from supervisor.runtime.supervisor import SupervisorRuntime

__all__ = ["Adoption", "adopt"]

log = logging.getLogger(__name__)

_ANSWER_S: Final = 2.0
_FENCE_S: Final = 5.0


@dataclass
class Adoption:
    """What was found and what became of it."""

    adopted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


async def adopt(runtime: "SupervisorRuntime") -> Adoption:
    """Adopt or end every process that carries the marker of this state directory."""
    found = await runtime.services.machine.left_behind(runtime.services.state_id)
    outcome = Adoption()
    units: dict[str, Unit] = {}
    for left in found:
        unit = _unit_of(runtime, left.instance)
        if unit is None or unit.name in units:
            await _end(runtime, left.process, left.instance, outcome)
        else:
            units[unit.name] = unit
            await _take(runtime, unit, left, outcome)
    for group in runtime.groups:
        await _settle_roles(group, outcome)
        await _recover_memory(group)
    return outcome


def _unit_of(runtime: "SupervisorRuntime", instance: str) -> Unit | None:
    """The unit of an instance name, which is `<unit name>-<8 hex>`."""
    name = instance.rpartition("-")[0]
    units: list[Unit] = [*runtime.fleet.workers]
    for group in runtime.groups:
        units += [group.zygote, *group.engines, *([group.cache] if group.cache else [])]
    return next((u for u in units if u.name == name), None)


async def _take(
    runtime: "SupervisorRuntime", unit: Unit, left: LeftBehind, outcome: Adoption
) -> None:
    process, instance = left.process, left.instance
    if left.is_stopped:
        runtime.services.machine.signal(
            process, SIGCONT
        )  # a stopped process can neither answer nor be judged
    try:
        unit.take(process, instance)
        await runtime.join(unit, timeout_s=_ANSWER_S)
    except UnderstudyError as error:
        log.warning("%s does not answer (%s), ending it", instance, error)
        unit.release()
        await _end(runtime, process, instance, outcome)
        return
    outcome.adopted.append(instance)
    unit.emit("adopted", f"{unit.name} was adopted", pid=process.pid, instance=instance)


async def _end(
    runtime: "SupervisorRuntime", process: ProcessId, instance: str, outcome: Adoption
) -> None:
    """Kill a process that no unit of the topology owns, or that does not answer."""
    marker = Marker(runtime.services.state_id, instance)
    await runtime.services.machine.fence(ProcessTree(process, marker), timeout_s=_FENCE_S)
    runtime.services.paths.forget(instance)
    outcome.ended.append(instance)
    runtime.services.events.append(
        "stray_ended", f"{instance} was left by a former supervisor and was ended", pid=process.pid
    )


async def _settle_roles(group: "GroupRuntime", outcome: Adoption) -> None:
    """Give every adopted engine the state that its own report proves."""
    alive = [e for e in group.engines if e.is_alive and e.status is not None]
    reported = [e.status.epoch for e in alive if e.status is not None] + group.fleet_epochs()
    primaries = sorted(
        (e for e in alive if e.status is not None and e.status.role == "primary"),
        key=lambda e: e.status.epoch if e.status is not None else 0,
    )
    for engine in alive:
        is_fit = await _is_fit(group, engine)
        if not is_fit or (engine in primaries and engine is not primaries[-1]):
            engine.apply(StateEvent.ADOPTED)
            await group.chores.fence_engine(engine)
            outcome.ended.append(engine.instance)
            continue
        _confirm(engine)
    # A living primary has seen every epoch that matters. Without one, an epoch may have died with
    # its engine: then the journal's ceiling is above it.
    ceiling = 0 if group.primary is not None else group.epoch_ceiling
    group.epoch = max(ceiling, *reported, 0)
    await _raise_epoch(group)


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
    """Whether it is past its start and answers the canary as the group does."""
    if engine.status is None or engine.status.state not in ("ready", "standby", "serving"):
        return False
    try:
        return await group.chores.prove(engine, timeout_s=_ANSWER_S)
    except UnderstudyError:
        return bool(engine.status.role == "primary")  # it may be busy; progress will judge it


def _confirm(engine: "EngineUnit") -> None:
    assert engine.status is not None  # noqa: S101 - checked by the caller
    engine.apply(StateEvent.ADOPTED)
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


async def _recover_memory(group: "GroupRuntime") -> None:
    """Hold the memory again: from the daemon, or, when that is gone too, from an engine."""
    if group.cache is None:
        return
    if group.cache.is_serving:
        await group.cache.hold()
        return
    for engine in group.engines:
        if not engine.is_alive or engine.is_batch or engine.state is EngineState.ABSENT:
            continue
        try:
            raw, fds = await engine.call_with_fds("descriptors", timeout_s=_ANSWER_S)
        except UnderstudyError as error:
            log.warning("%s gave no descriptors: %s", engine.name, error)
            continue
        try:
            group.cache.take_donation(msgspec.json.decode(raw, type=Descriptors), fds)
        except msgspec.MsgspecError:
            for fd in fds:
                os.close(fd)
            raise
        return
