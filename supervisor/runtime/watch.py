"""Watching a group: progress samples, HTTP health, canaries. Feeds verdicts, decides nothing.

Death is not seen here (the exit watcher sees it within 5 ms); this finds engines that live and
do not work. Each loop survives its own errors: a group that is not watched would be the worst.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from supervisor.core.ladder import Ladder, LadderSettings, LadderStep, parse_condition
from supervisor.core.states import EngineState
from supervisor.core.verdict import Verdict
from supervisor.errors import UnderstudyError
from supervisor.observe.looplag import LoopLag
from supervisor.runtime.commands import GroupCommands
from supervisor.runtime.engine import EngineUnit
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.pulse import BEAT_S, Pulse

__all__ = ["GroupWatch"]

log = logging.getLogger(__name__)

_S = EngineState
_PROBED: Final = frozenset({_S.STANDBY, _S.PRIMARY, _S.BATCH})
_ASKED: Final = _PROBED | {_S.READY}
_HTTP_INTERVAL_S: Final = 1.0
_HTTP_TIMEOUT_S: Final = 0.5
_UNHEALTHY_IN_A_ROW: Final = 3
_CANARY_TIMEOUT_S: Final = 2.0


class GroupWatch:
    """The sampling loops of one group."""

    def __init__(self, group: GroupRuntime, lag: LoopLag) -> None:
        self._group = group
        self._lag = lag
        self._unhealthy: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._commands = GroupCommands(group)
        batch = group.settings.batch
        condition = parse_condition(batch.freeze_when) if batch.freeze_when else None
        settings = LadderSettings(condition, batch.evict_after, batch.resume_after)
        self._pulses = {e.name: self._pulse_of(e) for e in group.engines}
        self._ladders = {e.name: Ladder(settings) for e in group.engines if e.is_batch}

    def start(self) -> None:
        """Begin watching."""
        health = self._group.settings.health
        loops = (
            (health.interval, self._sample),
            (_HTTP_INTERVAL_S, self._probe_http),
            (health.canary, self._ask_canaries),
            (BEAT_S, self._group.feel_pulses),
            (BEAT_S, self._feel_engines),
        )
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(_every(s, step)) for s, step in loops]

    def stop(self) -> None:
        """End watching."""
        for task in self._tasks:
            task.cancel()

    async def _sample(self) -> None:
        group = self._group
        window_ns = int(group.settings.health.hang_after * 1e9)
        if self._lag.stalled_since(group.services.clock.monotonic_ns() - window_ns):
            for engine in group.engines:
                engine.void_samples()
        for engine in group.engines:
            if engine.verdict is Verdict.DEAD:
                continue
            verdict = engine.sample()
            is_bad = not engine.is_proven or self._is_unhealthy(engine)
            if is_bad and verdict in (Verdict.HEALTHY, Verdict.BUSY):
                verdict = Verdict.DEGRADED
            reason = "no progress although work waits" if verdict is Verdict.HUNG else ""
            if engine.state in _ASKED and self._pulses[engine.name].is_deaf:
                verdict, reason = Verdict.HUNG, "it does not answer its control socket"
            engine.judge(verdict, reason)
        self._climb()
        group.reconcile()

    @staticmethod
    def _pulse_of(engine: EngineUnit) -> Pulse:
        return Pulse(engine, "status", is_starting=lambda: engine.state not in _ASKED,
                     rejoin=lambda: engine.rejoin(timeout_s=BEAT_S))  # fmt: skip

    async def _feel_engines(self) -> None:
        await asyncio.gather(*(p.beat() for p in self._pulses.values()))

    def _climb(self) -> None:
        """The batch ladder: what pressure on the primary means for the batch engine."""
        group = self._group
        primary = group.primary
        if primary is None or group.services.is_paused or group.services.is_stopping:
            return
        values = {"queue": primary.queue_depth, "active": primary.active}
        now_s = group.services.clock.monotonic()
        for name, ladder in self._ladders.items():
            unit = group.engine(name)
            step = ladder.step(unit.state, values, is_held=unit.is_held, now_s=now_s)
            match step:
                case LadderStep.FREEZE:
                    work = self._commands.freeze(name, cause="pressure")
                case LadderStep.THAW:
                    work = self._commands.thaw(name, cause="quiet")
                case LadderStep.EVICT:
                    work = self._commands.evict(name, hold=False, cause="pressure")
                case LadderStep.RESUME:
                    work = self._commands.resume(name, cause="quiet")
                case None:
                    continue
            group.tasks.run(f"ladder {name}", work)

    def _is_unhealthy(self, engine: EngineUnit) -> bool:
        return self._unhealthy.get(engine.instance, 0) >= _UNHEALTHY_IN_A_ROW

    async def _probe_http(self) -> None:
        engines = [e for e in self._group.engines if e.state in _PROBED]
        services = self._group.services
        paths = [services.paths.http(e.instance) for e in engines]
        answers = await asyncio.gather(
            *(services.machine.probe_health(path, timeout_s=_HTTP_TIMEOUT_S) for path in paths)
        )
        counts = {}
        for engine, answer in zip(engines, answers, strict=True):
            before = self._unhealthy.get(engine.instance, 0)
            counts[engine.instance] = before + 1 if answer is False else 0
            await engine.refresh(timeout_s=_HTTP_TIMEOUT_S)
        self._unhealthy = counts
        cache = self._group.cache
        if cache is not None and cache.is_serving:
            with contextlib.suppress(UnderstudyError):  # its pulse judges silence
                await cache.refresh()

    async def _ask_canaries(self) -> None:
        for engine in self._group.engines:
            works = engine.active > 0 and engine.state is not _S.STANDBY
            if engine.state not in _ASKED or works or engine.verdict is Verdict.DEAD:
                continue  # steps of real work prove more than a canary would
            begun_s = self._group.services.clock.monotonic()
            instance = engine.instance
            try:
                matches = await self._group.chores.prove(engine, timeout_s=_CANARY_TIMEOUT_S)
            except UnderstudyError:
                continue  # no answer is no statement; progress judges silence
            took_s = self._group.services.clock.monotonic() - begun_s
            metrics = self._group.services.metrics
            metrics.canary(self._group.name, engine.name, took_s, matches=matches)
            if not matches and engine.instance == instance:
                engine.emit("canary_failed", f"{engine.name} answers the canary wrongly")
                self._group.reconcile()


async def _every(interval_s: float, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await step()
        except Exception:
            log.exception("watching failed once")
