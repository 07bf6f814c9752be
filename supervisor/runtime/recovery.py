"""Recovery: performs ordered decisions and planned switchovers, and measures every phase.

Invariants
    1. Order: cut, fence, promote, verify, route. The first step that fails ends the recovery; the
       group is looked at again and a new decision is taken.
    2. Nothing slow is on the path: no fsync, no reap, no EOF, no disk, no daemon. The events that
       are appended here are written by a thread.
    3. Verification looks at a result that the standby produced beforehand; it asks nothing.
"""

from typing import TYPE_CHECKING, Final

from supervisor.core.decide import CutRoute, Decision, Fence, Promote, PublishRoute, RecoveryAction
from supervisor.core.states import SERVING, EngineState, Facts, StateEvent
from supervisor.core.verdict import Verdict
from supervisor.errors import PreconditionError, UnderstudyError
from supervisor.runtime.operations import OpenOperation
from supervisor.runtime.routing import CUT_ACK_S

if TYPE_CHECKING:
    from supervisor.runtime.engine import EngineUnit
    from supervisor.runtime.group import GroupRuntime

__all__ = ["Recovery"]

_ASSUME_S: Final = 2.0
_DEMOTE_S: Final = 1.0
_ROUTE_S: Final = 0.25
_INTERNAL: Final = 500  # an error that says nothing to who ordered: a connection that broke


