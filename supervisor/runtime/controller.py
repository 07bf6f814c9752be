"""The admin API's view of the runtime: finds the group, checks, lets `GroupCommands` do it."""

import asyncio
from typing import Any, Final

from supervisor.admin.controller import Operation
from supervisor.errors import ConflictError, NotFoundError, PreconditionError
from supervisor.runtime.commands import GroupCommands
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.supervisor import SupervisorRuntime

__all__ = ["RuntimeController"]


_REST_S: Final = 10.0


class RuntimeController:
    """Implements `supervisor.admin.controller.Controller`."""

    def __init__(self, runtime: SupervisorRuntime) -> None:
        self._runtime = runtime
        self._commands = {g.name: GroupCommands(g) for g in runtime.groups}

    def status(self) -> dict[str, Any]:
        """Body of `GET /v1/status`."""
        return self._runtime.status()

    async def topology(self) -> dict[str, Any]:
        """Body of `GET /v1/topology`."""
        return self._runtime.services.topology.model_dump(mode="json")

    async def is_live(self) -> bool:
        """Whether the control loop runs."""
        return not self._runtime.services.is_stopping

    async def readiness(self) -> dict[str, bool]:
        """Whether each group serves."""
        return {g.name: g.is_serving and self._runtime.is_ready for g in self._runtime.groups}

    async def history(self) -> list[dict[str, Any]]:
        """Recent operations, oldest first."""
        return self._runtime.operations.history()

    async def operation(self, operation_id: str) -> Operation | None:
        """One operation."""
        return self._runtime.operations.find(operation_id)

    def _group(self, name: str | None) -> GroupRuntime:
        if name is None:
            if len(self._runtime.groups) > 1:
                names = ", ".join(g.name for g in self._runtime.groups)
                raise PreconditionError("there are several groups", hint=f"name one of {names}")
            return self._runtime.groups[0]
        group = next((g for g in self._runtime.groups if g.name == name), None)
        if group is None:
            raise NotFoundError(f"there is no group {name!r}", hint="see 'supervisor status'")
        return group

    def _owner(self, engine: str) -> GroupRuntime:
        for group in self._runtime.groups:
            if any(e.name == engine for e in group.engines):
                return group
        names = ", ".join(e.name for g in self._runtime.groups for e in g.engines)
        raise NotFoundError(f"there is no engine {engine!r}", hint=f"engines are {names}")

    def _planned(self, kind: str, group: GroupRuntime, engine: str, text: str) -> Operation:
        return Operation(
            id="dry-run", kind=kind, group=group.name, engine=engine, state="planned",
            cause="operator", started=self._runtime.services.clock.time(),
            epoch=group.epoch, text=text,
        )  # fmt: skip

    async def promote(
        self, group: str | None, to: str | None, expected_epoch: int | None, dry_run: bool
    ) -> Operation:
        """Planned switchover."""
        target = self._group(group)
        commands = self._commands[target.name]
        if dry_run:
            commands.check_epoch(expected_epoch)
            new = commands.check_switchover(to)
            return self._planned("switchover", target, new.name, f"would promote {new.name}")
        return (await commands.switch_over(to, expected_epoch)).frozen()

    async def failover(
        self, group: str | None, to: str | None, expected_epoch: int | None, dry_run: bool
    ) -> Operation:
        """Forced failover."""
        target = self._group(group)
        commands = self._commands[target.name]
        if dry_run:
            commands.check_epoch(expected_epoch)
            new = commands.check_switchover(to)
            old = target.primary.name if target.primary else "nobody"
            return self._planned(
                "failover", target, new.name, f"would kill {old}, promote {new.name}"
            )
        return (await commands.fail_over(to, expected_epoch)).frozen()

    async def evict(self, engine: str, hold: bool, dry_run: bool) -> Operation:
        """Kill the batch engine."""
        target = self._owner(engine)
        if dry_run:
            return self._planned("evict", target, engine, f"would evict {engine}")
        return (await self._commands[target.name].evict(engine, hold=hold)).frozen()

    async def resume(self, engine: str, dry_run: bool) -> Operation:
        """Start an evicted engine."""
        target = self._owner(engine)
        if dry_run:
            return self._planned("resume", target, engine, f"would resume {engine}")
        return (await self._commands[target.name].resume(engine)).frozen()

    async def freeze(self, engine: str) -> Operation:
        """Stop the batch engine's compute."""
        return (await self._commands[self._owner(engine).name].freeze(engine)).frozen()

    async def thaw(self, engine: str) -> Operation:
        """Let it go on."""
        return (await self._commands[self._owner(engine).name].thaw(engine)).frozen()

    async def restart(self, engine: str) -> Operation:
        """Replace an engine's process."""
        return (await self._commands[self._owner(engine).name].restart(engine)).frozen()

    async def fence(self, engine: str, confirm: bool) -> Operation:
        """Attest that an unkillable engine is harmless."""
        commands = self._commands[self._owner(engine).name]
        return (await commands.attest(engine, is_confirmed=confirm)).frozen()

    async def pause(self) -> Operation:
        """No signal, no start, no promotion until `unpause`."""
        answer = self._set_paused(is_paused=True)
        # What was under way may still signal and start; the answer means that nothing does.
        groups = self._runtime.groups
        rests = await asyncio.gather(*(g.come_to_rest(timeout_s=_REST_S) for g in groups))
        if not all(rests):
            raise ConflictError(
                "paused, but an operation that began before is still under way",
                hint="see 'supervisor history'; nothing new begins",
            )
        return answer

    async def unpause(self) -> Operation:
        """Automation goes on."""
        return self._set_paused(is_paused=False)

    def _set_paused(self, *, is_paused: bool) -> Operation:
        if self._runtime.services.is_stopping:
            raise PreconditionError(
                "the supervisor is stopping, and stops its processes",
                hint="wait until it has ended",
            )
        self._runtime.services.is_paused = is_paused
        self._runtime.services.metrics.set_paused(is_paused)
        word = "paused" if is_paused else "unpaused"
        self._runtime.services.events.append(word, f"automation is {word} by the operator")
        self._runtime.keeping.save()
        for group in self._runtime.groups:
            group.reconcile()
        self._runtime.fleet.reconcile()
        return self._at_once("pause" if is_paused else "unpause", f"automation is {word}")

    async def ack(self, group: str | None) -> Operation:
        """Forget past failovers by judgement."""
        for target in self._runtime.groups if group is None else [self._group(group)]:
            target.acknowledge()
        return self._at_once(
            "ack", "failovers by judgement are possible again, what has given up is started again"
        )

    async def stop(self) -> Operation:
        """Begin the orderly stop; the answer is sent before anything ends."""
        self._runtime.stop_requested.set()
        return self._at_once("stop", "stopping")

    def _at_once(self, kind: str, text: str) -> Operation:
        """An operation that is done when it is answered."""
        now_s = self._runtime.services.clock.time()
        return Operation(id=f"{kind}-{now_s:.6f}", kind=kind, cause="operator", started=now_s,
                         duration_ms=0.0, text=text)  # fmt: skip
