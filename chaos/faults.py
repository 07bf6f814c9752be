"""The catalogue of faults: what can be done to a running system, one class each.

A fault is data from a scenario's YAML (`kind` names it) with one method, `inject`, which does it
and says whom it hit and when. Whether the system took it well is judged later, elsewhere.

Invariants
    1. Only processes that the system itself names, and that carry its marker, are hit.
    2. Whatever outlasts `inject` (a stop, a limit, a full disk, spinning processes) is registered
       with the world, which undoes it at the end of the run.
"""

import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field

from cache.errors import DeadlineExceededError, UnderstudyError
from cache.rpc import Hello
from cache.wire import Connection, close_all
from chaos.client import wait_until
from chaos.history import Target
from chaos.load import OpenLoad
from chaos.system import RunningSystem
from engines.contract import CONTROL_PROTOCOL, CONTROL_VERSION
from engines.native.faults import InjectFault
from supervisor.process import is_same, read_process_id
from supervisor.topology.schema import Seconds

__all__ = [
    "CATALOGUE",
    "FaultModel",
    "Injury",
    "Role",
    "World",
]

Role = Literal["primary", "standby", "batch", "zygote", "cache", "gateway", "supervisor"]
SignalName = Literal["KILL", "STOP", "SEGV", "ABRT", "TERM", "INT", "HUP"]

_DEADLY: Final = frozenset({"KILL", "SEGV", "ABRT", "TERM", "INT", "HUP"})
_CALL_S: Final = 5.0
_SPIN: Final = "import os, time; os.nice(0)\nwhile time.time() < float(os.sys.argv[1]): pass"


@dataclass(frozen=True, slots=True)
class Injury:
    """What a fault did."""

    at_ns: int
    targets: tuple[Target, ...] = ()
    breaks_streams: bool = False
    is_deadly: bool = False
    note: str = ""


class World(Protocol):
    """The run, as a fault sees it."""

    system: RunningSystem
    load: OpenLoad
    seed: int
    fault_dir: Path  # where `chaos/hooks/sitecustomize.py` in the children looks for orders

    def locate(self, role: Role) -> Target:
        """Who has the role now, or had it when the supervisor last answered."""

    def send(self, target: Target, sig: signal.Signals) -> bool:
        """Signal a process of this system; False if it is gone. A stop is undone at the end."""

    def on_end(self, undo: Callable[[], None]) -> None:
        """Do this when the run ends, whatever became of it."""


class FaultModel(BaseModel):
    """Base of all faults."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")
    kind: str

    def inject(self, world: World) -> Injury:
        """Do it.

        Raises:
            UnderstudyError: it could not be done; the run ends there, as not judged.
        """
        raise AssertionError(f"{self.kind} does not say what it does in {world}")


class SignalFault(FaultModel):
    """A signal to one process, or to several at once in the given order."""

    kind: Literal["signal"] = "signal"
    target: Role | list[Role]
    signal: SignalName = "KILL"

    def inject(self, world: World) -> Injury:
        """Find all first, then signal all without a pause."""
        roles = self.target if isinstance(self.target, list) else [self.target]
        targets = tuple(world.locate(role) for role in roles)
        sig = signal.Signals[f"SIG{self.signal}"]
        at_ns = time.monotonic_ns()
        for target in targets:
            if not world.send(target, sig):
                raise UnderstudyError(f"{target.role} was gone before the signal")
        deadly = self.signal in _DEADLY
        breaks = deadly and "gateway" in roles
        return Injury(at_ns, targets, breaks_streams=breaks, is_deadly=deadly)


class ContinueFault(FaultModel):
    """SIGCONT to a process that was stopped before."""

    kind: Literal["continue"] = "continue"
    target: Role

    def inject(self, world: World) -> Injury:
        """Only whoever has the role now."""
        target = world.locate(self.target)
        at_ns = time.monotonic_ns()
        world.send(target, signal.SIGCONT)
        return Injury(at_ns, (target,))


class HookFault(FaultModel):
    """What no signal can do to an engine: stall its model thread, exit, answer wrongly.

    Needs an engine that was started with `UNDERSTUDY_FAULTS=1` (see `engines.native.faults`).
    """

    kind: Literal["hook"] = "hook"
    target: Literal["primary", "standby", "batch"]
    action: Literal["stall", "exit", "ignore_sigterm", "wrong_answer", "unhealthy", "slow_health"]
    duration: Seconds = 0.0
    delay: Seconds = 0.0
    status: int = 0

    def inject(self, world: World) -> Injury:
        """Through the engine's own control socket."""
        target = world.locate(self.target)
        order = InjectFault(self.action, self.duration, self.delay, self.status)
        at_ns = time.monotonic_ns()
        is_exit = self.action == "exit"
        path = world.system.state_dir / "run" / f"{target.instance}.sock"
        _order(path, order, may_end=is_exit)
        return Injury(at_ns, (target,), is_deadly=is_exit, note=self.action)


