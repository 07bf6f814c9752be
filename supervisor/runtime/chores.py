"""Chores of one group: the slow, independent steps that bring processes and redundancy back.

None of them is on the path of a failover. A chore reports by moving the unit's state or verdict;
what follows from that is decided anew.
"""

import logging
from typing import TYPE_CHECKING, Final, assert_never

from engines.contract import Descriptors
from supervisor.core.decide import (
    AssignBatch,
    AssignStandby,
    Chore,
    EndCache,
    EndZygote,
    Fence,
    Freeze,
    GiveUp,
    StartCache,
    StartEngine,
    StartZygote,
)
from supervisor.core.states import ALIVE, EngineState, Facts, StateEvent
from supervisor.core.verdict import Verdict
from supervisor.errors import ConnectionClosedError, RemoteError, UnderstudyError
from supervisor.process import FenceNotProvenError

if TYPE_CHECKING:
    from supervisor.runtime.engine import EngineUnit
    from supervisor.runtime.group import GroupRuntime

__all__ = ["FENCE_S", "GroupChores"]

log = logging.getLogger(__name__)

FENCE_S: Final = 2.0
_DONOR_S: Final = 2.0
_ASSUME_S: Final = 5.0
_ZYGOTE_START_S: Final = 120.0
_CANARY_S: Final = 30.0
_FIRST_TOKEN_NS: Final = 1_000_000_000
_REFUSALS_AT_START: Final = 3  # of the machine, before a first start is given up


