"""One gateway worker: a process that serves the shared listening socket.

Its streams live in it and are lost with it; those of other workers are untouched.
"""

import os
import socket
from collections.abc import Callable
from typing import Final

from cache.wire import Event
from supervisor.core.restart import RestartPolicy
from supervisor.gateway.protocol import (
    PROTOCOL,
    VERSION,
    FirstToken,
    GatewayLimits,
    GatewaySpec,
    GatewayStatus,
)
from supervisor.process import ProcessId
from supervisor.runtime.services import Services
from supervisor.runtime.unit import Unit
from supervisor.topology.schema import Gateway

__all__ = ["GatewayUnit", "limits_of"]

_START_S: Final = 30.0
_LISTENER_S: Final = 2.0


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
        self.status = self.understood(raw, GatewayStatus)

    async def refresh(self, *, timeout_s: float) -> None:
        """Ask for the newest status."""
        self.status = await self.ask("status", GatewayStatus, timeout_s=timeout_s)

    async def listener(self) -> socket.socket:
        """The listening socket, from a worker that outlived its supervisor."""
        _, fds = await self.call_with_fds("listener", timeout_s=_LISTENER_S)
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
            self._on_first_token(self.understood(event.params, FirstToken))
        elif event.name == "stats":
            before, self.status = self.status, self.understood(event.params, GatewayStatus)
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
