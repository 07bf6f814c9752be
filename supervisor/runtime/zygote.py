"""The zygote of a group: pre-imported, forks engines, reports how they end."""

import os
from collections.abc import Callable

from cache.protocol import LoadSpec
from cache.wire import Event
from engines.contract import (
    ZYGOTE_PROTOCOL,
    ZYGOTE_VERSION,
    ChildRecord,
    EngineSpec,
    Fork,
    ZygoteHello,
    ZygoteSpec,
)
from supervisor.core.restart import RestartPolicy
from supervisor.process import ProcessId, own_boot_id
from supervisor.runtime.services import Services
from supervisor.runtime.unit import Unit

__all__ = ["ZygoteUnit"]


class ZygoteUnit(Unit):
    """Starts the zygote and asks it for engines."""

    kind = "zygote"

    def __init__(
        self,
        services: Services,
        *,
        name: str,
        group: str,
        policy: RestartPolicy,
        on_change: Callable[[], None],
        on_exit_report: Callable[[ChildRecord], None],
    ) -> None:
        super().__init__(services, name=name, group=group, policy=policy, on_change=on_change)
        self.hello: ZygoteHello | None = None
        self.is_starting = False
        self._on_exit_report = on_exit_report

    @property
    def is_ready(self) -> bool:
        """Whether it can fork now."""
        return self.is_alive and self.is_connected and self.hello is not None

    async def start(self, load: LoadSpec, *, timeout_s: float) -> None:
        """Spawn it and wait until everything is imported.

        Raises:
            StartFailedError, DeadlineExceededError: it did not come up.
        """
        self.is_starting = True
        try:
            instance = self.begin()
            self.hello = None
            spec = ZygoteSpec(
                self.group, instance, str(self.services.paths.control(instance)), load
            )
            with self.starts.refusals():
                self.spawn_module("engines.zygote", spec, with_model=True)
                await self.join(timeout_s=timeout_s)
        finally:
            self.is_starting = False
        took_s = self.uptime_s
        self.emit("zygote_ready", f"{self.name} is ready", took_s=round(took_s, 3))
        self._on_change()

    async def join(self, *, timeout_s: float) -> None:
        """Connect to the current instance (just spawned, or adopted)."""
        raw = await self.connect(
            self.services.paths.control(self.instance),
            ZYGOTE_PROTOCOL,
            ZYGOTE_VERSION,
            timeout_s=timeout_s,
            on_event=self._event,
        )
        self.hello = self.understood(raw, ZygoteHello)

    async def fork(
        self, spec: EngineSpec, marker: str, log_fd: int, *, timeout_s: float
    ) -> ProcessId:
        """Fork one engine; returns who it is.

        Raises:
            ConnectionClosedError, DeadlineExceededError, RemoteError: no fork.
        """
        raw, fds = await self.call_with_fds(
            "fork", Fork(spec, marker), fds=[log_fd], timeout_s=timeout_s
        )
        for fd in fds:
            os.close(fd)
        record = self.understood(raw, ChildRecord)
        return ProcessId(record.pid, record.start_ticks, own_boot_id())

    def on_death(self, process: ProcessId) -> None:
        """Without it engines go on; only new ones need a new zygote."""
        self.hello = None
        self.note_death(process)

    def _event(self, event: Event, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if event.name == "exited":
            self._on_exit_report(self.understood(event.params, ChildRecord))
