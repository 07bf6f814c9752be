"""Runs one schedule: lives of the supervisor one after another, faults, healing, judgement."""

import asyncio
import contextvars
import logging
import weakref
from collections.abc import Coroutine
from typing import Any, Final

from supervisor.admin.controller import Operation
from supervisor.core.states import IllegalTransitionError
from supervisor.errors import UnderstudyError
from supervisor.observe.looplag import LoopLag
from supervisor.observe.observer import NullObserver
from supervisor.runtime.controller import RuntimeController
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.paths import StatePaths
from supervisor.runtime.services import Services
from supervisor.runtime.supervisor import SupervisorRuntime
from tests.sim.clock import SimLoop
from tests.sim.fakeengine import FakeEngine
from tests.sim.machine import FakeMachine
from tests.sim.proc import Proc, ProcState
from tests.sim.records import CountingMetrics, EventSink, SimDisk, SimJournal
from tests.sim.shapes import Shape, topology_of
from tests.sim.world import World

__all__ = ["Keeper", "Life", "Objections", "check_closed", "check_stopped", "name_of"]

LIFE: contextvars.ContextVar["Life | None"] = contextvars.ContextVar("life", default=None)
_RESTART_S: Final = 0.3
_LAG_S: Final = 0.05  # coarser than in the product: half of all callbacks were its ticks
_FAILED_STARTS: Final = 30


