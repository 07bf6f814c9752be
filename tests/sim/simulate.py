"""Runs a schedule from the first start to the last check, and says what was wrong."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final

from tests.sim.clock import SimLoop, SpinningError, VirtualTime
from tests.sim.driver import Keeper, Life, Objections, check_stopped, name_of
from tests.sim.faults import Applier
from tests.sim.schedule import LAST_FAULT_S, Schedule
from tests.sim.settled import missing_of
from tests.sim.world import World

__all__ = ["Outcome", "owned_task", "simulate", "stop_life", "unwind"]

SETTLE_S: Final = 150.0
"""Bound of recovery after the last fault: a start (20 s + 20 s), a canary (30 s), back-off."""

_STEP_S: Final = 0.5
_STOP_S: Final = 60.0
_LASTING: Final = frozenset({"Life._run", "_every", "SupervisorRuntime._keep_house"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run was like."""

    schedule: Schedule
    violations: tuple[str, ...]
    history: tuple[str, ...]
    virtual_s: float
    promotions: int


def simulate(schedule: Schedule) -> Outcome:
    """Run it. The same schedule gives the same outcome."""
    clock = VirtualTime()
    world = World(schedule.seed, clock)
    loop = SimLoop(clock)
    loop.set_task_factory(owned_task)
    objections = Objections(world)
    logger = logging.getLogger("supervisor")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [objections], False
    try:
        loop.set_exception_handler(lambda _, what: world.judge.breach(f"unhandled: {what}"))
        loop.run_until_complete(_run(world, loop, schedule))
    except SpinningError as error:
        world.judge.breach(str(error))
    finally:
        unwind(loop)
        logger.handlers, logger.propagate = before
        loop.close()
        world.close()
    judge = world.judge
    return Outcome(
        schedule, tuple(dict.fromkeys(judge.violations)), tuple(judge.sentences()),
        clock.elapsed_s, judge.promotions,
    )  # fmt: skip


def unwind(loop: SimLoop) -> None:
    """Nothing of this run may wake up in the next one."""
    for _ in range(5):
        if not (pending := asyncio.all_tasks(loop)):
            return
        for task in pending:
            task.cancel()
        with contextlib.suppress(SpinningError):
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))


def owned_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Every task belongs to the supervisor in whose context it was made."""
    from tests.sim.driver import LIFE

    context = options.get("context")
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    life = context.get(LIFE) if context is not None else LIFE.get()
    if life is not None:
        life.tasks.add(task)
    return task


async def _run(world: World, loop: SimLoop, schedule: Schedule) -> None:
    world.has_load = schedule.shape.has_load
    if schedule.shape.has_ladder:
        world.judge.operator_touched.add("batch")
    keeper = Keeper(world, loop, schedule.shape)
    try:
        await _play(world, keeper, schedule)
    finally:
        for life in keeper.lives:
            life.runtime.fleet.close()


async def _play(world: World, keeper: Keeper, schedule: Schedule) -> None:
    applier = Applier(world, keeper)
    for step in schedule.steps:
        world.clock.after(step.at_s, lambda step=step: applier.apply(step))  # type: ignore[misc]
    last_s = max((s.at_s for s in schedule.steps), default=0.0)
    await asyncio.sleep(min(last_s, LAST_FAULT_S) + 1.5)
    await _a_supervisor(keeper)
    applier.heal(wakes=schedule.heals)
    missing = await _settle(world, keeper)
    if missing:
        world.judge.breach(f"{SETTLE_S:g} s after the last fault: " + "; ".join(missing))
    await _check_quiet(world, keeper)
    await stop_life(world, keeper)


async def _a_supervisor(keeper: Keeper) -> None:
    """The next one, when one has just been killed, or is being stopped."""
    for _ in range(600):
        if not keeper.life.services.is_stopping and not keeper.life.task.done():
            return
        await asyncio.sleep(0.1)


async def _settle(world: World, keeper: Keeper) -> list[str]:
    """Wait until everything is whole again, and stays so for a moment; else say what is not."""
    deadline = world.clock.monotonic() + SETTLE_S
    whole = 0
    missing: list[str] = []
    while world.clock.monotonic() < deadline:
        await asyncio.sleep(_STEP_S)
        missing = list(missing_of(world, keeper.life))
        whole = 0 if missing else whole + 1
        if whole >= 3:
            return []
    return missing or ["it does not come to rest"]


async def _check_quiet(world: World, keeper: Keeper) -> None:
    """At rest: no task beside the lasting ones, counters equal the events."""
    life = keeper.life
    for _ in range(40):  # calls have deadlines of up to ten seconds
        extra = sorted(
            name_of(t) for t in life.tasks if not t.done() and name_of(t) not in _LASTING
        )
        if not [e for e in extra if e != "Unit._bury"]:
            break
        await asyncio.sleep(0.37)
    else:
        world.judge.breach(f"tasks that go on at rest: {', '.join(extra)}")
    _check_counters(world, life)


def _check_counters(world: World, life: Life) -> None:
    events = life.events.of_this_life()
    world.judge.check_events(events, first_seq=life.events.first + 1)
    kinds = [e["kind"] for e in events]
    counts = life.metrics.counts
    pairs = (
        ("failover", "done", kinds.count("failover_completed")),
        ("switchover", "done", kinds.count("switchover_completed")),
        ("eviction", "done", kinds.count("evicted")),
    )
    for name, outcome, expected in pairs:
        if counts[name, outcome] != expected:
            world.judge.breach(
                f"{expected} events of {name}, but a counter of {counts[name, outcome]}"
            )


async def stop_life(world: World, keeper: Keeper) -> None:
    """An orderly stop leaves nothing behind."""
    life = keeper.life
    keeper.is_closing = True
    world.judge.is_paused = False
    life.runtime.stop_requested.set()
    done, _ = await asyncio.wait([life.task], timeout=_STOP_S)
    if not done:
        world.judge.breach(f"the stop takes longer than {_STOP_S:g} s")
    elif (error := life.task.exception()) is not None:
        world.judge.breach(f"the stop failed: {error!r}")
    else:
        await asyncio.sleep(0)
        check_stopped(world, life)
    life.kill()
    await life.gone()
