"""One configured engine: starts instances of it, keeps its state by the table, samples it.

State, verdict and record of an engine change together at its start, death and burial; they are
kept in one class, so that no half of it can be forgotten.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from signal import SIGSTOP
from typing import Final, Literal, TypeVar

from cache.protocol import LoadSpec
from cache.wire import Event
from engines.contract import (
    CONTROL_PROTOCOL,
    CONTROL_VERSION,
    Assume,
    Assumed,
    CanaryResult,
    Drained,
    EngineSpec,
    EngineStatus,
)
from supervisor.core.deaths import DeathRecord, is_own_fault, sentence_of
from supervisor.core.restart import RestartPolicy
from supervisor.core.states import ALIVE, EngineState, Facts, StateEvent, next_state
from supervisor.core.verdict import ProgressJudge, Sample, Verdict
from supervisor.errors import (
    ConnectionClosedError,
    DeadlineExceededError,
    PreconditionError,
    StartFailedError,
    UnderstudyError,
)
from supervisor.gateway.protocol import RouteTarget
from supervisor.process import ProcessId, open_log
from supervisor.runtime.enginespec import command_spec_of, spec_of
from supervisor.runtime.lack import is_our_lack
from supervisor.runtime.lastwords import code_of
from supervisor.runtime.progress import MappedProgress
from supervisor.runtime.services import Services
from supervisor.runtime.unit import Unit
from supervisor.runtime.zygote import ZygoteUnit
from supervisor.topology.schema import Engine, EngineKind, EngineRole, Group

__all__ = ["EngineUnit"]

T = TypeVar("T")

_STORY_LENGTH: Final = 40
_FORK_S: Final = 10.0
_REACH_AGAIN_S: Final = 0.02
_READY_LOOK_S: Final = 0.5
_MAKE_PRIMARY: Final = frozenset({
    StateEvent.ADOPTED, StateEvent.PROMOTION_ORDERED, StateEvent.PRIMARY_CONFIRMED,
})  # fmt: skip
"""From then on it may act as primary, until it says otherwise or is proven dead."""
_MAKE_HARMLESS: Final = frozenset({
    StateEvent.SPAWNED, StateEvent.STANDBY_CONFIRMED, StateEvent.BATCH_CONFIRMED,
})  # fmt: skip
_DRAIN_ANSWER_S: Final = 2.0
_DRAIN_LOOK_S: Final = 0.05


class EngineUnit(Unit):
    """An engine of the topology, through all its lives."""

    kind = "engine"

    def __init__(
        self,
        services: Services,
        group: Group,
        engine: Engine,
        *,
        load: LoadSpec,
        policy: RestartPolicy,
        deaths: DeathRecord,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(
            services, name=engine.name, group=group.name, policy=policy, on_change=on_change
        )
        self.settings = engine
        self.is_batch = engine.role is EngineRole.BATCH
        self.state = EngineState.ABSENT
        self.verdict = Verdict.HEALTHY
        self.status: EngineStatus | None = None
        self.canary: CanaryResult | None = None
        self.is_proven = True
        self.may_act = False  # as primary: it was told to, or nobody knows its role
        self.is_held = False  # frozen by the operator, or evicted with --hold: it stays so
        self.former_state = ""  # under the last supervisor, as far as its journal says
        self.death_was_ours = False
        self.is_being_fenced = False  # somebody waits for the evidence
        self.failure = ""
        self.judged_ns = 0  # when the verdict was last given
        self.orders = asyncio.Lock()  # one at a time to a batch engine, beside the group's lock
        self.role_epoch = 0  # the epoch under which the current instance got its role
        self._group = group
        self._load = load
        self._deaths = deaths
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._progress: MappedProgress | None = None
        self._changed = asyncio.Event()
        self._judge = self._new_judge()

    def _new_judge(self) -> ProgressJudge:
        health = self._group.health
        return ProgressJudge(hang_after_s=health.hang_after, interval_s=health.interval)

    # ------------------------------------------------------------------- state

    def apply(self, event: StateEvent, facts: Facts | None = None) -> None:
        """Move by the transition table.

        Raises:
            IllegalTransitionError: a bug of ours; the engine keeps its state.
        """
        old = self.state
        self.state = next_state(
            old, event, facts or Facts(), engine=self.name, story="; ".join(self._story)
        )
        self._story.append(f"{old} --{event}--> {self.state}")
        self.has_served = self.has_served or event is StateEvent.PRIMARY_CONFIRMED
        self.may_act = event in _MAKE_PRIMARY or (self.may_act and event not in _MAKE_HARMLESS)
        self.services.metrics.set_engine(self.group, self.name, self.state, self.verdict)
        self.emit("engine_state", f"{self.name} is {self.state}", state=self.state, was=old,
                  instance=self.instance, pid=self.pid)  # fmt: skip

    def judge(self, verdict: Verdict, reason: str = "") -> None:
        """Set the verdict; a change is an event."""
        self.judged_ns = self.services.clock.monotonic_ns()
        if verdict is self.verdict:
            return
        was, self.verdict = self.verdict, verdict
        self.services.metrics.set_engine(self.group, self.name, self.state, verdict)
        worse = {Verdict.DEGRADED, Verdict.HUNG, Verdict.DEAD}
        if (verdict in worse or was in worse) and not self.services.is_stopping:
            text = f"{self.name} is {verdict}" + (f": {reason}" if reason else "")
            self.emit("verdict", text, verdict=verdict, was=was)

    def target(self, epoch: int) -> RouteTarget:
        """How a gateway reaches the current instance."""
        path = self.services.paths.generate(self.instance)
        return RouteTarget(self.instance, str(path), epoch)

    # ------------------------------------------------------------------- start

    @property
    def may_be_spawned(self) -> bool:
        """Whether nothing of it exists and nobody keeps it away."""
        return self.state in (EngineState.ABSENT, EngineState.STOPPED)

    async def start(self, zygote: ZygoteUnit | None, *, load_timeout_s: float) -> None:
        """Fork (or spawn, when there is no zygote) a new instance and wait until it is proven.

        Raises:
            UnderstudyError: it did not come up; the caller fences what is left of it.
        """
        self.apply(StateEvent.SPAWNED)
        instance = self.begin()
        self._forget()
        with self.starts.refusals():
            how = await self._begin_process(instance, zygote, load_timeout_s)
            await self.join(timeout_s=self._group.health.start_timeout)
            await self._wait_ready(self._group.health.start_timeout + load_timeout_s)
        took_s = self.uptime_s
        attach_ms = self.status.attach_ms if self.status is not None else None
        self.services.metrics.engine_started(self.group, how, took_s)
        if attach_ms is not None:
            self.services.metrics.attach(self.group, attach_ms / 1000)
        self.emit("engine_ready", f"{self.name} is attached", took_s=round(took_s, 3), how=how,
                  attach_ms=attach_ms, instance=instance, pid=self.pid)  # fmt: skip

    async def _begin_process(
        self, instance: str, zygote: ZygoteUnit | None, load_timeout_s: float
    ) -> str:
        """Fork or spawn the instance; which of the two it was, as metrics name it."""
        if self.drains:
            server = command_spec_of(self.services, self._group, self.settings, instance,
                                     load_timeout_s=load_timeout_s)  # fmt: skip
            self.spawn_module("engines.command", server, with_model=False)
            return "cold"
        spec = spec_of(self.services, self._group, self.settings, instance,
                       load=self._load, attach_timeout_s=load_timeout_s)  # fmt: skip
        if zygote is None or not zygote.is_ready:
            self.spawn_module("engines.native", spec, with_model=True)
            return "cold"
        process = await self._fork(zygote, spec)
        if self.state is not EngineState.STARTING:  # nobody waited for a fork so slow
            raise StartFailedError(f"{self.name} is {self.state}, its fork came too late",
                                   hint="it is ended, and another is started")  # fmt: skip
        self.take(process, instance)
        return "zygote"

    def give_up_error(self) -> StartFailedError:
        """Why it is not tried again."""
        if not self.failure:
            return self.start_failure()
        return StartFailedError(f"{self.name} could not start: {self.failure}",
                                hint=f"see {self.log_path}")  # fmt: skip

    async def _fork(self, zygote: ZygoteUnit, spec: EngineSpec) -> ProcessId:
        log_fd = open_log(self.log_path)
        self.is_forking = True
        try:
            return await zygote.fork(spec, self.marker().value(), log_fd, timeout_s=_FORK_S)
        finally:
            self.is_forking = False
            os.close(log_fd)
            self._on_change()

    async def join(self, *, timeout_s: float) -> None:
        """Connect to the current instance and map its progress page."""
        raw = await self.connect(
            self.services.paths.control(self.instance),
            CONTROL_PROTOCOL,
            CONTROL_VERSION,
            timeout_s=timeout_s,
            on_event=self._event,
        )
        self._take_status(self.understood(raw, EngineStatus))
        try:
            await self._map_progress()
        except (UnderstudyError, OSError):
            self.disconnect()  # all of it or nothing: without progress nobody would see it hang
            raise

    async def reach(self, *, timeout_s: float) -> None:
        """Connect again where the connection broke a moment ago, before anything is ordered.

        Raises:
            PreconditionError: we lack a descriptor ourselves; it says nothing about the engine.
            UnderstudyError: it does not answer, or died meanwhile.
        """
        instance = self.instance
        deadline = self.services.patience.deadline(timeout_s)
        while not self.is_connected:
            if self.instance != instance:  # another life, and another start that connects to it
                raise ConnectionClosedError(f"{instance} died meanwhile")
            try:
                await self.join(timeout_s=timeout_s)
            except (UnderstudyError, OSError) as error:
                if isinstance(error, UnderstudyError) and not is_our_lack(error):
                    raise
                if deadline.has_passed or self.died.done():
                    raise PreconditionError(f"{self.name} cannot be reached: {error}") from error
                await asyncio.sleep(_REACH_AGAIN_S)

    async def rejoin(self, *, timeout_s: float) -> None:
        """Connect to an instance that did not answer before; what it says of its epoch counts."""
        await self.join(timeout_s=timeout_s)
        if self.status is not None and self.state is EngineState.BATCH:
            self.role_epoch = self.status.epoch
        self.note_joined()

    async def _map_progress(self) -> None:
        _, fds = await self.call_with_fds("progress.open", timeout_s=5.0)
        try:
            progress = MappedProgress(fds[0])
            self._unmap_progress()  # of the join before
            self._progress = progress
        finally:
            for fd in fds:
                os.close(fd)

    def _look_away(self) -> None:
        super()._look_away()
        self._unmap_progress()

    def _unmap_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    async def _wait_ready(self, timeout_s: float) -> None:
        deadline = self.services.patience.deadline(timeout_s)
        while True:
            state = self.status.state if self.status is not None else "starting"
            if state != "starting":
                break
            if self.died.done():
                raise self.start_failure()
            if deadline.has_passed:
                raise DeadlineExceededError(f"{self.name} getting ready", timeout_s=timeout_s)
            if not self.is_connected:  # it broke, and with it what the engine would have told
                await self.join(timeout_s=timeout_s)
                continue
            self._changed.clear()
            wait_s = min(deadline.wait_s, _READY_LOOK_S)
            await self.change_or_death(self._changed, timeout_s=wait_s)
        if state == "failed":
            error = self.status.error if self.status is not None else ""
            raise StartFailedError(
                f"{self.name} could not start: {error}",
                hint=f"see {self.log_path}",
                cause=code_of(error),
            )

    # -------------------------------------------------------------------- roles

    async def assume(
        self, role: Literal["primary", "standby", "batch"], epoch: int, *, timeout_s: float
    ) -> Assumed:
        """Tell the engine its role; it adopts or gives up the KV arena before it answers.

        Raises:
            UnderstudyError: it died, refuses, or does not answer in time.
        """
        order = Assume(role, epoch)
        return await self._insist("assume", Assumed, order, timeout_s=timeout_s)

    async def _insist(
        self, verb: str, answer: type[T], params: object = None, *, timeout_s: float
    ) -> T:
        """Ask, and ask again over a new connection where the answer is lost with the old one.

        For what may be asked twice: an order given twice is obeyed once.
        """
        instance = self.instance
        deadline = self.services.patience.deadline(timeout_s)
        while True:
            try:
                return await self.ask(verb, answer, params, timeout_s=deadline.wait_s)
            except ConnectionClosedError:
                if deadline.has_passed or not self.is_alive or self.instance != instance:
                    raise
            await self.reach(timeout_s=deadline.wait_s)

    @property
    def drains(self) -> bool:
        """Whether its streams cannot be handed over, so that they must end before it gives up."""
        return self.settings.kind is EngineKind.COMMAND

    async def drain(self, *, timeout_s: float, is_in_vain: Callable[[], bool]) -> int:
        """Let it take no new request, and wait for those that are open; how many are left.

        It ends early once that `is_in_vain`, or the engine hangs: new requests wait meanwhile.

        Raises:
            UnderstudyError: it died meanwhile, or does not answer.
        """
        deadline = self.services.patience.deadline(timeout_s)
        while True:
            left = (await self.ask("drain", Drained, timeout_s=_DRAIN_ANSWER_S)).open
            if not left or deadline.has_passed or is_in_vain() or self.verdict is Verdict.HUNG:
                return left
            await asyncio.wait([self.died], timeout=_DRAIN_LOOK_S)

    async def run_canary(self, *, timeout_s: float) -> CanaryResult:
        """Ask the built-in question."""
        self.canary = await self._insist("canary", CanaryResult, timeout_s=timeout_s)
        return self.canary

    def freeze(self) -> None:
        """Stop its compute; the memory stays."""
        self.apply(StateEvent.FROZEN)
        if self.handle is not None:
            self.handle.send_signal(SIGSTOP)

    # ------------------------------------------------------------------ watching

    def sample(self) -> Verdict:
        """One look at progress, stop state and scheduler; returns the verdict."""
        if not self.is_alive or self.state not in ALIVE:
            return self.verdict
        if self.state in (EngineState.STARTING, EngineState.FROZEN) or self._progress is None:
            self._judge.void()
            return Verdict.HEALTHY
        assert self.pid is not None  # noqa: S101 - alive
        progress = self._progress
        cpu = progress.with_processes_below(self.services.machine.cpu(self.pid))
        sample = Sample(
            at_ns=self.services.clock.monotonic_ns(),
            steps=progress.steps,
            has_work=progress.has_work,
            is_stopped=self.is_stopped_by_signal or progress.is_stopped_below,
            on_cpu_ns=cpu.on_cpu_ns,
            run_delay_ns=cpu.run_delay_ns,
            is_runnable=cpu.is_runnable,
        )
        return self._judge.observe(sample)

    @property
    def quiet_since_ns(self) -> int | None:
        """When the silence began that the judge is looking at."""
        return self._judge.quiet_since_ns

    def void_samples(self) -> None:
        """The supervisor was stalled: what was seen says nothing."""
        self._judge.void()

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a slot, from the progress page."""
        return self._progress.queued if self._progress is not None else 0

    @property
    def active(self) -> int:
        """Rows that decode, from the progress page."""
        return self._progress.active if self._progress is not None else 0

    def on_death(self, process: ProcessId) -> None:
        """Only the verdict: what follows is decided, not done here."""
        self._deaths.died(self.instance, self.services.clock.monotonic())
        self.judge(Verdict.DEAD, f"pid {process.pid} exited")
        self._changed.set()

    def on_exit_status(self, instance: str, exit_status: int) -> None:
        """How one of its instances ended; the gateways want to know which ones crashed."""
        if not self._deaths.explained(instance, exit_status) or self.services.is_stopping:
            return
        self.services.metrics.engine_crashed(self.group, self.name)
        said = "" if is_own_fault(exit_status) else "announced that it failed, and "
        self.emit("engine_crashed", f"{instance} {said}{sentence_of(exit_status)}",
                  instance=instance, exit_status=exit_status)  # fmt: skip
        self._on_change()

    def confirm_dead(self) -> None:
        """The fence is proven: keep the record, bury the instance."""
        self.apply(StateEvent.FENCE_PROVEN)
        if self.handle is not None:
            self._deaths.died(self.instance, self.services.clock.monotonic())
            self.services.metrics.restart(kind="engine", group=self.group, name=self.name)
        # Without a process nobody died: the fork itself failed, which is the zygote's record.
        was_ours = self.death_was_ours or self.handle is None or self.services.is_stopping
        self.after_death(was_ours=was_ours)
        self.death_was_ours = False
        self._forget()

    def attest_harmless(self) -> None:
        """The operator's word replaces the evidence: go on without the instance.

        The process stays what it is. Its marker is remembered, so that nobody takes it for a
        stray, and its own death, should it come, is nobody's concern.
        """
        self.apply(StateEvent.HARMLESSNESS_ATTESTED)
        if self.handle is not None:
            self.services.attested[self.instance] = self.handle.process
            self.services.metrics.restart(kind="engine", group=self.group, name=self.name)
        self.after_death(was_ours=True)
        self.death_was_ours = False
        self._forget()

    def _forget(self) -> None:
        self._unmap_progress()
        self.status = None
        self.canary = None
        self.is_proven = True
        self.verdict = Verdict.HEALTHY
        self._judge = self._new_judge()

    def _event(self, event: Event, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if event.name == "state":
            self._take_status(self.understood(event.params, EngineStatus))

    def _take_status(self, status: EngineStatus) -> None:
        known = self.status.error if self.status is not None else ""
        if status.state == "starting" and status.error and status.error != known:
            self.emit("start_delayed", f"{self.name} still starts: {status.error}")
        if status.state == "failed":
            self._deaths.announced(self.instance)
        self.status = status
        self._changed.set()

    async def refresh(self, *, timeout_s: float) -> EngineStatus | None:
        """Ask for the newest status; None when it does not answer."""
        with contextlib.suppress(UnderstudyError):
            self._take_status(await self.ask("status", EngineStatus, timeout_s=timeout_s))
            return self.status
        return None