class GroupChores:
    """What can be done for the units of one group."""

    def __init__(self, group: "GroupRuntime") -> None:
        self._group = group
        self._cut_cache = ""  # the instance whose connection broke while it was brought up

    def begin(self, chore: Chore) -> None:
        """Begin what was decided, beside everything else."""
        run, engine = self._group.tasks.run, self._group.engine
        match chore:
            case StartCache():
                run("cache", self.start_cache())
            case EndCache():
                run("end cache", self.end_cache())
            case StartZygote():
                run("zygote", self.start_zygote())
            case EndZygote():
                run("end zygote", self.end_zygote())
            case StartEngine(name):
                run(name, self.start_engine(engine(name)))
            case AssignStandby(name):
                run(name, self.assign(engine(name), StateEvent.STANDBY_CONFIRMED))
            case AssignBatch(name):
                run(name, self.assign(engine(name), StateEvent.BATCH_CONFIRMED))
            case Fence(name):
                run(f"fence {name}", self.fence_engine(engine(name)))
            case Freeze(name):
                engine(name).freeze()
            case GiveUp(name):
                self._give_up(engine(name))
            case _:
                assert_never(chore)

    def _give_up(self, unit: "EngineUnit") -> None:
        unit.apply(StateEvent.GIVEN_UP)
        self._group.fail_start(unit.give_up_error())

    async def start_cache(self) -> None:
        """Bring the cache daemon to serve; engines register with it again."""
        cache = self._group.cache
        assert cache is not None  # noqa: S101 - decided from it
        if self._is_paused():
            return
        try:
            if cache.held is None and not cache.is_serving:
                await self.collect_memory()
                if self._is_paused():
                    return  # meanwhile; an engine that is slow to answer takes seconds
            await cache.ensure_serving()
        except UnderstudyError as error:
            cache.emit("cache_failed", f"{cache.name}: {error}")
            if isinstance(error, RemoteError) or cache.starts.has_given_up:
                self._group.fail_start(error)  # else it is a death or a silence: once more
            if isinstance(error, ConnectionClosedError) and self._cut_cache != cache.instance:
                self._cut_cache = cache.instance
                return  # once that says nothing about the daemon: its pulse connects again
            if cache.is_alive and not self._is_paused():
                await cache.end(timeout_s=FENCE_S)
            return
        for engine in self._group.engines:
            if engine.is_connected:
                engine.in_background(engine.call("cache.rejoin", timeout_s=_ASSUME_S))

    async def end_cache(self) -> None:
        """Kill a daemon that does not answer."""
        assert self._group.cache is not None  # noqa: S101 - decided from it
        if self._is_paused():
            return
        self._group.cache.emit("cache_silent", f"{self._group.cache.name} does not answer")
        await self._group.cache.end(timeout_s=FENCE_S)

    async def collect_memory(self) -> None:
        """Take the memory from an engine, when daemon and former supervisor are both gone."""
        cache = self._group.cache
        assert cache is not None  # noqa: S101 - asked for it
        for engine in self._group.engines:
            if not engine.is_alive or not engine.is_connected or engine.is_batch:
                continue
            try:
                found, fds = await engine.given("descriptors", Descriptors, timeout_s=_DONOR_S)
            except UnderstudyError as error:
                log.warning("%s gave no descriptors: %s", engine.name, error)
                continue
            cache.take_donation(found, fds)
            return

    async def start_zygote(self) -> None:
        """Start the zygote."""
        if self._is_paused():
            return
        try:
            await self._group.zygote.start(self._group.load, timeout_s=_ZYGOTE_START_S)
        except UnderstudyError as error:
            self._group.zygote.emit("zygote_failed", f"{self._group.zygote.name}: {error}")
            if self._group.zygote.starts.record.troubles >= _REFUSALS_AT_START:
                self._group.fail_start(error)
            if self._group.zygote.starts.has_given_up:
                self._group.zygote.emit(
                    "zygote_given_up", "engines start cold from now on, which takes seconds"
                )
            if self._group.zygote.is_alive and not self._is_paused():
                await self._group.zygote.end(timeout_s=FENCE_S)

    async def end_zygote(self) -> None:
        """Kill a zygote that does not answer."""
        if self._is_paused():
            return
        self._group.zygote.emit("zygote_silent", f"{self._group.zygote.name} does not answer")
        await self._group.zygote.end(timeout_s=FENCE_S)

    async def start_engine(self, unit: "EngineUnit") -> None:
        """Start an instance and prove it; a failure becomes the verdict DEAD."""
        await self._let_streams_go_on()
        if self._is_paused() or not unit.may_be_spawned:
            return  # decided before a pause or an eviction
        zygote = self._group.zygote if self._group.zygote.is_ready else None
        try:
            await unit.start(zygote, load_timeout_s=self._group.settings.cache.load_timeout)
            is_right = await self.prove(unit)
            if unit.state is not EngineState.STARTING:
                return  # condemned meanwhile
            if is_right:
                unit.apply(StateEvent.PROVEN, Facts(known_answer_matches=True))
            else:
                unit.judge(Verdict.DEAD, "answers the canary wrongly")
        except UnderstudyError as error:
            unit.failure = str(error)
            if unit.starts.record.troubles >= _REFUSALS_AT_START:
                self._group.fail_start(error)
            unit.emit("start_failed", f"{unit.name}: {error}")
            if unit.state is EngineState.STARTING:
                unit.judge(Verdict.DEAD, str(error))

    async def _let_streams_go_on(self) -> None:
        """On a GPU, start nothing while streams wait for their first token behind a failover.

        A process that sets itself up on a card holds up all others there: measured on an H200,
        0.15 s between the route and the first token, and 25 ms instead of 6 to raise the KV arena.
        """
        group = self._group
        if group.load.device == "cpu":
            return

        def is_over() -> bool:
            if group.lock.locked():
                return False
            operation = group.operations.waiting_for_token(group.name, group.epoch)
            if operation is None or operation.kind != "failover" or not operation.adopted:
                return True
            return group.services.clock.monotonic_ns() - operation.started_ns > _FIRST_TOKEN_NS

        await group.wait_until(is_over, timeout_s=_FIRST_TOKEN_NS / 1e9)

    async def prove(self, unit: "EngineUnit", *, timeout_s: float = _CANARY_S) -> bool:
        """Ask the canary; the first engine of the group sets the answer that all must give."""
        result = await unit.run_canary(timeout_s=timeout_s)
        if self._group.golden is None:
            self._group.golden = result.token_ids
        unit.is_proven = result.token_ids == self._group.golden
        return unit.is_proven

    async def assign(self, unit: "EngineUnit", event: StateEvent) -> None:
        """Give a proven engine its role without promotion: standby or batch."""
        role = "batch" if event is StateEvent.BATCH_CONFIRMED else "standby"
        await unit.reach(timeout_s=_ASSUME_S)
        try:
            await unit.assume("batch" if role == "batch" else "standby", self._group.epoch,
                              timeout_s=_ASSUME_S)  # fmt: skip
        except UnderstudyError as error:
            if unit.state is EngineState.READY:
                unit.judge(Verdict.DEAD, f"did not become {role}: {error}")
            return
        if unit.state is EngineState.READY:
            unit.role_epoch = self._group.epoch
            unit.apply(event)
        if self._group.cache is not None and self._group.cache.is_serving and not unit.is_batch:
            self._group.cache.in_background(self._group.cache.hold())

    async def fence_engine(self, unit: "EngineUnit", *, timeout_s: float = FENCE_S) -> int:
        """Cut the engine off, kill its tree, wait for evidence, bury it; returns the streams cut.

        One that was condemned or unkillable before is only looked at again; where somebody else
        fences it already, their evidence is ours.

        Raises:
            FenceNotProvenError: it may still act; the engine is UNKILLABLE now.
        """
        instance = unit.instance
        if unit.is_being_fenced:
            await self._group.wait_until(lambda: not unit.is_being_fenced, timeout_s=timeout_s)
        if unit.is_forking:  # else the process that comes would be nobody's
            await self._group.wait_until(lambda: not unit.is_forking, timeout_s=timeout_s)
        if unit.instance != instance:
            return 0
        if unit.state in ALIVE:
            unit.apply(StateEvent.CONDEMNED)
        if unit.state not in (EngineState.FENCING, EngineState.UNKILLABLE):
            return 0  # proven dead
        unit.is_being_fenced = True
        try:
            streams_cut = await self._group.fleet.routes.cut(unit.instance)
            await unit.fence(timeout_s=timeout_s)
        except FenceNotProvenError as error:
            if unit.state is EngineState.FENCING:
                unit.apply(StateEvent.FENCE_TIMED_OUT)
                unit.emit("fence_not_proven", str(error))
            raise
        finally:
            unit.is_being_fenced = False
        unit.confirm_dead()
        return streams_cut

    def _is_paused(self) -> bool:
        """A chore that was decided before a pause does not begin in it."""
        return self._group.services.is_paused
