"""Wiring of a gateway worker: table, streams, HTTP server, control socket, and its life.

    start -> (first table) -> accept -> ... -> drain -> exit 0

The process outlives its supervisor. SIGTERM drains with a deadline; a second one ends at once.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Final

from cache.descriptors import reserve_descriptors
from supervisor.gateway.control import ControlServer
from supervisor.gateway.counters import Counters
from supervisor.gateway.endpoints import Endpoints
from supervisor.gateway.limits import (
    CANCEL_LINGER_S,
    DRAIN_DEADLINE_S,
    FIRST_TABLE_GRACE_S,
    TERM_DEADLINE_S,
    Parking,
)
from supervisor.gateway.protocol import FirstToken, GatewaySpec, GatewayStatus, Routes, RoutesAck
from supervisor.gateway.routes import RouteTable
from supervisor.gateway.server import HttpServer, raise_descriptor_limit
from supervisor.gateway.stream import LiveConnections, StreamContext

__all__ = ["Worker", "serve"]

log = logging.getLogger(__name__)

_DESCRIPTORS: Final = 16_384
_STATS_INTERVAL_S: Final = 1.0
_LAG_SAMPLE_S: Final = 0.05
_ABORT_TIMEOUT_S: Final = 2.0


class Worker:
    """One gateway worker; made inside a running loop."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self._sock = socket.socket(fileno=spec.listen_fd)
        self._table = RouteTable()
        self._live = LiveConnections()
        self._counters = Counters()
        self._first_tokens: dict[str, int] = {}
        self._lag_s = 0.0
        self._drain_by: float | None = None
        self._changed = asyncio.Event()
        context = StreamContext(
            instance=spec.instance,
            limits=spec.limits,
            table=self._table,
            parking=Parking(spec.limits.max_parked),
            live=self._live,
            on_first_token=self._first_token,
        )
        endpoints = Endpoints(context, self._counters, is_draining=lambda: self.is_draining)
        self._http = HttpServer(
            self._sock,
            endpoints.handle,
            max_connections=spec.limits.max_connections,
            max_body_bytes=spec.limits.max_body_bytes,
        )
        self._control = ControlServer(Path(spec.control_socket), self, listener=lambda: self._sock)

    @property
    def is_draining(self) -> bool:
        """Whether the worker is on its way out."""
        return self._drain_by is not None

    def status(self) -> GatewayStatus:
        """The worker as it sees itself."""
        return GatewayStatus(
            instance=self._spec.instance,
            pid=os.getpid(),
            sequence=self._table.sequence,
            epochs=dict(self._table.epochs),
            connections=self._http.connections,
            loop_lag_s=self._lag_s,
            groups=self._counters.snapshot(),
            draining=self.is_draining,
            tasks=len(asyncio.all_tasks()),
        )

    def apply_routes(self, routes: Routes) -> RoutesAck:
        """Put a table in force and cut what it no longer names. Synchronous: true on return."""
        if not self._table.apply(routes):
            log.info("ignored a table of a former supervisor sequence=%d", routes.sequence)
            return RoutesAck(self._table.sequence, 0)
        for model in self._table.models:
            self._counters.of(model.id)
        self._changed.set()
        return RoutesAck(routes.sequence, self._live.cut_stale(self._table))

    def drain(self) -> None:
        """Finish what runs, then end."""
        self._drain_within(DRAIN_DEADLINE_S)

    def terminate(self) -> None:
        """SIGTERM: likewise, with a shorter deadline; the second time, now."""
        is_second = self._drain_by is not None and self._drain_by - _now() <= TERM_DEADLINE_S
        self._drain_within(0.0 if is_second else TERM_DEADLINE_S)

    async def run(self) -> None:
        """Serve until drained."""
        await self._control.start()
        log.info("the gateway worker is up instance=%s", self._spec.instance)
        background = [
            asyncio.create_task(self._send_stats()),
            asyncio.create_task(self._measure_lag()),
        ]
        try:
            await self._wait_changed(FIRST_TABLE_GRACE_S)
            if not self.is_draining:
                self._http.start()
            while not self.is_draining:
                await self._wait_changed(None)
            await self._finish()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            self._control.close()
            self._sock.close()

    async def _finish(self) -> None:
        self._http.stop()
        while self._drain_by is not None and (left_s := self._drain_by - _now()) > 0:
            # In slices, because a signal may bring the deadline forward.
            if await self._http.wait_idle(timeout_s=min(left_s, 0.2)):
                log.info("the gateway worker has drained instance=%s", self._spec.instance)
                return
        log.warning("the drain deadline has passed, closing connections=%d", self._http.connections)
        self._http.abort()
        await self._http.wait_idle(timeout_s=_ABORT_TIMEOUT_S)
        await self._live.wait_closed(timeout_s=CANCEL_LINGER_S)

    def _drain_within(self, deadline_s: float) -> None:
        drain_by = _now() + deadline_s
        self._drain_by = drain_by if self._drain_by is None else min(self._drain_by, drain_by)
        self._changed.set()

    async def _wait_changed(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            log.warning("no routing table came, accepting connections without one")
        self._changed.clear()

    def _first_token(self, group: str, epoch: int, source: str) -> None:
        if self._first_tokens.get(group, -1) >= epoch:
            return
        self._first_tokens[group] = epoch
        self._control.send_first_token(FirstToken(group, epoch, time.monotonic_ns(), source))

    async def _send_stats(self) -> None:
        while True:
            await asyncio.sleep(_STATS_INTERVAL_S)
            self._control.send_stats()
            self._lag_s = 0.0

    async def _measure_lag(self) -> None:
        """Keep the worst delay of the loop since the last report."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_LAG_SAMPLE_S)
            late_s = time.perf_counter() - before - _LAG_SAMPLE_S
            self._lag_s = max(self._lag_s, late_s, 0.0)


def _now() -> float:
    return time.monotonic()


async def serve(spec: GatewaySpec) -> None:
    """Run a worker until it has drained."""
    raise_descriptor_limit()
    reserve_descriptors(_DESCRIPTORS)
    worker = Worker(spec)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.terminate)
    gc.freeze()  # what was imported never becomes garbage; collections stay short
    await worker.run()