def _order(path: Path, order: InjectFault, *, may_end: bool) -> None:
    connection = Connection.open(path, timeout_s=_CALL_S)
    try:
        hello = Hello(CONTROL_PROTOCOL, CONTROL_VERSION, instance="chaos", role="chaos")
        _, fds = connection.call("hello", hello, timeout_s=_CALL_S)
        close_all(fds)
        connection.call("fault", order, timeout_s=_CALL_S)
    except UnderstudyError:
        if not may_end:
            raise
    finally:
        connection.close()


class BreakStartsFault(FaultModel):
    """From now on a new process of this module ends with exit status 1 while it imports."""

    kind: Literal["break_starts"] = "break_starts"
    module: Literal["cache.daemon", "cache.loader", "engines.zygote", "engines.native",
                    "supervisor.gateway"]  # fmt: skip

    def inject(self, world: World) -> Injury:
        """An order to the hook that every Python child of this system imports first."""
        order = world.fault_dir / self.module
        order.touch()
        world.on_end(lambda: order.unlink(missing_ok=True))
        return Injury(time.monotonic_ns(), note=self.module)


class MendStartsFault(FaultModel):
    """The end of `break_starts`."""

    kind: Literal["mend_starts"] = "mend_starts"

    def inject(self, world: World) -> Injury:
        """All modules."""
        for order in world.fault_dir.iterdir():
            order.unlink()
        return Injury(time.monotonic_ns())


class LimitDescriptorsFault(FaultModel):
    """A running process can open only `spare` more descriptors: EMFILE soon after."""

    kind: Literal["limit_descriptors"] = "limit_descriptors"
    target: Role
    spare: int = 0

    def inject(self, world: World) -> Injury:
        """By `prlimit` on the running process."""
        target = world.locate(self.target)
        numbers = [int(path.name) for path in Path(f"/proc/{target.pid}/fd").iterdir()]
        _, hard = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (max(numbers) + 1 + self.spare, hard))
        return Injury(time.monotonic_ns(), (target,), note=f"{len(numbers)} are open")


class UnlimitDescriptorsFault(FaultModel):
    """The end of `limit_descriptors`."""

    kind: Literal["unlimit_descriptors"] = "unlimit_descriptors"
    target: Role

    def inject(self, world: World) -> Injury:
        """Up to the hard limit."""
        target = world.locate(self.target)
        _, hard = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (hard, hard))
        return Injury(time.monotonic_ns(), (target,))


class FillDiskFault(FaultModel):
    """Nothing more can be written in the state directory (a small file system of its own)."""

    kind: Literal["fill_disk"] = "fill_disk"

    def inject(self, world: World) -> Injury:
        """Write until the file system is full."""
        path = world.system.state_dir / "filler"
        at_ns = time.monotonic_ns()
        with path.open("wb", buffering=0) as stream:
            try:
                while stream.write(bytes(4096)):
                    pass
            except OSError:
                pass  # full: that is what was wanted
        world.on_end(lambda: path.unlink(missing_ok=True))
        return Injury(at_ns, note=f"{path.stat().st_size} bytes")


class FreeDiskFault(FaultModel):
    """The end of `fill_disk`."""

    kind: Literal["free_disk"] = "free_disk"

    def inject(self, world: World) -> Injury:
        """Remove the filler."""
        (world.system.state_dir / "filler").unlink(missing_ok=True)
        return Injury(time.monotonic_ns())


class StarveFault(FaultModel):
    """Processes that spin, so that everything else waits for a CPU."""

    kind: Literal["starve"] = "starve"
    processes: int = 8
    duration: Seconds = 5.0

    def inject(self, world: World) -> Injury:
        """They end by themselves."""
        at_ns = time.monotonic_ns()
        until_s = str(time.time() + self.duration)
        spinning = [
            subprocess.Popen([sys.executable, "-S", "-E", "-c", _SPIN, until_s])
            for _ in range(self.processes)
        ]

        def end() -> None:
            for process in spinning:
                process.kill()
                process.wait()

        world.on_end(end)
        return Injury(at_ns, note=f"{self.processes} processes for {self.duration:g} s")


class ClientsLeaveFault(FaultModel):
    """Clients go away in the middle of their streams, by closing (`fin`) or by reset (`rst`)."""

    kind: Literal["clients_leave"] = "clients_leave"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    how: Literal["fin", "rst"] = "fin"

    def inject(self, world: World) -> Injury:
        """Some of those that have got text."""
        at_ns = time.monotonic_ns()
        gone = world.load.leave(self.share, how=self.how, seed=world.seed)
        return Injury(at_ns, note=f"{len(gone)} left by {self.how}")