class Recovery:
    """Failovers and switchovers of one group."""

    def __init__(self, group: "GroupRuntime") -> None:
        self._group = group
        self._loss: tuple[str, int] | None = None  # why and when the group lost its primary

    # ---------------------------------------------------------------- failover

    async def run(self) -> None:
        """Decide under the group's lock, and perform the recovery of that decision in order."""
        group = self._group
        async with group.lock:
            decision = group.decide()  # anew: an operation that held the lock may have done it
            if not decision.recovery:
                return
            operation = self._open(decision)
            try:
                for action in decision.recovery:
                    await self._perform(action, operation)
            except Exception as error:
                operation.finish("failed", error=str(error))
                group.services.events.append("recovery_failed", f"{operation.text}: {error}",
                                             group=group.name, operation=operation.id)  # fmt: skip
                self._count(operation, "failed")
                if not isinstance(error, UnderstudyError):
                    raise  # a bug of ours: whoever runs this logs it
                return
            self._done(operation)

    def _open(self, decision: Decision) -> OpenOperation:
        group = self._group
        fenced = next((a.engine for a in decision.recovery if isinstance(a, Fence)), "")
        promoted = next((a for a in decision.recovery if isinstance(a, Promote)), None)
        if fenced:
            self._loss = self._cause(group.engine(fenced))
        cause, seen_ns = self._loss or ("start", group.services.clock.monotonic_ns())
        # Without a successor this only fences; the failover is what later promotes somebody.
        kind = "fencing" if promoted is None else "failover" if self._loss else "promotion"
        operation = group.operations.open(
            kind, group=group.name,
            engine=promoted.engine if promoted else fenced, cause=cause, started_ns=seen_ns,
        )  # fmt: skip
        operation.text = decision.sentence
        operation.phase("detect")
        return operation

    def _cause(self, old: "EngineUnit") -> tuple[str, int]:
        """Why the old primary goes, and when it was last seen alive and well."""
        now_ns = self._group.services.clock.monotonic_ns()
        if old.death_was_ours:
            return "forced", now_ns
        if old.verdict is Verdict.HUNG:
            self._group.judged.count(now_ns / 1e9)
            return "hung", old.quiet_since_ns or now_ns
        if old.verdict is not Verdict.DEAD:
            self._group.judged.count(now_ns / 1e9)
            return "wrong", now_ns
        return "dead", old.last_alive_ns or now_ns

    async def _perform(self, action: RecoveryAction, operation: OpenOperation) -> None:
        group = self._group
        match action:
            case CutRoute():
                await self._cut(operation)
            case Fence(name):
                await group.chores.fence_engine(group.engine(name))
                operation.phase("fence")
            case Promote(name, epoch):
                await self._promote(group.engine(name), epoch, operation)
            case PublishRoute():
                await self._publish(operation)

    async def _cut(self, operation: OpenOperation) -> None:
        group = self._group
        group.is_cut = True
        operation.cut_streams = await group.fleet.routes.push(timeout_s=CUT_ACK_S)

    async def _promote(self, unit: "EngineUnit", epoch: int, operation: OpenOperation) -> None:
        group = self._group
        others = [e for e in group.engines if e is not unit and not e.is_batch]
        _check_fit(unit)
        await self._reach(unit)
        _check_fit(unit)
        unproven = (EngineState.FENCING, EngineState.UNKILLABLE)
        fenced = not any(e.state in SERVING or (e.state in unproven and e.may_act) for e in others)
        unit.apply(StateEvent.PROMOTION_ORDERED, Facts(predecessor_fenced=fenced))
        group.set_epoch(epoch)  # before the order: one whose answer is lost may be obeyed
        try:
            assumed = await unit.assume("primary", epoch, timeout_s=_ASSUME_S)
        except Exception as error:  # whatever it is: it may act as primary now, or not
            unit.judge(Verdict.DEAD, f"did not take over: {error}")
            raise
        operation.epoch = epoch
        operation.adopted = len(assumed.adopted)
        operation.phase("promote")
        if not unit.is_proven:
            unit.judge(Verdict.DEAD, "answers the canary wrongly")
            raise PreconditionError(f"{unit.name} answers the canary wrongly")
        unit.apply(StateEvent.PRIMARY_CONFIRMED, Facts(predecessor_fenced=True))
        operation.phase("verify")
        unit.emit("promoted", f"{unit.name} is primary of epoch {epoch}", epoch=epoch,
                  adopted=len(assumed.adopted), map_ms=round(assumed.map_ms, 3),
                  adopt_ms=round(assumed.adopt_ms, 3))  # fmt: skip
        group.release_lost_gateways(unit)

    @staticmethod
    async def _reach(unit: "EngineUnit") -> None:
        if unit.is_connected:
            return
        instance = unit.instance
        try:
            await unit.reach(timeout_s=_ASSUME_S)
        except PreconditionError:
            raise  # our own lack: it stays what it is, and is tried again
        except UnderstudyError as error:
            if unit.instance == instance:
                unit.judge(Verdict.DEAD, f"cannot be reached: {error}")
            raise

    async def _publish(self, operation: OpenOperation) -> None:
        group = self._group
        group.is_cut = False
        await group.fleet.routes.push(timeout_s=_ROUTE_S)
        operation.phase("route")
        self._loss = None

    # -------------------------------------------------------------- switchover

    async def switch_over(self, new: "EngineUnit", *, cause: str) -> OpenOperation:
        """Hand every slot from the living primary to a standby; nothing drains, nothing breaks.

        Called under the group's lock. When the old primary does not give up in time it is fenced
        and the switchover goes on as a failover.

        Raises:
            PreconditionError: the new one was lost meanwhile; a failover follows by itself.
            UnderstudyError: the new one did not take over; likewise.
        """
        group = self._group
        old = group.primary
        assert old is not None  # noqa: S101 - checked by the caller, under the lock
        operation = group.operations.open(
            "switchover", group=group.name, engine=new.name, cause=cause
        )
        operation.text = f"switchover from {old.name} to {new.name}"
        operation.phase("detect")
        epoch = group.epoch + 1
        try:
            await self._reach(new)
            await self._drain(old, new, operation)
            await self._cut(operation)
            await self._demote(old, epoch)
            operation.phase("fence")
            await self._promote(new, epoch, operation)
            await self._publish(operation)
        except UnderstudyError as error:
            operation.finish("failed", error=str(error))
            self._count(operation, "failed")
            if new.verdict is Verdict.DEAD and error.http_status == _INTERNAL:
                raise PreconditionError(
                    f"{new.name} was lost during the switchover: {error.message}",
                    hint="the group goes on by itself; order it again once 'supervisor status' "
                    "shows a standby",
                ) from error
            raise
        self._done(operation)
        return operation

    async def _drain(self, old: "EngineUnit", new: "EngineUnit", operation: OpenOperation) -> None:
        """Let streams end that nobody could go on with; one that does not drain is no obstacle.

        Raises:
            UnderstudyError: the successor is lost meanwhile, and the old one stays what it is.
        """
        if not old.drains:
            return
        group, instance = self._group, new.instance

        def is_lost() -> bool:
            return new not in group.standbys or new.instance != instance

        timeout_s = group.settings.failover.drain_timeout
        began_s = group.services.clock.monotonic()
        try:
            left = await old.drain(timeout_s=timeout_s, is_in_vain=is_lost)
            if is_lost():
                await old.assume("primary", group.epoch, timeout_s=_ASSUME_S)  # it serves again
        except UnderstudyError as error:
            old.emit("drain_failed", f"{old.name} does not drain: {error}")
        else:
            if is_lost():
                raise PreconditionError(
                    f"{new.name} was lost while {old.name} drained",
                    hint="wait until 'supervisor status' shows a standby, and order it again",
                )
            if left:
                took_s = group.services.clock.monotonic() - began_s
                text = f"{old.name} still has {left} streams after {took_s:.1f} s: they end"
                old.emit("drain_incomplete", text)
        operation.phase("drain")

    async def _demote(self, old: "EngineUnit", epoch: int) -> None:
        old.apply(StateEvent.DEMOTION_ORDERED)
        try:
            await old.assume("standby", epoch, timeout_s=_DEMOTE_S)
        except UnderstudyError as error:
            old.emit("demotion_failed", f"{old.name} did not give up its role: {error}")
            await self._group.chores.fence_engine(old)
            return
        old.apply(StateEvent.STANDBY_CONFIRMED)

    # ------------------------------------------------------------------- epoch

    async def catch_up(self) -> None:
        """A gateway knows a higher epoch than we do, and refuses our routes: go above it.

        The epoch died with its engine and with the journal, and the gateway had not yet read of it
        when it was adopted.
        """
        group = self._group
        async with group.lock:
            known = group.highest_known_epoch
            if known <= group.epoch:
                return
            primary = group.primary
            group.set_epoch(known if primary is None else known + 1)
            if primary is None:
                return
            try:
                await primary.assume("primary", group.epoch, timeout_s=_ASSUME_S)
            except UnderstudyError as error:
                primary.judge(Verdict.DEAD, f"did not take epoch {group.epoch}: {error}")
                raise
            primary.role_epoch = group.epoch

    # ----------------------------------------------------------------- account

    def _done(self, operation: OpenOperation) -> None:
        group = self._group
        operation.finish("done")
        group.services.events.append(
            f"{operation.kind}_completed", operation.text, group=group.name,
            operation=operation.id, epoch=operation.epoch, cause=operation.cause,
            phases_ms=operation.rounded_ms(),
        )  # fmt: skip
        self._count(operation, "done")

    def _count(self, operation: OpenOperation, outcome: str) -> None:
        metrics, name = self._group.services.metrics, self._group.name
        if operation.kind == "failover":
            metrics.failover(name, operation.cause, outcome, operation.phases_s())
        elif operation.kind == "switchover":
            metrics.switchover(name, outcome, operation.phases_s())


def _check_fit(unit: "EngineUnit") -> None:
    """It may have died while the old primary was fenced; whoever is fit then is chosen anew.

    Raises:
        PreconditionError: it is not there to be promoted any more.
    """
    if unit.state not in (EngineState.STANDBY, EngineState.READY):
        raise PreconditionError(f"{unit.name} is {unit.state} by now")
