"""The table of routes, and pushing it to every gateway worker.

Invariants
    1. One table for all workers, and its sequence only rises: above every table of this supervisor,
       of a former one of this boot, and of what a worker says it has.
    2. A worker that does not confirm delays nobody beyond the caller's deadline; it gets the table
       once it reads.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from cache.errors import UnderstudyError
from supervisor.gateway.protocol import GroupRoute, Routes, RoutesAck
from supervisor.runtime.machine import Clock
from supervisor.runtime.worker import GatewayUnit

__all__ = ["CUT_ACK_S", "RouteTable"]

CUT_ACK_S: Final = 0.02
"""How long a recovery waits for workers to confirm a cut (design: at most 20 ms)."""


class RouteTable:
    """What is in force, or on its way to be."""

    def __init__(
        self,
        workers: Sequence[GatewayUnit],
        routes: Callable[[], list[GroupRoute]],
        *,
        clock: Clock,
    ) -> None:
        """`routes` derives the table from the states of all groups, whenever it is pushed."""
        self._workers = workers
        self._routes = routes
        # Behind every table of a former supervisor of this boot, also those that nobody has read.
        self._sequence = clock.monotonic_ns()
        self._table: list[GroupRoute] = []

    def go_above(self, sequence: int) -> None:
        """Somebody has a table of this sequence; the clock may have been another one."""
        self._sequence = max(self._sequence, sequence)

    def in_force(self, group: str) -> GroupRoute | None:
        """What was pushed last for this group, by whomever; None before the first push."""
        return next((r for r in self._table if r.group == group), None)

    async def cut(self, instance: str) -> int:
        """Make sure that nothing is sent to this engine any more; how many streams were cut.

        The route in force must not name it by now, as its state says.
        """
        targets = [t for r in self._table for t in (r.primary, r.batch) if t is not None]
        if all(t.instance != instance for t in targets):
            return 0
        return await self.push(timeout_s=CUT_ACK_S)

    async def push(self, *, timeout_s: float) -> int:
        """Put the current table in force everywhere; returns how many streams were cut.

        Workers that do not confirm in time are left behind: they get the table once they read.
        """
        cut, is_behind = await self._push_all(timeout_s)
        if is_behind:
            more, _ = await self._push_all(timeout_s)  # above what a worker had, which counts
            cut += more
        return cut

    async def _push_all(self, timeout_s: float) -> tuple[int, bool]:
        """Streams that were cut, and whether a worker has ignored the table for a newer one."""
        self._sequence += 1
        self._table = self._routes()
        table = Routes(self._sequence, self._table)
        acks = await asyncio.gather(
            *(self._push_one(w, table, timeout_s) for w in self._workers if w.is_connected)
        )
        came = [ack for ack in acks if ack is not None]
        self.go_above(max((ack.sequence for ack in came), default=0))
        is_behind = any(ack.sequence != table.sequence for ack in came)
        return sum(ack.streams_cut for ack in came), is_behind

    async def _push_one(
        self, worker: GatewayUnit, table: Routes, timeout_s: float
    ) -> RoutesAck | None:
        try:
            ack = await worker.ask("routes", RoutesAck, table, timeout_s=timeout_s)
        except UnderstudyError as error:
            worker.emit("route_unconfirmed", f"{worker.name} did not confirm the routes: {error}")
            return None
        if ack.sequence != table.sequence:
            worker.emit("route_unconfirmed", f"{worker.name} has newer routes than these in force")
        return ack
