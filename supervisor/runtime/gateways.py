"""The gateway workers: one listening socket, any number of processes that serve it.

The socket is bound once and inherited, so that a restarting worker refuses nobody: connections
wait in the kernel's backlog. Routes are pushed as one table; during a recovery a worker that does
not answer within `CUT_ACK_S` (it may be stopped) delays nobody.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from cache.errors import UnderstudyError
from cache.wire import Event
from supervisor.core.restart import RestartPolicy
from supervisor.errors import ConfigurationError, StartFailedError
from supervisor.gateway.protocol import (
    PROTOCOL,
    VERSION,
    FirstToken,
    GatewayLimits,
    GatewaySpec,
    GatewayStatus,
    GroupRoute,
    Routes,
    RoutesAck,
)
from supervisor.process import ProcessId
from supervisor.runtime.pulse import BEAT_S, Pulse
from supervisor.runtime.services import Services
from supervisor.runtime.unit import Unit
from supervisor.topology.schema import Gateway

__all__ = ["CUT_ACK_S", "GatewayFleet", "GatewayUnit", "listen_tcp"]

CUT_ACK_S: Final = 0.02
"""How long a recovery waits for workers to confirm a cut (design: at most 20 ms)."""

_PUSH_S: Final = 2.0
_FENCE_S: Final = 2.0
_START_S: Final = 30.0
_BACKLOG: Final = 1024


def listen_tcp(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket.

    Raises:
        ConfigurationError: the address is taken or not ours, or no descriptor is left.
    """
    try:
        return _listening(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="stop what uses the port (ss -ltnp shows it), or change the address",
        ) from error


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class GatewayUnit(Unit):
    """One worker."""

    kind = "gateway"

    def __init__(
        self,
        services: Services,
        *,
        index: int,
        policy: RestartPolicy,
        on_change: Callable[[], None],
        on_first_token: Callable[[FirstToken], None],
    ) -> None:
        super().__init__(
            services, name=f"gateway-{index}", group="", policy=policy, on_change=on_change
        )
        self.index = index
        self.is_starting = False
        self.status: GatewayStatus | None = None
        self._on_first_token = on_first_token

    async def start(self, listener: socket.socket, limits: GatewayLimits) -> None:
        """Spawn a worker on the shared listener and wait until it answers.

        Raises:
            StartFailedError, DeadlineExceededError: it did not come up.
        """
        self.is_starting = True
        try:
            instance = self.begin()
            control = self.services.paths.control(instance)
            spec = GatewaySpec(instance, str(control), listener.fileno(), limits)
            with self.starts.refusals():
                self.spawn_module(
                    "supervisor.gateway", spec, pass_fds=[listener.fileno()], with_model=False
                )
                await self.join(timeout_s=_START_S)
        finally:
            self.is_starting = False

    async def join(self, *, timeout_s: float) -> None:
        """Connect to the current instance."""
        raw = await self.connect(
            self.services.paths.control(self.instance),
            PROTOCOL,
            VERSION,
            timeout_s=timeout_s,
            on_event=self._event,
        )
        self.status = msgspec.json.decode(raw, type=GatewayStatus)

    async def refresh(self, *, timeout_s: float) -> None:
        """Ask for the newest status."""
        raw = await self.call("status", timeout_s=timeout_s)
        self.status = msgspec.json.decode(raw, type=GatewayStatus)

    async def listener(self) -> socket.socket:
        """The listening socket, from a worker that outlived its supervisor."""
        _, fds = await self.call_with_fds("listener", timeout_s=2.0)
        for extra in fds[1:]:
            os.close(extra)
        return socket.socket(fileno=fds[0])

    def on_death(self, process: ProcessId) -> None:
        """Its streams are lost with it; new connections wait for the next worker."""
        self.services.metrics.set_gateway(self.name, None)
        self.note_death(process)

    def _event(self, event: Event, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if event.name == "first_token":
            self._on_first_token(msgspec.json.decode(event.params, type=FirstToken))
        elif event.name == "stats":
            before, self.status = (
                self.status,
                msgspec.json.decode(event.params, type=GatewayStatus),
            )
            self.services.metrics.set_gateway(self.name, self.status)
            self._note_poison(before, self.status)

    def _note_poison(self, before: GatewayStatus | None, now: GatewayStatus) -> None:
        """An event for every request that was ended as poison since the last report."""
        known = {c.model: c.poisoned for c in before.groups} if before is not None else {}
        for counters in now.groups:
            if (more := counters.poisoned - known.get(counters.model, 0)) > 0:
                group = counters.model.partition(":")[0]
                self.services.events.append(
                    "poison_ended",
                    f"{more} requests of {counters.model} were ended: engines crashed again and "
                    "again while they had them",
                    group=group, engine=self.name, requests=more,
                )  # fmt: skip


class GatewayFleet:
    """All workers, and the route table that they share."""

    def __init__(
        self,
        services: Services,
        settings: Gateway,
        *,
        policy: RestartPolicy,
        routes: Callable[[], list[GroupRoute]],
        on_first_token: Callable[[FirstToken], None],
        on_worker_death: Callable[[str], None],
    ) -> None:
        self._services = services
        self._settings = settings
        self._routes = routes
        # Behind every table of a former supervisor of this boot, also those that nobody has read.
        self._sequence = services.clock.monotonic_ns()
        self._is_behind = False  # a worker has ignored the last table for a newer one
        self._on_worker_death = on_worker_death
        self._known_instances: dict[str, str] = {}
        self._in_force: list[GroupRoute] = []
        self._is_open = False  # before adoption has ended, a table would cut every stream
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.listener: socket.socket | None = None
        self.trouble = ""  # why nobody can be listened to
        self.workers = [
            GatewayUnit(
                services,
                index=index,
                policy=policy,
                on_change=self.reconcile,
                on_first_token=on_first_token,
            )
            for index in range(settings.workers)
        ]
        self._pulses = [self._pulse_of(worker) for worker in self.workers]

    def _pulse_of(self, worker: GatewayUnit) -> Pulse:
        return Pulse(worker, "status", is_starting=lambda: worker.is_starting,
                     rejoin=lambda: self._rejoin(worker))  # fmt: skip

    @property
    def address(self) -> str:
        """Where clients connect: `host:port`, as bound."""
        if self.listener is None:
            return ""
        host, port = self.listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def open(self, *, may_wait: bool = False) -> None:
        """Everything found is adopted: workers may be started from now on.

        Binds the listening socket, unless one was taken over from a living worker. With
        `may_wait` an address that is taken is tried again later, by `look_after`.

        Raises:
            ConfigurationError: the address is taken or not ours.
        """
        self._is_open = True
        try:
            self._listen()
        except ConfigurationError as error:
            if not may_wait:
                raise
            self.trouble = error.message

    def _listen(self) -> None:
        if self.listener is None:
            listen = self._settings.listen
            self.listener = listen_tcp(listen.host, listen.port)
            self.trouble = ""

    def take_listener(self, listener: socket.socket) -> None:
        """The socket from a living worker; the same one may come from several."""
        if self.listener is None:
            self.listener, self.trouble = listener, ""
        else:
            listener.close()

    def reconcile(self) -> None:
        """Start every worker that is not there and may come back."""
        if self._services.is_stopping or self.listener is None or not self._is_open:
            return
        for worker in self.workers:
            known = self._known_instances.get(worker.name)
            if known is not None and not worker.is_alive:
                del self._known_instances[worker.name]
                self._on_worker_death(known)
            if worker.is_alive or worker.is_starting or self._services.is_paused:
                continue
            if worker.name not in self._tasks:
                self._tasks[worker.name] = worker.in_background(self._start(worker))

    async def _start(self, worker: GatewayUnit) -> None:
        assert self.listener is not None  # noqa: S101 - checked by reconcile
        limits = limits_of(self._settings)
        try:
            delay_s = max(0.0, worker.starts.record.not_before_s - self._services.clock.monotonic())
            await asyncio.sleep(delay_s)
            if self._services.is_paused or self._services.is_stopping:
                return
            try:
                await worker.start(self.listener, limits)
            except UnderstudyError:
                if worker.is_alive and not self._services.is_paused:
                    await worker.end(timeout_s=_FENCE_S)  # it takes connections, and has no routes
                raise
            self._known_instances[worker.name] = worker.instance
            worker.emit("gateway_ready", f"{worker.name} accepts connections", pid=worker.pid)
            await self.push(timeout_s=_PUSH_S)
        finally:
            self._tasks.pop(worker.name, None)
            if not worker.is_alive:
                asyncio.get_running_loop().call_soon(self.reconcile)

    async def join(self, worker: GatewayUnit, *, timeout_s: float) -> None:
        """Connect to a worker that a former supervisor started, and share its listening socket.

        Raises:
            StartFailedError: it died, or listens elsewhere.
            UnderstudyError: it does not answer.
        """
        await worker.join(timeout_s=timeout_s)
        try:
            listener = await worker.listener()
        except (UnderstudyError, OSError):
            worker.disconnect()  # all of it or nothing: it is joined again
            raise
        if self.listener is not None and listener.getsockname() != self.listener.getsockname():
            listener.close()
            worker.disconnect()
            raise StartFailedError(f"{worker.name} listens elsewhere")
        self.take_listener(listener)
        if worker.status is not None:  # the clock may have been another one: go above all the same
            self._sequence = max(self._sequence, worker.status.sequence)
        self._known_instances[worker.name] = worker.instance

    async def _rejoin(self, worker: GatewayUnit) -> None:
        """Connect to one that did not answer when it was adopted."""
        await self.join(worker, timeout_s=BEAT_S)
        worker.emit("joined", f"{worker.name} answers now", pid=worker.pid)
        await self.push(timeout_s=_PUSH_S)

    async def look_after(self) -> None:
        """Ask every worker whether it answers; end those that have not for a while.

        A listening socket that could not be bound is tried again first.
        """
        if self.trouble and not self._services.is_paused:
            with contextlib.suppress(ConfigurationError):  # said already, in `trouble`
                self._listen()
                self.reconcile()
        await asyncio.gather(*(p.beat() for p in self._pulses))
        for worker, pulse in zip(self.workers, self._pulses, strict=True):
            if not pulse.is_silent or self._services.is_paused or self._services.is_stopping:
                continue
            worker.emit("gateway_silent", f"{worker.name} does not answer")
            await worker.end(timeout_s=_FENCE_S)

    def route_in_force(self, group: str) -> GroupRoute | None:
        """What was pushed last for this group, by whomever; None before the first push."""
        return next((r for r in self._in_force if r.group == group), None)

    async def cut(self, instance: str) -> int:
        """Make sure that nothing is sent to this engine any more; how many streams were cut.

        The route in force must not name it by now, as its state says.
        """
        targets = [t for r in self._in_force for t in (r.primary, r.batch) if t is not None]
        if all(t.instance != instance for t in targets):
            return 0
        return await self.push(timeout_s=CUT_ACK_S)

    async def push(self, *, timeout_s: float) -> int:
        """Put the current table in force everywhere; returns how many streams were cut.

        Workers that do not confirm in time are left behind: they get the table once they read.
        """
        table, cut = await self._push_all(timeout_s)
        if self._sequence > table.sequence and self._is_behind:
            _, more = await self._push_all(timeout_s)  # above what a worker had, which counts
            cut += more
        return cut

    async def _push_all(self, timeout_s: float) -> tuple[Routes, int]:
        self._sequence += 1
        self._is_behind = False
        self._in_force = self._routes()
        table = Routes(self._sequence, self._in_force)
        answers = await asyncio.gather(
            *(self._push_one(w, table, timeout_s) for w in self.workers if w.is_connected)
        )
        return table, sum(answers)

    async def _push_one(self, worker: GatewayUnit, table: Routes, timeout_s: float) -> int:
        try:
            raw = await worker.call("routes", table, timeout_s=timeout_s)
        except UnderstudyError as error:
            worker.emit("route_unconfirmed", f"{worker.name} did not confirm the routes: {error}")
            return 0
        ack = msgspec.json.decode(raw, type=RoutesAck)
        if ack.sequence != table.sequence:
            worker.emit("route_unconfirmed", f"{worker.name} has newer routes than these in force")
            self._sequence, self._is_behind = max(self._sequence, ack.sequence), True
        return ack.streams_cut

    async def first_ready(self, *, timeout_s: float) -> bool:
        """Wait until one worker answers."""
        deadline = self._services.clock.monotonic() + timeout_s
        while self._services.clock.monotonic() < deadline:
            if any(w.is_connected for w in self.workers):
                return True
            await asyncio.sleep(0.02)
        return False

    def units(self) -> Iterable[GatewayUnit]:
        """The workers, for status and stop."""
        return iter(self.workers)

    def close(self) -> None:
        """Close the listening socket: from now on connections are refused."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.close()
            self.listener = None


def limits_of(settings: Gateway) -> GatewayLimits:
    """The bounds of one worker, as the topology states them."""
    return GatewayLimits(
        max_body_bytes=settings.max_body,
        max_connections=settings.max_connections,
        max_parked=settings.max_parked,
        park_timeout_s=settings.park_timeout,
        resume_deadline_s=settings.resume_deadline,
        client_timeout_s=settings.client_timeout,
    )
