"""What an operator may order: switchover, failover, evict, resume, freeze, thaw, restart.

Every command checks its preconditions under a lock (the group's where the pair is concerned, the
engine's own for a batch engine, so that no failover waits for one), says in the error what to do
instead, and returns an operation with measured phases. Repeating a command that is already
fulfilled is not an error. One verb after another, each short: this module is as long as the list.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from signal import SIGCONT
from typing import Final

from supervisor.core.states import ALIVE, EngineState, StateEvent
from supervisor.core.verdict import Verdict
from supervisor.errors import (
    ConflictError,
    NotFoundError,
    PreconditionError,
    StartFailedError,
    UnderstudyError,
)
from supervisor.runtime.chores import FENCE_S
from supervisor.runtime.engine import EngineUnit
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.machine import Handle
from supervisor.runtime.operations import OpenOperation

__all__ = ["GroupCommands"]

_S = EngineState
_OPERATOR: Final = "operator"
_LOCK_S: Final = 5.0
_FAILOVER_S: Final = 10.0
_FIRST_TOKEN_S: Final = 1.0
_MEMORY_BACK_S: Final = 30.0
_STOPPED_S: Final = 0.5


class GroupCommands:
    """Commands for one group."""

    def __init__(self, group: GroupRuntime) -> None:
        self._group = group

    # ------------------------------------------------------------------ checks

    @asynccontextmanager
    async def _exclusive(self, unit: EngineUnit | None = None) -> AsyncIterator[None]:
        """The lock of a batch engine, or the group's, waited for a moment: a recovery is short."""
        self._refuse_before_open()
        lock, what = self._group.lock, self._group.name
        if unit is not None and unit.is_batch:
            lock, what = unit.orders, unit.name
        try:
            async with self._group.services.patience.within(_LOCK_S):
                await lock.acquire()
        except TimeoutError:
            raise ConflictError(
                f"another operation on {what} is under way",
                hint="see 'supervisor history', and try again",
            ) from None
        try:
            yield
        finally:
            lock.release()
            self._group.reconcile()

    def _refuse_before_open(self) -> None:
        if not self._group.is_open:
            raise ConflictError(
                "the supervisor has just started and still looks at what it found",
                hint="try again in a moment",
            )

    def _refuse_while_paused(self) -> None:
        if self._group.services.is_paused:
            raise PreconditionError(
                "paused: no process is signalled or started", hint="run 'supervisor unpause' first"
            )

    @staticmethod
    def _refuse_against_the_operator(unit: EngineUnit, cause: str) -> None:
        """A step of the ladder may have waited while the operator gave his word."""
        if cause != _OPERATOR and unit.is_held:
            raise ConflictError(
                f"{unit.name} is held by the operator",
                hint=f"see 'supervisor thaw {unit.name}' and 'supervisor resume {unit.name}'",
            )

    def check_epoch(self, expected: int | None) -> None:
        """Refuse a caller whose view is old.

        Raises:
            ConflictError: the group has moved on.
        """
        if expected is not None and expected != self._group.epoch:
            raise ConflictError(
                f"{self._group.name} is at epoch {self._group.epoch}, not {expected}",
                hint="look at 'supervisor status' and decide again",
                details={"epoch": self._group.epoch},
            )

    def successor(self, to: str | None) -> EngineUnit:
        """The standby that would take over.

        Raises:
            NotFoundError, PreconditionError: no such engine, or none that may be promoted.
        """
        standbys = self._group.standbys
        if to is not None:
            unit = next((e for e in self._group.engines if e.name == to), None)
            if unit is None:
                raise NotFoundError(f"{self._group.name} has no engine {to!r}")
            if unit not in standbys:
                raise PreconditionError(
                    f"{to} is {unit.state}, only a standby can be promoted",
                    hint="wait until 'supervisor status' shows it as standby",
                )
            return unit
        if not standbys:
            raise PreconditionError(
                f"{self._group.name} has no standby now",
                hint="wait until 'supervisor status' shows one",
            )
        return standbys[0]

    def check_switchover(self, to: str | None) -> EngineUnit:
        """Everything that must hold before a switchover; returns the successor."""
        self._refuse_while_paused()
        if self._group.primary is None:
            raise PreconditionError(
                f"{self._group.name} has no primary to switch from", hint="see 'supervisor status'"
            )
        return self.successor(to)

    # ---------------------------------------------------------------- takeover

    async def switch_over(self, to: str | None, expected_epoch: int | None) -> OpenOperation:
        """Planned switchover: hand all slots to the standby."""
        async with self._exclusive():
            self.check_epoch(expected_epoch)
            successor = self.check_switchover(to)
            operation = await self._group.recovery.switch_over(successor, cause=_OPERATOR)
        await self._await_first_token(operation)
        return operation

    async def fail_over(self, to: str | None, expected_epoch: int | None) -> OpenOperation:
        """Forced failover: kill the primary, promote the standby."""
        group = self._group
        async with self._exclusive():
            self.check_epoch(expected_epoch)
            group.preferred = self.check_switchover(to).name
            primary, epoch = group.primary, group.epoch
            assert primary is not None  # noqa: S101 - checked under the lock
            primary.death_was_ours = True
            primary.judge(Verdict.DEAD, "a failover was ordered")
        done = await group.wait_until(
            lambda: group.epoch > epoch and group.is_serving, timeout_s=_FAILOVER_S
        )
        operation = group.operations.newest(group.name, "failover")
        if not done or operation is None:
            raise StartFailedError(
                f"{group.name} has no new primary after {_FAILOVER_S:g} s",
                hint="see 'supervisor events'",
            )
        await self._await_first_token(operation)
        return operation

    async def _await_first_token(self, operation: OpenOperation) -> None:
        """Streams were cut: give their first token a moment, so that the answer has the figure."""
        if operation.cut_streams:
            await self._group.wait_until(
                lambda: "first_token" in operation.phases_ms, timeout_s=_FIRST_TOKEN_S
            )

    # ------------------------------------------------------------------- batch

    def _batch(self, name: str) -> EngineUnit:
        unit = self._group.engine(name)
        if not unit.is_batch:
            raise PreconditionError(
                f"{name} is no batch engine", hint="only batch engines give way; see 'promote'"
            )
        return unit

    async def evict(self, name: str, *, hold: bool, cause: str = _OPERATOR) -> OpenOperation:
        """Kill the batch engine and wait until its memory is back."""
        group, unit = self._group, self._batch(name)
        async with self._exclusive(unit):
            self._refuse_while_paused()
            self._refuse_against_the_operator(unit, cause)
            operation = group.operations.open("evict", group=group.name, engine=name, cause=cause)
            operation.text = f"evict {name}"
            unit.is_held = hold
            try:
                handle = await self._end_batch(unit, operation)
            except UnderstudyError as error:
                operation.finish("failed", error=str(error))
                raise
        if handle is not None:  # the kernel needs up to seconds: nobody else waits for that
            await handle.wait_reaped(timeout_s=_MEMORY_BACK_S)
        operation.phase("memory")
        operation.finish("done")
        total_s = operation.phases_ms["total"] / 1000
        group.services.metrics.eviction(group.name, name, "done", total_s)
        group.services.metrics.batch_action(group.name, "evict", "done", total_s)
        unit.emit("evicted", f"{name} was evicted", phases_ms=operation.rounded_ms())
        return operation

    async def _end_batch(self, unit: EngineUnit, operation: OpenOperation) -> Handle | None:
        """Fence it, whoever began; the process whose memory comes back, if there was one."""
        await self._end_of_fence(unit)
        handle = None
        if unit.state in ALIVE:
            unit.death_was_ours = True
        if unit.state in ALIVE or unit.state is _S.FENCING:  # a stop ends a fence half-way
            handle = unit.handle
            operation.cut_streams = await self._group.chores.fence_engine(unit)
        if unit.state is _S.UNKILLABLE:
            raise PreconditionError(
                f"{unit.name} cannot be killed, its memory stays taken", hint=f"see {unit.log_path}"
            )
        if unit.state is not _S.EVICTED:  # at once, or it would be started again
            unit.apply(StateEvent.EVICTION_COMPLETED)
        operation.phase("fence")
        return handle

    async def _end_of_fence(self, unit: EngineUnit) -> None:
        """Somebody fences it already: wait for the outcome."""
        await self._group.wait_until(lambda: unit.state is not _S.FENCING, timeout_s=2 * FENCE_S)

    async def resume(self, name: str, *, cause: str = _OPERATOR) -> OpenOperation:
        """Start an evicted (or given up) engine again and wait until it serves."""
        group = self._group
        unit = group.engine(name)
        self._refuse_before_open()
        self._refuse_while_paused()
        self._refuse_against_the_operator(unit, cause)
        operation = group.operations.open("resume", group=group.name, engine=name, cause=cause)
        operation.text = f"resume {name}"
        unit.is_held = False
        if unit.state is _S.FROZEN:
            self._thaw(unit)
        elif unit.state in (_S.EVICTED, _S.FATAL):
            unit.starts.forgive()
            unit.apply(StateEvent.RESUMED)
        group.reconcile()
        wanted = {_S.BATCH} if unit.is_batch else {_S.STANDBY, _S.PRIMARY}
        done = await group.wait_until(
            lambda: unit.state in wanted or unit.state is _S.FATAL,
            timeout_s=group.settings.health.start_timeout,
        )
        operation.phase("start")
        if not done or unit.state is _S.FATAL:
            operation.finish("failed", error=unit.failure)
            raise StartFailedError(
                f"{name} did not come back: {unit.failure or unit.state}",
                hint=f"see {unit.log_path}",
            )
        operation.finish("done")
        total_s = operation.phases_ms["total"] / 1000
        if unit.is_batch:
            group.services.metrics.batch_action(group.name, "resume", "done", total_s)
        unit.emit("resumed", f"{name} is back", phases_ms=operation.rounded_ms())
        return operation

    async def freeze(self, name: str, *, cause: str = _OPERATOR) -> OpenOperation:
        """Stop the batch engine's compute at once; its memory stays."""
        group, unit = self._group, self._batch(name)
        async with self._exclusive(unit):
            self._refuse_while_paused()
            if unit.state not in (_S.BATCH, _S.FROZEN) or unit.handle is None:
                raise PreconditionError(
                    f"{name} is {unit.state}, only a serving batch engine can be frozen"
                )
            operation = group.operations.open("freeze", group=group.name, engine=name, cause=cause)
            operation.text = f"freeze {name}"
            # First, so that the ladder does not take it for what it has frozen itself.
            unit.is_held = unit.is_held or cause == _OPERATOR
            if unit.state is not _S.FROZEN:
                unit.freeze()
                await unit.wait_stopped(timeout_s=_STOPPED_S)
            operation.phase("freeze")
            operation.finish("done")
        total_s = operation.phases_ms["total"] / 1000
        group.services.metrics.batch_action(group.name, "freeze", "done", total_s)
        return operation

    async def thaw(self, name: str, *, cause: str = _OPERATOR) -> OpenOperation:
        """Let a frozen batch engine go on."""
        group, unit = self._group, self._batch(name)
        async with self._exclusive(unit):
            self._refuse_while_paused()
            self._refuse_against_the_operator(unit, cause)
            if unit.state not in (_S.BATCH, _S.FROZEN):
                raise PreconditionError(f"{name} is {unit.state}, not frozen",
                                        hint=f"see 'supervisor resume {name}'")  # fmt: skip
            operation = group.operations.open("thaw", group=group.name, engine=name, cause=cause)
            operation.text = f"thaw {name}"
            unit.is_held = False
            if unit.state is _S.FROZEN:
                self._thaw(unit)
            operation.phase("thaw")
            operation.finish("done")
        total_s = operation.phases_ms["total"] / 1000
        group.services.metrics.batch_action(group.name, "thaw", "done", total_s)
        return operation

    @staticmethod
    def _thaw(unit: EngineUnit) -> None:
        if unit.handle is not None:
            unit.handle.send_signal(SIGCONT)
        unit.void_samples()
        unit.apply(StateEvent.THAWED)

    # ----------------------------------------------------------------- restart

    async def restart(self, name: str) -> OpenOperation:
        """Replace an engine's process. A primary is switched over first, by the operator."""
        group = self._group
        unit = group.engine(name)
        if unit.state in (_S.EVICTED, _S.FATAL):
            return await self.resume(name)
        async with self._exclusive(unit):
            self._refuse_while_paused()
            if unit is group.primary:
                raise PreconditionError(
                    f"{name} is the primary", hint="run 'supervisor promote' first, then restart it"
                )
            await self._end_of_fence(unit)
            if unit.state in ALIVE:
                unit.death_was_ours = True
                await group.chores.fence_engine(unit)
        return await self.resume(name)

    # ------------------------------------------------------------------- fence

    async def attest(self, name: str, *, is_confirmed: bool) -> OpenOperation:
        """The operator says that an engine which cannot be killed will never act again.

        Raises:
            PreconditionError: it can be killed, or (without `is_confirmed`) what would be attested.
        """
        group = self._group
        async with self._exclusive():
            unit = group.engine(name)
            strays = group.strays.unkillable(name)
            if unit.state is not _S.UNKILLABLE and not strays:
                raise PreconditionError(
                    f"{name} is {unit.state}, not unkillable",
                    hint="a fence is the supervisor's own work; see 'supervisor status'",
                )
            pids = [left.process.pid for left in strays]
            if unit.state is _S.UNKILLABLE and unit.pid is not None:
                pids.append(unit.pid)
            if not is_confirmed:
                raise PreconditionError(
                    f"{name} (pid {', '.join(map(str, pids))}) did not end after SIGKILL; "
                    "nobody is promoted in its place while it might still write or answer",
                    hint="look at /proc/PID/stack and /proc/PID/status: one that waits in the "
                    "kernel with SIGKILL pending never runs its own code again. Then attest it "
                    f"with 'supervisor fence {name} --confirm'",
                    details={"pids": pids},
                )
            operation = group.operations.open("fence", group=group.name, engine=name,
                                              cause=_OPERATOR)  # fmt: skip
            operation.text = f"{name} is attested to be harmless"
            group.strays.attest(name)
            if unit.state is _S.UNKILLABLE:
                unit.attest_harmless()
            operation.phase("attest")
            operation.finish("done")
            group.services.metrics.attested(group.name, name)
            unit.emit(
                "fence_attested", f"the operator attests that {name} can do no harm", pids=pids
            )
        return operation
