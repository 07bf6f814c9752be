"""Processes that carry our marker and that no unit owns: found at start and swept from then on.

A fork that was ordered by a supervisor which then crashed may appear after its successor has
looked; an instance may be there twice. Such a process could hold a role that nobody knows of, so a
group with a stray engine promotes nobody until the stray is proven dead.

Invariant: what a unit owns, or is burying, is never a stray.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from supervisor.errors import UnderstudyError
from supervisor.process import Marker, ProcessTree
from supervisor.runtime.machine import LeftBehind
from supervisor.runtime.services import Services
from supervisor.runtime.unit import Unit

__all__ = ["Strays", "unit_name"]

log = logging.getLogger(__name__)

_FENCE_S: Final = 2.0


class Strays:
    """The strays of one state directory."""

    def __init__(self, services: Services, units: Callable[[], Iterable[Unit]]) -> None:
        self._services = services
        self._units = units
        self._known: dict[str, LeftBehind] = {}
        self._unkillable: set[str] = set()  # instances of which no end could be proven

    def has_engine_of(self, names: Iterable[str]) -> bool:
        """Whether a stray was once an engine of one of these names."""
        units = {unit_name(instance) for instance in self._known}
        return not units.isdisjoint(names)

    def unkillable(self, name: str) -> list[LeftBehind]:
        """Strays that were once the unit of this name and did not end when they were killed.

        One that is merely known, because a pause keeps us from ending it, is not among them:
        nobody would ever end what was attested.
        """
        return [
            left
            for left in self._known.values()
            if unit_name(left.instance) == name and left.instance in self._unkillable
        ]

    def attest(self, name: str) -> None:
        """The operator says that those can do no harm: they count no more."""
        for left in self.unkillable(name):
            self._services.attested[left.instance] = left.process
            del self._known[left.instance]
            self._unkillable.discard(left.instance)

    def add(self, left: LeftBehind) -> None:
        """Somebody found one."""
        self._known[left.instance] = left

    async def sweep(self) -> list[str]:
        """Look for strays and end them; returns the instances that were ended."""
        for left in await self._services.machine.left_behind(self._services.state_id):
            is_owned = any(u.owns(left.process, left.instance) for u in self._units())
            if not is_owned and left.instance not in self._services.attested:
                self.add(left)
        return await self.end_all()

    async def end_all(self) -> list[str]:
        """End those that are known, unless we are paused; the next sweep tries the rest again."""
        is_paused = self._services.is_paused and not self._services.is_stopping
        if is_paused or not self._known:
            return []
        ended = await asyncio.gather(*(self._end(left) for left in tuple(self._known.values())))
        return [instance for instance in ended if instance]

    async def _end(self, left: LeftBehind) -> str:
        tree = ProcessTree(left.process, Marker(self._services.state_id, left.instance))
        try:
            await self._services.machine.fence(tree, timeout_s=_FENCE_S)
        except UnderstudyError as error:
            log.warning("%s is a stray that does not end: %s", left.instance, error)
            if left.instance in self._known:
                self._unkillable.add(left.instance)
            return ""
        self._known.pop(left.instance, None)  # it may have been attested meanwhile
        self._unkillable.discard(left.instance)
        self._services.paths.forget(left.instance)
        self._services.events.append(
            "stray_ended", f"{left.instance} belonged to nobody and was ended",
            pid=left.process.pid,
        )  # fmt: skip
        return left.instance


def unit_name(instance: str) -> str:
    """An instance is `<unit name>-<8 hex>`."""
    return instance.rpartition("-")[0]
