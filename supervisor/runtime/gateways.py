"""The gateway workers: one listening socket, any number of processes that serve it.

The socket is bound once and inherited, so that a restarting worker refuses nobody: connections
wait in the kernel's backlog. What they are told to route where is `RouteTable`.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Final

from cache.errors import UnderstudyError
from supervisor.core.restart import RestartPolicy
from supervisor.errors import ConfigurationError, StartFailedError
from supervisor.gateway.protocol import FirstToken, GroupRoute
from supervisor.runtime.listening import listen_tcp
from supervisor.runtime.pulse import BEAT_S, Pulse
from supervisor.runtime.routing import RouteTable
from supervisor.runtime.services import Services
from supervisor.runtime.worker import GatewayUnit, limits_of
from supervisor.topology.schema import Gateway

__all__ = ["GatewayFleet"]

_PUSH_S: Final = 2.0
_FENCE_S: Final = 2.0
_LOOK_S: Final = 0.02


class GatewayFleet:
    """All workers, the socket that they share, and the table of routes."""

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
        self._on_worker_death = on_worker_death
        self._known_instances: dict[str, str] = {}
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
        self.routes = RouteTable(self.workers, routes, clock=services.clock)
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
        try:
            delay_s = max(0.0, worker.starts.record.not_before_s - self._services.clock.monotonic())
            await asyncio.sleep(delay_s)
            if self._services.is_paused or self._services.is_stopping or self.listener is None:
                return
            try:
                await worker.start(self.listener, limits_of(self._settings))
            except UnderstudyError:
                if worker.is_alive and not self._services.is_paused:
                    await worker.end(timeout_s=_FENCE_S)  # it takes connections, and has no routes
                raise
            self._known_instances[worker.name] = worker.instance
            worker.emit("gateway_ready", f"{worker.name} accepts connections", pid=worker.pid)
            await self.routes.push(timeout_s=_PUSH_S)
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
        if worker.status is not None:
            self.routes.go_above(worker.status.sequence)
        self._known_instances[worker.name] = worker.instance

    async def _rejoin(self, worker: GatewayUnit) -> None:
        """Connect to one that did not answer when it was adopted."""
        await self.join(worker, timeout_s=BEAT_S)
        worker.emit("joined", f"{worker.name} answers now", pid=worker.pid)
        await self.routes.push(timeout_s=_PUSH_S)

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

    async def first_ready(self, *, timeout_s: float) -> bool:
        """Wait until one worker answers."""
        deadline = self._services.patience.deadline(timeout_s)
        while not any(w.is_connected for w in self.workers):
            if deadline.has_passed:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def units(self) -> Iterable[GatewayUnit]:
        """The workers, for status and stop."""
        return iter(self.workers)

    def close(self) -> None:
        """Close the listening socket: from now on connections are refused."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.close()
            self.listener = None
