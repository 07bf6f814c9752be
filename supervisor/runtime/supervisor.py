"""The whole at run time: groups, gateways, journal; start, adopt, stop."""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any, Final

from cache.errors import UnderstudyError
from supervisor.core.restart import RestartPolicy
from supervisor.core.states import EngineState
from supervisor.errors import StartFailedError
from supervisor.gateway.protocol import FirstToken, GroupRoute
from supervisor.observe.journal import Journal, JournalState
from supervisor.observe.looplag import LoopLag
from supervisor.runtime.adoption import adopt
from supervisor.runtime.degraded import Degraded
from supervisor.runtime.devicememory import DeviceMemoryWatch
from supervisor.runtime.gateways import GatewayFleet
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.keeping import Keeping
from supervisor.runtime.keyedtasks import KeyedTasks
from supervisor.runtime.operations import OperationLog
from supervisor.runtime.services import Services
from supervisor.runtime.status import gateway_status, group_status
from supervisor.runtime.strays import Strays
from supervisor.runtime.unit import Unit
from supervisor.runtime.watch import GroupWatch
from supervisor.runtime.worker import GatewayUnit

__all__ = ["SupervisorRuntime"]

log = logging.getLogger(__name__)

_WORKER_POLICY: Final = RestartPolicy(
    stable_after_s=5.0, max_backoff_s=10.0, max_young_deaths=10_000
)
"""Gateway workers never give up: without them nobody is answered."""

_JANITOR_S: Final = 1.0
_SWEEP_ROUNDS: Final = 5  # reading the environment of every process of the user costs milliseconds
_GRACE_S: Final = 3.0
_FENCE_S: Final = 10.0
_BURIAL_S: Final = 15.0  # one that cannot be killed must not keep us


