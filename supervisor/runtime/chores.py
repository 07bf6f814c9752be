"""Chores of one group: the slow, independent steps that bring processes and redundancy back.

None of them is on the path of a failover. A chore reports by moving the unit's state or verdict;
what follows from that is decided anew.
"""

from typing import TYPE_CHECKING, Final

from supervisor.core.states import EngineState, Facts, StateEvent
from supervisor.core.verdict import Verdict
from supervisor.errors import UnderstudyError
from supervisor.process import FenceNotProvenError

if TYPE_CHECKING:
    from supervisor.runtime.engine import EngineUnit
    from supervisor.runtime.group import GroupRuntime

__all__ = ["FENCE_S", "GroupChores"]

FENCE_S: Final = 2.0
_ASSUME_S: Final = 5.0
_ZYGOTE_START_S: Final = 120.0
_CANARY_S: Final = 30.0


class GroupChores:
    """What can be done for the units of one group."""

    def __init__(self, group: "GroupRuntime") -> None:
        self._group = group

    async def start_cache(self) -> None:
        """Start the cache daemon; engines register with it again."""
        assert self._group.cache is not None  # noqa: S101 - decided from it
        try:
            await self._group.cache.start()
        except UnderstudyError as error:
            self._group.cache.emit("cache_failed", f"{self._group.cache.name}: {error}")
            self._group.fail_start(error)
            if self._group.cache.is_alive:
                await self._group.cache.fence(timeout_s=FENCE_S)
            return
        for engine in self._group.engines:
            if engine.client is not None:
                engine.in_background(engine.call("cache.rejoin", timeout_s=_ASSUME_S))

    async def start_zygote(self) -> None:
        """Start the zygote."""
        try:
            await self._group.zygote.start(self._group.load, timeout_s=_ZYGOTE_START_S)
        except UnderstudyError as error:
            self._group.zygote.emit("zygote_failed", f"{self._group.zygote.name}: {error}")
            if self._group.zygote.record.has_given_up:
                self._group.zygote.emit(
                    "zygote_given_up", "engines start cold from now on, which takes seconds"
                )
            if self._group.zygote.is_alive:
                await self._group.zygote.fence(timeout_s=FENCE_S)

    async def start_engine(self, unit: "EngineUnit") -> None:
        """Start an instance and prove it; a failure becomes the verdict DEAD."""
        zygote = self._group.zygote if self._group.zygote.is_ready else None
        try:
            await unit.start(zygote, load_timeout_s=self._group.settings.cache.load_timeout)
            if await self.prove(unit):
                unit.apply(StateEvent.PROVEN, Facts(known_answer_matches=True))
            else:
                unit.judge(Verdict.DEAD, "answers the canary wrongly")
        except UnderstudyError as error:
            unit.failure = str(error)
            unit.emit("start_failed", f"{unit.name}: {error}")
            if unit.state is EngineState.STARTING:
                unit.judge(Verdict.DEAD, str(error))

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

    async def fence_engine(self, unit: "EngineUnit") -> None:
        """Kill the engine's tree, wait for evidence, bury it.

        Raises:
            FenceNotProvenError: it may still act; the engine is UNKILLABLE now.
        """
        unit.apply(StateEvent.CONDEMNED)
        try:
            await unit.fence(timeout_s=FENCE_S)
        except FenceNotProvenError as error:
            unit.apply(StateEvent.FENCE_TIMED_OUT)
            unit.emit("fence_not_proven", str(error))
            raise
        unit.confirm_dead()