class KillNewbornsFault(FaultModel):
    """A crash loop: every new instance of an engine is killed as soon as it is seen."""

    kind: Literal["kill_newborns"] = "kill_newborns"
    target: Literal["primary", "standby", "batch"]
    times: int = 3
    signal: SignalName = "SEGV"
    within: Seconds = 60.0

    def inject(self, world: World) -> Injury:
        """The engine that has the role now first, then each that follows it under its name."""
        first = world.locate(self.target)
        name = first.instance.rpartition("-")[0]
        sig = signal.Signals[f"SIG{self.signal}"]
        at_ns, victims = time.monotonic_ns(), [first]
        world.send(first, sig)
        while len(victims) < self.times:
            target = _next_instance(world, name, {v.pid for v in victims}, self.within)
            world.send(target, sig)
            victims.append(target)
        return Injury(at_ns, tuple(victims), is_deadly=True, note=f"{len(victims)} in a row")


def _next_instance(world: World, name: str, known: set[int], within_s: float) -> Target:
    def look() -> Target | None:
        for process, instance in world.system.marked():
            if instance.rpartition("-")[0] == name and process.pid not in known:
                return Target("newborn", process.pid, process.start_ticks, instance)
        return None

    return wait_until(look, f"a new instance of {name}", timeout_s=within_s)


class KillPromotingFault(FaultModel):
    """The primary dies, and its successor dies in the middle of its own promotion."""

    kind: Literal["kill_promoting"] = "kill_promoting"
    signal: SignalName = "KILL"

    def inject(self, world: World) -> Injury:
        """The standby is stopped first, so that its promotion takes long enough to be hit."""
        primary, standby = world.locate("primary"), world.locate("standby")
        name = standby.instance.rpartition("-")[0]
        world.send(standby, signal.SIGSTOP)
        at_ns = time.monotonic_ns()
        world.send(primary, signal.SIGKILL)

        def is_promoting() -> bool:
            status = world.system.status()
            engines = status.group.engines if status is not None else []
            return any(e.name == name and e.state == "promoting" for e in engines)

        wait_until(is_promoting, f"{name} being promoted", timeout_s=5)
        world.send(standby, signal.Signals[f"SIG{self.signal}"])
        return Injury(at_ns, (primary, standby), is_deadly=True)


class PromoteTwiceFault(FaultModel):
    """Two operators order a switchover at the same moment."""

    kind: Literal["promote_twice"] = "promote_twice"

    def inject(self, world: World) -> Injury:
        """Both must be answered; one may be refused."""
        answers: list[str] = []

        def promote() -> None:
            try:
                reply = world.system.admin.request("POST", "/v1/promote", {}, timeout_s=30)
                answers.append(str(reply.status))
            except OSError as error:
                answers.append(repr(error))

        at_ns = time.monotonic_ns()
        threads = [threading.Thread(target=promote) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=40)
        if not set(answers) <= {"200", "409", "412"} or "200" not in answers:
            raise UnderstudyError(f"two promotions at once were answered {answers}")
        return Injury(at_ns, note=f"answered {', '.join(sorted(answers))}")


class PauseSupervisorFault(FaultModel):
    """The supervisor is stopped for a while and continued, as by a debugger or a full host."""

    kind: Literal["stall_supervisor"] = "stall_supervisor"
    duration: Seconds = 10.0

    def inject(self, world: World) -> Injury:
        """Everything else goes on meanwhile."""
        target = world.locate("supervisor")
        at_ns = time.monotonic_ns()
        world.send(target, signal.SIGSTOP)
        time.sleep(self.duration)
        world.send(target, signal.SIGCONT)
        return Injury(at_ns, (target,), note=f"stopped for {self.duration:g} s")


CATALOGUE = Annotated[
    SignalFault
    | ContinueFault
    | HookFault
    | BreakStartsFault
    | MendStartsFault
    | LimitDescriptorsFault
    | UnlimitDescriptorsFault
    | FillDiskFault
    | FreeDiskFault
    | StarveFault
    | ClientsLeaveFault
    | KillNewbornsFault
    | KillPromotingFault
    | PromoteTwiceFault
    | PauseSupervisorFault,
    Field(discriminator="kind"),
]


def catalogue() -> list[type[FaultModel]]:
    """Every kind of fault, in the order of the page."""
    union = get_args(CATALOGUE)[0]
    return list(get_args(union))


def is_gone(target: Target) -> bool:
    """Whether the process of a target is gone."""
    try:
        process = read_process_id(target.pid)
    except UnderstudyError:
        return True
    return process.start_ticks != target.start_ticks or not is_same(process)


def wait_gone(target: Target, *, timeout_s: float) -> None:
    """Wait until a target is gone.

    Raises:
        DeadlineExceededError: it lives on.
    """
    deadline = time.monotonic() + timeout_s
    while not is_gone(target):
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"the end of {target.role}", timeout_s=timeout_s)
        time.sleep(0.005)
