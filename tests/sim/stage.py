"""The stage of stories: a world, its supervisor, and short words for what is done to both."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from supervisor.admin.controller import Operation
from supervisor.observe.journal import JournalState
from tests.sim.clock import SimLoop, VirtualTime
from tests.sim.driver import Keeper, Objections
from tests.sim.fakeengine import FakeEngine
from tests.sim.proc import Proc
from tests.sim.shapes import Shape
from tests.sim.simulate import owned_task, stop_life, unwind
from tests.sim.world import World

__all__ = ["Stage", "play"]

Body = Callable[["Stage"], Coroutine[Any, Any, None]]


class Stage:
    """The world, the supervisor that lives now, and short words for both."""

    def __init__(self, world: World, keeper: Keeper) -> None:
        self.world = world
        self.keeper = keeper

    @property
    def group(self) -> Any:
        return self.keeper.life.group

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.keeper.life.runtime.status()["groups"][0]
        return found

    def kinds(self) -> list[str]:
        return [e["kind"] for e in self.keeper.disk.events]

    def engine(self, name: str) -> Proc:
        proc = self.world.find(name)
        assert proc is not None
        return proc

    async def until(self, condition: Callable[[], object], what: str, *, within_s: float) -> None:
        end = self.world.clock.monotonic() + within_s
        while not condition():
            if self.world.clock.monotonic() >= end:
                raise AssertionError(f"{what}: not within {within_s:g} s")
            await asyncio.sleep(0.02)

    async def whole(self, *, within_s: float = 30.0) -> None:
        await self.until(
            lambda: self.keeper.life.runtime.is_ready and self.group.state == "redundant",
            "redundancy", within_s=within_s,
        )  # fmt: skip

    async def order(self, work: Coroutine[Any, Any, Operation]) -> Operation:
        self.world.judge.operator_touched.update(("a", "b", "c", "batch"))
        done: Operation = await self.keeper.life.create_task(work)
        return done

    async def crash_supervisor(self, *, loses_journal: bool = False) -> None:
        before = self.keeper.life
        await asyncio.sleep(1.5)  # the janitor has told the journal
        before.kill()
        if loses_journal:
            self.keeper.disk.state = JournalState()
        await self.until(
            lambda: self.keeper.life is not before and self.group.is_open,
            "the next supervisor", within_s=30,
        )  # fmt: skip

    async def hang_primary(self, *, is_answered: bool) -> None:
        """The primary hangs; with `is_answered` somebody else takes over within two seconds."""
        hung = self.engine(self.group.primary.name)
        assert isinstance(hung, FakeEngine)
        hung.is_blemished = "hang"
        hung.hang()
        if is_answered:
            await self._successor_of(hung)
            await self.whole()

    async def kill_primary(self) -> None:
        """The primary is killed, and somebody else takes over."""
        killed = self.engine(self.group.primary.name)
        killed.is_blemished = "kill"
        killed.kill()
        await self._successor_of(killed)

    async def _successor_of(self, old: Proc) -> None:
        await self.until(
            lambda: self.group.primary and self.group.primary.instance != old.instance,
            "a failover", within_s=3,
        )  # fmt: skip


def play(body: Body, *, shape: Shape | None = None, seed: int = 1) -> World:
    clock = VirtualTime()
    world = World(seed, clock)
    loop = SimLoop(clock)
    loop.set_task_factory(owned_task)
    logger = logging.getLogger("supervisor")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Objections(world)], False

    async def run() -> None:
        stage = Stage(world, Keeper(world, loop, shape or Shape(has_batch=False)))
        await stage.whole()
        await body(stage)
        await stop_life(world, stage.keeper)

    try:
        loop.set_exception_handler(lambda _, what: world.judge.breach(f"unhandled: {what}"))
        loop.run_until_complete(run())
    except AssertionError as error:
        error.add_note("\n".join(world.judge.sentences()))
        raise
    finally:
        unwind(loop)
        logger.handlers, logger.propagate = before
        loop.close()
        world.close()
    assert world.judge.violations == [], "\n".join(world.judge.sentences())
    return world
