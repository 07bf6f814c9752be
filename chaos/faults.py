"""The catalogue of faults: what can be done to a running system, one class each.

A fault is data from a scenario's YAML (`kind` names it) with one method, `inject`, which does it
and says whom it hit and when. Whether the system took it well is judged later, elsewhere. Here are
those that hit processes; those of switchovers, of the machine and of clients are in modules of
their own.
"""

import resource
import signal
import time
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from cache.errors import DeadlineExceededError, UnderstudyError
from cache.rpc import Hello
from cache.wire import Connection, close_all
from chaos.client import wait_until
from chaos.clientfaults import ClientsLeaveFault, HostileClientsFault
from chaos.faultmodel import (
    DEADLY,
    FaultModel,
    Injury,
    Role,
    SignalName,
    World,
    streams_elsewhere,
)
from chaos.history import Target
from chaos.machinefaults import (
    BreakFsyncFault,
    CrashWithDumpFault,
    FillDiskFault,
    FreeDiskFault,
    JumpClockFault,
    MendFsyncFault,
    ReadOnlyDiskFault,
    StarveFault,
    StrangerFault,
    StrangerLeavesFault,
)
from chaos.switchfaults import HitSwitchoverFault, KillPromotingFault, PromoteTwiceFault
from engines.contract import CONTROL_PROTOCOL, CONTROL_VERSION
from engines.native.faults import InjectFault
from supervisor.process import is_same, read_process_id
from supervisor.topology.schema import Seconds

__all__ = ["CATALOGUE", "catalogue", "is_gone", "wait_gone"]

_CALL_S: Final = 5.0


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
        spared = streams_elsewhere(world, {t.pid for t in targets}) if "gateway" in roles else ()
        at_ns = time.monotonic_ns()
        for target in targets:
            if not world.send(target, sig):
                raise UnderstudyError(f"{target.role} was gone before the signal")
        deadly = self.signal in DEADLY
        breaks = deadly and "gateway" in roles
        return Injury(at_ns, targets, breaks_streams=breaks, is_deadly=deadly, spared=spared)


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
    """What no signal can do to an engine: stall or break its model thread, exit, answer wrongly.

    Needs an engine that was started with `UNDERSTUDY_FAULTS=1` (see `engines.native.faults`).
    """

    kind: Literal["hook"] = "hook"
    target: Literal["primary", "standby", "batch"]
    action: Literal["stall", "exit", "ignore_sigterm", "wrong_answer", "unhealthy", "slow_health",
                    "tear_streams", "device_error", "device_write", "device_memory"]  # fmt: skip
    duration: Seconds = 0.0
    delay: Seconds = 0.0
    status: int = 0

    def inject(self, world: World) -> Injury:
        """Through the engine's own control socket."""
        target = world.locate(self.target)
        order = InjectFault(self.action, self.duration, self.delay, self.status)
        at_ns = time.monotonic_ns()
        is_deadly = self.action == "exit" or self.action.startswith("device_")
        path = world.system.state_dir / "run" / f"{target.instance}.sock"
        _order(path, order, may_end=is_deadly)
        return Injury(at_ns, (target,), is_deadly=is_deadly, note=self.action)


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
        for module in get_args(BreakStartsFault.model_fields["module"].annotation):
            (world.fault_dir / module).unlink(missing_ok=True)
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
    | BreakFsyncFault
    | MendFsyncFault
    | ReadOnlyDiskFault
    | StarveFault
    | JumpClockFault
    | CrashWithDumpFault
    | StrangerFault
    | StrangerLeavesFault
    | ClientsLeaveFault
    | HostileClientsFault
    | KillNewbornsFault
    | KillPromotingFault
    | PromoteTwiceFault
    | HitSwitchoverFault
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
