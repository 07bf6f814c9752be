"""The routing table in force, and the wait for a newer route.

Invariants
    1. A table replaces the old one as a whole and at once; it is in force when `apply` returns.
    2. Epochs only rise, per group, also for a group that was gone in between.
    3. A crash that a table has named is remembered, also when the next supervisor does not know it.
    4. A waiting request gets a route to *another* (instance, epoch) as soon as there is one, and
       the one it came from only after a while: that engine broke off without being cut.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.gateway.errors import StaleEpochError
from supervisor.gateway.protocol import GroupRoute, Routes, RouteTarget

__all__ = ["BATCH_SUFFIX", "RouteTable", "ServedModel"]

BATCH_SUFFIX: Final = ":batch"
_CRASHES_REMEMBERED: Final = 128  # per group


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model id and where its requests go now."""

    id: str
    group: str
    tier: Literal["primary", "batch"]
    max_length: int
    created: int
    target: RouteTarget | None


def _models(route: GroupRoute) -> list[ServedModel]:
    group, length, created = route.group, route.max_length, route.created
    models = [ServedModel(group, group, "primary", length, created, route.primary)]
    if route.has_batch:
        name = group + BATCH_SUFFIX
        models.append(ServedModel(name, group, "batch", length, created, route.batch))
    return models


class RouteTable:
    """What the supervisor pushed last. One event loop, no locks."""

    def __init__(self) -> None:
        self.sequence = 0
        self.epochs: dict[str, int] = {}
        self._floors: dict[str, int] = {}
        self._models: dict[str, ServedModel] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._crashed: dict[str, deque[str]] = {}
        self._unexplained: dict[str, list[str]] = {}
        self.is_known = False

    def apply(self, routes: Routes) -> bool:
        """Put a table in force and wake whoever waits; False: a newer one is in force already.

        That happens when a supervisor dies and leaves tables in its connection: they are read
        after the first table of its successor, which counts on from a higher sequence.

        Raises:
            StaleEpochError: some group's epoch is lower than before; nothing was changed.
        """
        if routes.sequence < self.sequence:
            return False
        for route in routes.groups:
            in_force = self._floors.get(route.group, 0)
            if route.epoch < in_force:
                raise StaleEpochError(route.group, offered=route.epoch, in_force=in_force)
        self.sequence = routes.sequence
        self.epochs = {route.group: route.epoch for route in routes.groups}
        self._floors |= self.epochs
        self._models = {model.id: model for route in routes.groups for model in _models(route)}
        self._remember_deaths(routes)
        self.is_known = True
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return True

    def _remember_deaths(self, routes: Routes) -> None:
        self._unexplained = {route.group: route.unexplained for route in routes.groups}
        for route in routes.groups:
            known = self._crashed.setdefault(route.group, deque(maxlen=_CRASHES_REMEMBERED))
            known.extend(name for name in route.crashed if name not in known)

    def crashes_among(self, group: str, instances: Iterable[str]) -> int:
        """How many of these engines are known to have crashed."""
        known = self._crashed.get(group, ())
        return sum(name in known for name in instances)

    def unexplained_among(self, group: str, instances: Iterable[str]) -> int:
        """How many of these engines have died, and nobody has said yet how."""
        known = self._unexplained.get(group, ())
        return sum(name in known for name in instances)

    @property
    def models(self) -> list[ServedModel]:
        """All models, in the order of the table."""
        return list(self._models.values())

    def find(self, model_id: str) -> ServedModel | None:
        """The model of this id."""
        return self._models.get(model_id)

    def target(self, model_id: str) -> RouteTarget | None:
        """Where requests of this model go now; None: nowhere."""
        model = self._models.get(model_id)
        return None if model is None else model.target

    def is_in_force(self, model_id: str, target: RouteTarget) -> bool:
        """Whether frames of this engine may still reach clients of this model."""
        return self.target(model_id) == target

    def other_target(self, model_id: str, *, avoid: RouteTarget | None) -> RouteTarget | None:
        """Where requests of this model go now, unless that is the engine to avoid."""
        target = self.target(model_id)
        if target is None or avoid is None:
            return target
        is_same = (target.instance, target.epoch) == (avoid.instance, avoid.epoch)
        return None if is_same else target

    async def wait_known(self, *, timeout_s: float) -> None:
        """Wait for the first table.

        Raises:
            TimeoutError: none came.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.is_known:
            await self.wait_change(deadline)

    async def wait_target(
        self,
        model_id: str,
        *,
        avoid: RouteTarget | None,
        same_after_s: float,
        deadline: float,
    ) -> RouteTarget:
        """The next route of a model; a model that left the table may come back.

        Args:
            model_id: whose route.
            avoid: the engine that the request was lost at.
            same_after_s: when that very engine may be tried again, should it keep its route.
            deadline: in the loop's time.

        Raises:
            TimeoutError: the deadline passed.
        """
        same_at = asyncio.get_running_loop().time() + same_after_s
        while True:
            other = self.other_target(model_id, avoid=avoid)
            if other is not None:
                return other
            target = self.target(model_id)
            now = asyncio.get_running_loop().time()
            if target is not None and now >= same_at:
                return target
            if now >= deadline:
                raise TimeoutError
            until = deadline if target is None else min(deadline, same_at)
            try:
                await self.wait_change(until)
            except TimeoutError:
                continue  # the loop looks which of the two times it was

    async def wait_change(self, until: float) -> None:
        """Wait for the next table; `until` is in the loop's time.

        Raises:
            TimeoutError: none came.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout_at(until):
                await waiter
        finally:
            self._waiters.discard(waiter)