class SupervisorRuntime:
    """Everything that one supervisor runs."""

    def __init__(
        self, services: Services, journal: Journal, state: JournalState, lag: LoopLag
    ) -> None:
        self.services = services
        self._former_gateways = {p.instance for p in state.processes if p.kind == "gateway"}
        services.lag = lag
        self._degraded = Degraded(services, self._troubles)
        self.operations = OperationLog(services.clock)
        self.stop_requested = asyncio.Event()
        self.is_ready = False
        self._is_in_charge = False  # we have looked at what was there
        self.admin_address = ""
        self.admin_trouble = ""  # why it cannot be reached over TCP
        topology = services.topology
        services.is_paused = state.paused
        loop = asyncio.get_running_loop()
        services.metrics.watch(
            events=services.events, journal=journal, loop_lag=lag,
            count_tasks=lambda: len(asyncio.all_tasks(loop)),
        )  # fmt: skip
        self.fleet = GatewayFleet(
            services,
            topology.gateway,
            policy=_WORKER_POLICY,
            routes=self._routes,
            on_first_token=self._first_token,
            on_worker_death=self._gateway_died,
        )
        self.strays = Strays(services, self.units)
        self.groups: list[GroupRuntime] = []
        self.keeping = Keeping(services, journal, state, groups=self.groups, units=self.units)
        self.groups += [
            GroupRuntime(services, g, self.fleet, self.operations, strays=self.strays,
                         on_epoch=self.keeping.save)
            for g in topology.groups
        ]  # fmt: skip
        self.keeping.recall()
        self._watches = [GroupWatch(g, lag) for g in self.groups]
        self._device_memory = DeviceMemoryWatch(services, self.groups)
        self._janitor: asyncio.Task[None] | None = None
        self._tasks = KeyedTasks(topology.name, on_end=lambda: None)
        self._started_s = services.clock.monotonic()

    # ------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Adopt what is there, start the rest, wait until every group serves.

        Where something was adopted, or automation is paused, a group that does not come up is no
        reason to end the others: the supervisor goes on, as it would later.

        Raises:
            UnderstudyError: something that is needed did not come up; the caller stops all.
        """
        found = await adopt(self)
        living = {w.instance for w in self.fleet.workers if w.is_alive}  # also one that is slow
        for instance in self._former_gateways - living:
            self._gateway_died(instance)  # while no supervisor was there to see it
        if found.adopted or found.ended:
            log.info("adopted %d, ended %d processes", len(found.adopted), len(found.ended))
        was_there = bool(found.adopted) or any(u.is_alive for u in self.units())
        must_serve = not (was_there or self.services.is_paused)
        await self.keeping.reserve_epochs()
        self.fleet.open(may_wait=not must_serve)
        self._is_in_charge = True
        self._janitor = asyncio.get_running_loop().create_task(self._keep_house())
        self.fleet.reconcile()
        for group, watch in zip(self.groups, self._watches, strict=True):
            group.open()
            watch.start()
        self._device_memory.start()
        await self.fleet.routes.push(timeout_s=2.0)
        try:
            await self._all_serve()
        except UnderstudyError as error:
            if must_serve and not self.services.is_paused and not self._has_unkillable():
                raise
            self.services.events.append("start_incomplete", str(error))
        if self.stop_requested.is_set():
            return
        self.is_ready = True
        self.keeping.save()
        idle = ", ".join(g.name for g in self.groups if not g.is_serving)
        text = f"is up, but {idle} does not serve yet" if idle else "serves"
        self.services.events.append("started", f"{self.services.topology.name} {text}")
        self.services.observer.ready(self.status())

    def _has_unkillable(self) -> bool:
        """Whether only the operator's word helps, which needs a supervisor that hears it."""
        states = (e.state for g in self.groups for e in g.engines)
        return EngineState.UNKILLABLE in states

    async def _all_serve(self) -> None:
        if self.services.is_paused:
            return
        waits = [asyncio.ensure_future(self._first_service(g)) for g in self.groups]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:  # of the others, where one group has failed
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not self.stop_requested.is_set() and not await self.fleet.first_ready(timeout_s=60.0):
            raise StartFailedError(
                "no gateway worker answers", hint=f"see {self.services.paths.logs}"
            )

    async def _first_service(self, group: GroupRuntime) -> None:
        """Wait until the group serves, it fails for good, or somebody stops us."""
        stopped = asyncio.ensure_future(self.stop_requested.wait())
        serving = asyncio.ensure_future(
            group.wait_until(lambda: group.is_serving, timeout_s=group.start_limit_s)
        )
        waits: list[asyncio.Future[Any]] = [stopped, serving, group.start_failure]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            serving.cancel()
        if group.is_serving or self.stop_requested.is_set():
            return
        if group.start_failure.done():
            raise group.start_failure.result()
        raise StartFailedError(
            f"{group.name} does not serve after {group.start_limit_s:g} s",
            hint=f"see {self.services.paths.logs}",
        )

    async def shut_down(self) -> None:
        """Stop everything in order: gateways, engines, zygotes, caches. Nothing is left.

        Unless our own start ended before we had looked at what the last supervisor left: that goes
        on without us, and the next one looks again.
        """
        self.services.is_stopping = True
        if not (self._is_in_charge or self.stop_requested.is_set()):
            self._let_go()
            return
        self.services.events.append("stopping", f"{self.services.topology.name} is stopping")
        for watch in self._watches:
            watch.stop()
        await self._device_memory.stop()
        for group in self.groups:
            await group.tasks.cancel()
        self.fleet.close()
        await self._end_all(list(self.fleet.workers))
        await self._end_all([e for g in self.groups for e in g.engines])
        await self._end_all([g.zygote for g in self.groups])
        await self.strays.sweep()  # a fork that was under way belongs to nobody by now
        await self._end_all([g.cache for g in self.groups if g.cache is not None])
        for group in self.groups:
            if group.cache is not None:
                group.cache.close()
        await asyncio.gather(*(u.settle(timeout_s=_BURIAL_S) for u in self.units()))
        if self._janitor is not None:
            self._janitor.cancel()
        await self._tasks.cancel()
        self.services.machine.reap_orphans(self.services.owned_pids)
        await asyncio.to_thread(self._sweep)
        self.keeping.save()

    def _let_go(self) -> None:
        """Close what we hold; end nobody."""
        self.fleet.close()
        for group in self.groups:
            if group.cache is not None:
                group.cache.close()
        for unit in self.units():
            unit.let_go()

    async def _end_all(self, units: list[Unit]) -> None:
        await asyncio.gather(*(self._end(u) for u in units))

    async def _end(self, unit: Unit) -> None:
        handle = unit.handle
        if handle is None:
            return
        with contextlib.suppress(UnderstudyError):
            await handle.terminate(grace_s=_GRACE_S)
        try:
            await unit.fence(timeout_s=_FENCE_S)
        except UnderstudyError as error:
            log.error("%s", error)  # noqa: TRY400 - the sentence says it all
        unit.release()

    def _sweep(self) -> None:
        """Sockets and start files of the dead; the processes are gone, so nothing is raced."""
        for path in self.services.paths.run.iterdir():
            with contextlib.suppress(OSError):  # a disk that takes nothing: the next start sweeps
                path.unlink(missing_ok=True)

    def units(self) -> Iterator[Unit]:
        """Every unit."""
        yield from self.fleet.workers
        for group in self.groups:
            yield from group.engines
            yield group.zygote
            if group.cache is not None:
                yield group.cache

    async def join(self, unit: Unit, *, timeout_s: float) -> None:
        """Connect to an adopted process; a gateway worker gives its listening socket too."""
        if isinstance(unit, GatewayUnit):
            await self.fleet.join(unit, timeout_s=timeout_s)
        else:
            await unit.join(timeout_s=timeout_s)

    async def _keep_house(self) -> None:
        rounds = itertools.count(1)
        while True:
            await asyncio.sleep(_JANITOR_S)
            try:
                self.services.machine.reap_orphans(self.services.owned_pids)
                self.keeping.save()
                self._degraded.note()
                await self.fleet.look_after()
                if next(rounds) % _SWEEP_ROUNDS == 0:
                    # Beside the rest: to read the environment of a process may hang in the kernel.
                    self._tasks.run("sweep", self.strays.sweep())
            except Exception:
                log.exception("house-keeping failed once")

    # ----------------------------------------------------------------- degraded

    def degraded(self) -> dict[str, str]:
        """What the supervisor itself lacks now, by cause: serving goes on all the same."""
        return self._degraded.current()

    def _troubles(self) -> dict[str, str]:
        troubles = [f"{u.name}: {u.starts.trouble}" for u in self.units() if u.starts.trouble]
        return {
            "disk": self.keeping.trouble or self.services.events.degraded,
            "start": "; ".join(troubles),
            "address": "; ".join(t for t in (self.fleet.trouble, self.admin_trouble) if t),
        }

    # ---------------------------------------------------------------- reactions

    def _routes(self) -> list[GroupRoute]:
        return [g.route() for g in self.groups]

    def _first_token(self, event: FirstToken) -> None:
        for group in self.groups:
            if group.name == event.group:
                group.first_token(event)

    def _gateway_died(self, instance: str) -> None:
        for group in self.groups:
            group.gateway_died(instance)

    def status(self) -> dict[str, Any]:
        """Body of `GET /v1/status`."""
        topology = self.services.topology
        return {
            "name": topology.name,
            "ready": self.is_ready,
            "paused": self.services.is_paused,
            "stopping": self.services.is_stopping,
            "supervisor": {
                "pid": os.getpid(),
                "uptime_s": round(self.services.clock.monotonic() - self._started_s, 3),
                "state_dir": str(self.services.paths.root),
                "journal_degraded": bool(self.keeping.trouble or self.services.events.degraded),
                "degraded": self.degraded(),
            },
            "addresses": {"gateway": self.fleet.address, "admin": self.admin_address},
            "gateway": [gateway_status(self.fleet, w) for w in self.fleet.workers],
            "groups": [group_status(g, self._device_memory.reports(g)) for g in self.groups],
        }