class Life:
    """One supervisor, from its start to its crash or stop."""

    def __init__(
        self, world: World, loop: SimLoop, shape: Shape, disk: SimDisk, number: int
    ) -> None:
        self.world = world
        self.number = number
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.operations: dict[asyncio.Task[Any], str] = {}
        self.is_gone = False
        self._loop = loop
        self.context = contextvars.copy_context()
        self.context.run(LIFE.set, self)
        self.machine = self.context.run(FakeMachine, world, loop)
        world.machine = self.machine
        self.metrics = CountingMetrics()
        self.events = EventSink(disk, world.clock, world.judge.note)
        self.journal = SimJournal(disk, world.clock)
        topology = topology_of(shape)
        paths = StatePaths(topology.state_dir)
        paths.make()
        self.lag = LoopLag(interval_s=_LAG_S, clock_ns=world.clock.monotonic_ns)
        self.services = Services(
            topology, paths, "simstate", self.machine, self.events, self.metrics, NullObserver(),
            clock=world.clock, lag=self.lag,
        )  # fmt: skip
        self.machine.is_stopping = lambda: self.services.is_stopping
        self.runtime = self.context.run(
            SupervisorRuntime, self.services, self.journal, disk.load(), self.lag
        )
        self.controller = RuntimeController(self.runtime)
        self.group = self.runtime.groups[0]
        self.machine.owns = lambda p: any(u.instance == p.instance for u in self.runtime.units())
        self.machine.is_right = self._is_right
        self.task = self.create_task(self._run())

    def _is_right(self, proc: Proc) -> bool:
        """Whether it answers as its group does."""
        if not isinstance(proc, FakeEngine):
            return True
        return self.group_of(proc.group).golden in (None, proc.answer)

    def group_of(self, name: str) -> GroupRuntime:
        """A group by its name."""
        return next(g for g in self.runtime.groups if g.name == name)

    def has_adopted_an_engine(self, group: GroupRuntime) -> bool:
        """Whether an engine outlived the supervisor before this one."""
        names = {e.name for e in group.engines}
        events = self.events.of_this_life()
        return any(e["kind"] == "adopted" and e["engine"] in names for e in events)

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that dies with this supervisor."""
        return self.context.run(self._loop.create_task, work)

    async def _run(self) -> None:
        """As `supervisor.daemon` does it."""
        self.lag.start()
        served: list[FakeEngine] = []
        begun_ns = self.world.clock.now_ns
        try:
            await self.runtime.start()
            await self.runtime.stop_requested.wait()
        except UnderstudyError as error:
            self.world.judge.note(f"the supervisor cannot start: {error}")
            engines = (p for p in self.world.living() if isinstance(p, FakeEngine) and p.serves)
            served = [p for p in engines if p.born_ns < begun_ns]  # it may end what it started
        await self.runtime.shut_down()
        for proc in served:
            if not proc.serves:
                self.world.judge.breach(f"a failed start ends {proc.unit}, which serves")
        for operation in tuple(self.operations):  # their loop ends; nobody reads the answer
            operation.cancel()
        await asyncio.sleep(0)
        self.lag.stop()

    def kill(self) -> None:
        """SIGKILL: from here on nothing that it does has an effect."""
        if self.is_gone:
            return
        self.is_gone = self.machine.is_gone = self.services.is_stopping = True
        self.events.is_gone = self.journal.is_gone = True
        self.world.judge.note("the supervisor was killed")
        self.lag.stop()
        for proc in self.world.living():
            if isinstance(proc, FakeEngine) and proc.status_name == "starting":
                proc.is_blemished = "its start was cut short"
            for client in tuple(proc.connections):
                if client.machine is self.machine:
                    client.close()
        for task in self.tasks:
            task.cancel()

    async def gone(self) -> None:
        """Wait until the last of it has unwound."""
        for _ in range(50):
            pending = [t for t in self.tasks if not t.done()]
            if not pending:
                break
            for task in pending:
                task.cancel()
            await asyncio.sleep(0)
        self.runtime.fleet.close()
        self.world.close_descriptors(self.machine)

    # ---------------------------------------------------------------- operator

    def order(
        self, kind: str, to: str, work: Coroutine[Any, Any, Operation], *touched: str
    ) -> None:
        """Let the operator run a command; what it may end is no surprise any more."""
        self.world.judge.operator_touched.update(touched)
        name = f"{kind} {to}".strip()
        task = self.create_task(self._ordered(kind, to, name, work))
        self.operations[task] = name
        task.add_done_callback(lambda t: self.operations.pop(t, None))
        task.add_done_callback(lambda _: work.close())  # killed before it began

    async def _ordered(
        self, kind: str, to: str, name: str, work: Coroutine[Any, Any, Operation]
    ) -> None:
        judge = self.world.judge
        judge.note(f"operator: {name}")
        try:
            answer = await work
        except UnderstudyError as error:
            judge.note(f"operator: {name} -> {error.stable_code}: {error}")
            if isinstance(error, IllegalTransitionError):
                judge.breach(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - a bug of the command, which is what we look for
            judge.breach(f"{name} raised {error!r}")
        else:
            judge.note(f"operator: {name} -> {answer.state}")
            self._answered(kind, to)

    def _answered(self, kind: str, to: str) -> None:
        """What holds once the operator has the answer."""
        judge = self.world.judge
        is_stopped = self.runtime.stop_requested.is_set()  # a stop ends processes all the same
        if kind == "pause" and self.services.is_paused and not is_stopped:
            judge.is_paused = True  # and not unpaused meanwhile
        elif kind == "attest":  # by the operator's word, it can never act again
            for proc in self.world.living(to):
                if proc.state is ProcState.KILLED:
                    judge.rests(proc)
        elif kind == "fence":
            judge.breach(f"the fence of {to} was not only explained")


class Keeper:
    """Starts the next supervisor when one has ended, as systemd would."""

    def __init__(self, world: World, loop: SimLoop, shape: Shape) -> None:
        self.world = world
        self.disk = SimDisk()
        self._loop = loop
        self._shape = shape
        self._failed = 0
        self.is_closing = False
        self.lives: list[Life] = []
        self.life = self._begin()

    def _begin(self) -> Life:
        life = Life(self.world, self._loop, self._shape, self.disk, len(self.lives) + 1)
        self.world.judge.note(f"supervisor {life.number} starts")
        self.lives.append(life)
        life.task.add_done_callback(lambda _: self._ended(life))
        return life

    def _ended(self, life: Life) -> None:
        if not self.is_closing:
            self._loop.create_task(self._next(life))

    async def _next(self, life: Life) -> None:
        judge = self.world.judge
        if not life.task.cancelled() and (error := life.task.exception()) is not None:
            judge.breach(f"the supervisor ends with {error!r}")
        if life.runtime.stop_requested.is_set() and not life.is_gone:
            check_stopped(self.world, life)
        elif not life.is_gone:
            self._failed += 1
            check_closed(self.world, life)
            if self._failed > _FAILED_STARTS:
                judge.breach(f"the supervisor has failed to start {self._failed} times")
                return
        await life.gone()
        if life.journal.is_behind:  # an epoch that nobody alive knows was on no disk either
            judge.journal_was_lost = True
        if judge.is_paused and not self.disk.state.paused:
            judge.is_paused = False  # the crash came before the word was on disk
        await asyncio.sleep(_RESTART_S)
        self.life = self._begin()


def check_stopped(world: World, life: Life) -> None:
    """An orderly stop has left nothing behind."""
    for proc in world.living():
        if proc.evidence_delay_s is None:
            world.judge.breach(f"{proc.unit} outlives the stop")
    check_closed(world, life)


def check_closed(world: World, life: Life) -> None:
    """A supervisor that has ended by itself holds nothing and does nothing any more."""
    if left := sorted(name_of(t) for t in life.tasks if not t.done()):
        world.judge.breach(f"tasks outlive the stop: {', '.join(left)}")
    if held := world.open_descriptors(life.machine):
        world.judge.breach(f"descriptors leak: {sorted(m.kind for _, m in held)}")


def name_of(task: asyncio.Task[Any]) -> str:
    """The function that a task runs."""
    work = task.get_coro()
    return getattr(work, "__qualname__", str(work))


class Objections(logging.Handler):
    """Turns what the runtime logs as a bug of its own into a breach."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """A traceback, or a move that the table does not know."""
        life = LIFE.get()
        if life is not None and life.is_gone:
            return
        args = record.args if isinstance(record.args, tuple) else ()
        illegal = next((a for a in args if isinstance(a, IllegalTransitionError)), None)
        if illegal is not None:
            self._world.judge.breach(f"{record.getMessage()} ({illegal.details['story']})")
        elif record.exc_info:
            error = record.exc_info[1]
            trace = error.__traceback__ if error is not None else None
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace else ""
            self._world.judge.breach(f"{record.getMessage()}: {error!r} at {where}")
