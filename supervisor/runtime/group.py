"""One group at run time: its units, snapshots of them, and the loop that performs decisions.

`reconcile` is synchronous and cheap: snapshot -> `core.decide` -> start what was decided. Recovery
runs as one task at a time under `lock`; chores run beside it, one per unit. Whatever finishes
calls `reconcile` again, so no step needs to know the next.

Invariants
    1. At most one recovery or operator operation on the pair at a time (`lock`), and one on a batch
       engine (`EngineUnit.orders`): what concerns a batch engine alone delays no failover.
    2. State moves by the table only (`EngineUnit.apply`); the runtime never sets it.
    3. Routes are derived from states (`route`) and pushed whenever they differ from what was
       pushed last; nobody assembles a route by hand.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from engines.contract import ChildRecord, ReleaseGateway
from supervisor.core.deaths import DeathRecord
from supervisor.core.decide import Decision, decide
from supervisor.core.intensity import Intensity
from supervisor.core.states import EngineState, StateEvent
from supervisor.core.verdict import Verdict
from supervisor.errors import UnderstudyError
from supervisor.gateway.protocol import FirstToken, GroupRoute
from supervisor.runtime.chores import GroupChores
from supervisor.runtime.engine import EngineUnit
from supervisor.runtime.gateways import GatewayFleet
from supervisor.runtime.keyedtasks import KeyedTasks
from supervisor.runtime.members import members_of
from supervisor.runtime.operations import OperationLog
from supervisor.runtime.recovery import Recovery
from supervisor.runtime.services import Services
from supervisor.runtime.snapshot import snapshot_of
from supervisor.runtime.strays import Strays, unit_name
from supervisor.topology.schema import EngineRole, Group

__all__ = ["GroupRuntime"]

log = logging.getLogger(__name__)

_RELEASE_S: Final = 5.0
_PUSH_S: Final = 2.0
_LOST_GATEWAYS: Final = 16
_SERVES_CLIENTS: Final = frozenset({EngineState.PRIMARY, EngineState.BATCH})


class GroupRuntime:
    """The running side of one group of the topology."""

    def __init__(
        self,
        services: Services,
        group: Group,
        fleet: GatewayFleet,
        operations: OperationLog,
        *,
        strays: Strays,
        on_epoch: Callable[[], None],
    ) -> None:
        self.services = services
        self.settings = group
        self.name = group.name
        self.fleet = fleet
        self.operations = operations
        self.on_epoch = on_epoch
        self.strays = strays
        self.epoch = 0  # 0: not known yet, or nobody was ever promoted
        self.epoch_ceiling = 0  # of the last supervisor: no epoch above it was given out
        self.is_cut = False
        self.is_open = False  # nothing is decided before everything found at start was adopted
        self.golden: list[int] | None = None
        self.former_golden: list[int] | None = None  # under the last supervisor
        self.preferred = next(e.name for e in group.engines if e.role is EngineRole.PRIMARY)
        self.lock = asyncio.Lock()
        self.changed = asyncio.Event()
        self.start_failure: asyncio.Future[UnderstudyError] = (
            asyncio.get_running_loop().create_future()
        )
        self.judged = Intensity(group.failover.intensity, period_s=group.failover.period)
        self._lost_gateways: deque[str] = deque(maxlen=_LOST_GATEWAYS)  # the newest dead workers
        self.deaths = DeathRecord()
        self._was_blocked = False
        self.tasks = KeyedTasks(group.name, on_end=self.reconcile)
        self._created = int(services.clock.time())
        self._sentence = ""
        members = members_of(
            services, group, deaths=self.deaths,
            on_change=self.reconcile, on_exit_report=self._fork_reaped,
        )  # fmt: skip
        self.load, self.engines = members.load, members.engines
        self.has_zygote = not group.runs_commands
        self.zygote, self.zygote_pulse = members.zygote, members.zygote_pulse
        self.cache, self.cache_pulse = members.cache, members.cache_pulse
        self.chores = GroupChores(self)
        self.recovery = Recovery(self)

    # ------------------------------------------------------------------- facts

    def engine(self, name: str) -> EngineUnit:
        """The unit of that name, which must be one of the topology's."""
        return next(e for e in self.engines if e.name == name)

    @property
    def primary(self) -> EngineUnit | None:
        """The engine that serves now."""
        return next((e for e in self.engines if e.state is EngineState.PRIMARY), None)

    @property
    def standbys(self) -> list[EngineUnit]:
        """Engines that may be promoted."""
        return [e for e in self.engines if e.state is EngineState.STANDBY]

    @property
    def batch(self) -> EngineUnit | None:
        """The batch engine, when it serves (or would, were it not frozen)."""
        states = (EngineState.BATCH, EngineState.FROZEN)
        return next((e for e in self.engines if e.state in states), None)

    @property
    def is_serving(self) -> bool:
        """Whether clients are answered."""
        return self.primary is not None and not self.is_cut

    @property
    def state(self) -> str:
        """`redundant`, `single` (no standby), `blocked` (a hung primary is left alone), `down`."""
        if not self.is_serving:
            return "down"
        if self._was_blocked and self.primary is not None and self.primary.verdict is Verdict.HUNG:
            return "blocked"
        wants = any(e.settings.role is EngineRole.STANDBY for e in self.engines)
        return "redundant" if self.standbys or not wants else "single"

    def route(self) -> GroupRoute:
        """Where requests go, derived from the states."""
        primary, batch = self.primary, self.batch
        return GroupRoute(
            group=self.name,
            epoch=self.epoch,
            max_length=self.settings.kv.max_length,
            primary=primary.target(self.epoch) if primary and not self.is_cut else None,
            has_batch=any(e.is_batch for e in self.engines),
            batch=batch.target(batch.role_epoch) if batch else None,
            created=self._created,
            crashed=self.deaths.crashed,
            unexplained=self.deaths.unexplained(self.services.clock.monotonic()),
        )

    @property
    def blocked_for_s(self) -> float:
        """How long the group stays BLOCKED by time alone; 0 when it is not."""
        return self.judged.free_in_s(self.services.clock.monotonic())

    @property
    def is_blocked(self) -> bool:
        """Whether failovers by judgement have used up their intensity."""
        return self.judged.is_used_up(self.services.clock.monotonic())

    def decide(self) -> Decision:
        """What to do now."""
        return decide(snapshot_of(self))

    # --------------------------------------------------------------- reconcile

    def reconcile(self) -> None:
        """Decide, and start what was decided. Called at every change and every sample."""
        self.changed.set()
        if self.services.is_stopping or not self.is_open:
            return
        decision = self.decide()
        if decision.sentence not in (self._sentence, "no action"):
            log.info("%s: %s epoch=%d", self.name, decision.sentence, self.epoch)
        self._sentence = decision.sentence
        if decision.recovery and not self.lock.locked():
            self.tasks.run("recovery", self.recovery.run())
        for chore in decision.chores:
            self.chores.begin(chore)
        if self.highest_known_epoch > self.epoch:
            self.tasks.run("catch up", self.recovery.catch_up())
        self._publish_if_changed()
        self._note_blocked()
        self._report()

    def _note_blocked(self) -> None:
        """Say when the group becomes BLOCKED, and when that is over."""
        is_blocked = self.is_blocked
        if is_blocked is self._was_blocked:
            return
        self._was_blocked = is_blocked
        failover = self.settings.failover
        if is_blocked:
            text = (
                f"{self.name} is BLOCKED: {failover.intensity} failovers by judgement within "
                f"{failover.period:g} s; a hung primary now stays until ack or time"
            )
            self.services.events.append("blocked", text, group=self.name,
                                        for_s=round(self.blocked_for_s, 1))  # fmt: skip
        else:
            text = f"{self.name} is not BLOCKED any more: it may fail over by judgement again"
            self.services.events.append("unblocked", text, group=self.name)

    def open(self) -> None:
        """Everything that was found is adopted: decide from now on."""
        self.is_open = True
        self.reconcile()

    async def feel_pulses(self) -> None:
        """Ask zygote and cache daemon whether they still answer."""
        pulses = (self.zygote_pulse, self.cache_pulse)
        await asyncio.gather(*(p.beat() for p in pulses if p is not None))

    async def come_to_rest(self, *, timeout_s: float) -> bool:
        """Wait until nothing is under way that signals, starts or promotes; False: it still is."""
        return await self.wait_until(lambda: not self._is_acting(), timeout_s=timeout_s)

    def _is_acting(self) -> bool:
        if not self.is_open:
            return True  # what was found is still looked at, which thaws and freezes
        ends = any(key == "recovery" or key.startswith(("fence ", "end ")) for key in self.tasks)
        is_ordered = self.lock.locked() or any(e.orders.locked() for e in self.engines)
        return is_ordered or ends or any(e.is_forking for e in self.engines)

    def _publish_if_changed(self) -> None:
        route = self.route()
        # One push at a time; what changes meanwhile is published when it has ended.
        is_new = route != self.fleet.routes.in_force(self.name)
        if is_new and not self.lock.locked():
            self.tasks.run("publish", self._publish())

    async def _publish(self) -> None:
        await self.fleet.routes.push(timeout_s=_PUSH_S)

    # --------------------------------------------------------------- reactions

    def _fork_reaped(self, record: ChildRecord) -> None:
        if record.status is None:
            return
        exit_status = os.waitstatus_to_exitcode(record.status)
        for engine in self.engines:
            if engine.handle is not None and engine.instance == record.instance:
                engine.handle.report_exit(exit_status)
            if engine.name == unit_name(record.instance):  # its own, or one buried meanwhile
                engine.on_exit_status(record.instance, exit_status)

    def gateway_died(self, instance: str) -> None:
        """Nobody will resume the streams of that worker: free their slots."""
        self._lost_gateways.append(instance)
        for engine in self.engines:
            if engine.is_connected and engine.state in _SERVES_CLIENTS:
                self._release_gateway(engine, instance)

    def release_lost_gateways(self, engine: EngineUnit) -> None:
        """A new primary has adopted every slot, also those that nobody will ever resume."""
        for instance in self._lost_gateways:
            self._release_gateway(engine, instance)

    @staticmethod
    def _release_gateway(engine: EngineUnit, instance: str) -> None:
        release = ReleaseGateway(instance)
        engine.in_background(engine.call("release_gateway", release, timeout_s=_RELEASE_S))

    def first_token(self, event: FirstToken) -> None:
        """A gateway saw the first token behind a cut."""
        operation = self.operations.waiting_for_token(self.name, event.epoch)
        if operation is not None:
            operation.first_token(event.monotonic_ns)
            if operation.kind == "failover":
                first_s = operation.phases_ms["first_token"] / 1000
                self.services.metrics.failover_phase(self.name, "first_token", first_s)
            self.changed.set()

    def set_epoch(self, epoch: int) -> None:
        """A promotion is ordered at this epoch; it is never given to another engine."""
        self.epoch = max(self.epoch, epoch)
        self.on_epoch()

    def _report(self) -> None:
        metrics = self.services.metrics
        metrics.set_epoch(self.name, self.epoch)
        metrics.set_group_state(self.name, self.state)
        metrics.set_primary_ready(self.name, self.is_serving)
        metrics.set_standby_ready(self.name, bool(self.standbys))
        metrics.set_zygote_up(self.name, self.zygote.is_ready)
        metrics.set_blocked(self.name, self._was_blocked)

    def fail_start(self, error: UnderstudyError) -> None:
        """Tell the start of the supervisor, if it still goes on, that it cannot succeed."""
        if not self.start_failure.done():
            self.start_failure.set_result(error)

    @property
    def start_limit_s(self) -> float:
        """Longest time from start to service: loading, importing, starting an engine."""
        return self.settings.cache.load_timeout + 2 * self.settings.health.start_timeout

    def fleet_epochs(self) -> list[int]:
        """Epochs of this group that gateway workers report."""
        statuses = [w.status for w in self.fleet.workers if w.status is not None]
        return [s.epochs.get(self.name, 0) for s in statuses]

    @property
    def highest_known_epoch(self) -> int:
        """The highest epoch that a gateway worker reports; 0 when none does."""
        return max(self.fleet_epochs(), default=0)

    def acknowledge(self) -> None:
        """The operator has seen it: judgement is possible again, what gave up is tried again."""
        self.judged.forgive()
        helpers = [u for u in (self.zygote, self.cache) if u is not None]
        forgiven = [u.name for u in helpers if u.starts.has_given_up]
        for unit in helpers:
            unit.starts.forgive()
        for engine in self.engines:
            if engine.state is EngineState.FATAL:
                engine.starts.forgive()
                engine.apply(StateEvent.RESUMED)
                forgiven.append(engine.name)
        text = f"{self.name} was acknowledged"
        if forgiven:
            text += f"; {', '.join(forgiven)} will be started again"
        self.services.events.append("acknowledged", text, group=self.name)
        self.reconcile()

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait for a condition on this group; False when time runs out."""
        deadline = self.services.patience.deadline(timeout_s)
        while not condition():
            if deadline.has_passed:
                return False
            self.changed.clear()
            with contextlib.suppress(TimeoutError):  # then it is looked at once more
                async with asyncio.timeout(deadline.wait_s):
                    await self.changed.wait()
        return True
