"""Device memory in status and metrics: the cards of all groups, asked about from time to time.

Nothing here decides anything, and nothing waits for it. Groups on the CPU are not looked at. A
pause stops none of it: pauses are about engines, and `nvidia-smi` touches none.

Invariants
    1. No question is begun while a group takes over, and one under way is given up then: the
       driver does one thing at a time, and a takeover must not stand behind a statistic.
    2. A failure is told once, and once more when it is over; the last good figures stay, with
       their age.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cache.gpumemory import CardMemory, CardUnknownError
from supervisor.observe.devicememory import DeviceMemoryReport, EngineUse
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.services import Services

__all__ = ["ASK_EVERY_S", "DeviceMemoryWatch"]

log = logging.getLogger(__name__)

ASK_EVERY_S: Final = 10.0
"""A question costs two short processes; memory is taken in seconds and asked about by people."""

_LOOK_S: Final = 1.0
_GIVE_WAY_S: Final = 0.02
_TAKEOVER_NS: Final = 1_000_000_000
"""From its start on, a takeover that waits for its first token is given so long."""

_TAKEOVERS: Final = ("failover", "switchover")


@dataclass
class _Card:
    """One card, however many groups use it."""

    uuid: str
    asked_s: float | None = None  # when it was last tried
    known_s: float | None = None  # when the figures below were had
    memory: CardMemory | None = None
    engines: dict[str, tuple[EngineUse, ...]] = field(default_factory=dict)  # by group
    others_bytes: int | None = None
    error: str | None = None


class DeviceMemoryWatch:
    """Asks about the card of each group that is on one, and reports."""

    def __init__(self, services: Services, groups: Sequence[GroupRuntime]) -> None:
        self._services = services
        self._all_groups = groups
        self._groups = [g for g in groups if g.load.device.startswith("cuda")]
        self._cards: dict[str, _Card] = {}
        self._uuids: dict[str, str] = {}  # by group; a dead daemon's card is still the card
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; without a group on a card there is nothing to begin."""
        if self._groups:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """End, and let go of a question that is under way."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def reports(self, group: GroupRuntime) -> list[DeviceMemoryReport]:
        """What is known now; nothing for a group on the CPU."""
        return [self._report(group)] if group in self._groups else []

    # ------------------------------------------------------------------ asking

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("looking at device memory failed once")
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Ask about the cards whose turn it is, and report on all."""
        for group in self._groups:
            status = group.cache.status if group.cache is not None else None
            if status is not None and status.device_uuid:
                self._uuids[group.name] = status.device_uuid
        self._publish()  # an answer takes its time, and our own figures need not wait for it
        for uuid in dict.fromkeys(self._uuids.values()):
            card = self._cards.setdefault(uuid, _Card(uuid))
            is_due = card.asked_s is None or self._now_s() - card.asked_s >= ASK_EVERY_S
            if is_due and self._is_quiet():
                await self._ask(card)
        self._publish()

    def _publish(self) -> None:
        for group in self._groups:
            self._services.metrics.set_device_memory(group.name, self._report(group))

    async def _ask(self, card: _Card) -> None:
        stop = threading.Event()
        question = asyncio.ensure_future(self._services.machine.card_memory(card.uuid, stop=stop))
        try:
            while not question.done():
                await asyncio.wait({question}, timeout=_GIVE_WAY_S)
                if not self._is_quiet():
                    stop.set()
            memory = question.result()
        except CardUnknownError as error:
            self._failed(card, str(error))
        else:
            if memory is not None:
                self._answered(card, memory)
        finally:
            stop.set()
            question.cancel()
            card.asked_s = self._now_s()

    def _failed(self, card: _Card, reason: str) -> None:
        was_told, card.error = card.error is not None, reason
        if not was_told:
            text = f"how the memory of {card.uuid} is used is not known: {reason}"
            self._tell("device_memory_unknown", card, text)

    def _answered(self, card: _Card, memory: CardMemory) -> None:
        was_told, card.error = card.error is not None, None
        card.memory, card.known_s = memory, self._now_s()
        self._assign(card, memory)
        if was_told:
            self._tell("device_memory_known", card, f"nvidia-smi answers about {card.uuid} again")

    def _tell(self, kind: str, card: _Card, text: str) -> None:
        for group in self._on(card):
            self._services.events.append(kind, text, group=group.name)

    def _on(self, card: _Card) -> list[GroupRuntime]:
        return [g for g in self._groups if self._uuids.get(g.name) == card.uuid]

    def _is_quiet(self) -> bool:
        """Whether no group takes over, or has streams that wait for their first token."""
        return not any(self._takes_over(group) for group in self._all_groups)

    def _takes_over(self, group: GroupRuntime) -> bool:
        if group.lock.locked() or not group.tasks.is_free("recovery"):
            return True
        operation = group.operations.waiting_for_token(group.name, group.epoch)
        if operation is None or operation.kind not in _TAKEOVERS:
            return False
        return self._services.clock.monotonic_ns() - operation.started_ns < _TAKEOVER_NS

    # --------------------------------------------------------------- assigning

    def _assign(self, card: _Card, memory: CardMemory) -> None:
        """Whose the processes are, by the pids that we know now.

        What an engine has started is in the engine's session, and counts as the engine.
        """
        found: dict[int, list[int | None]] = {}
        owned = self._owned_pids()
        others: list[int | None] = []
        for holder in memory.holders:
            leader = holder.pid if holder.pid in owned else holder.session
            if leader is not None and leader in owned:
                found.setdefault(leader, []).append(holder.used_bytes)
            else:
                others.append(holder.used_bytes)
        card.engines = {
            group.name: tuple(
                EngineUse(e.name, e.pid, _sum(found.get(e.pid or 0, [None]))) for e in group.engines
            )
            for group in self._on(card)
        }
        uses = [use for engines in card.engines.values() for use in engines]
        # Where the driver lists none of ours, its pids are of another namespace: anybody's.
        is_blind = not found and any(use.pid is not None for use in uses)
        card.others_bytes = None if is_blind else _sum(others)

    def _owned_pids(self) -> set[int]:
        pids: set[int] = set()
        for group in self._all_groups:
            units = (*group.engines, group.zygote, group.cache)
            pids.update(unit.pid for unit in units if unit is not None and unit.pid is not None)
        return pids

    # --------------------------------------------------------------- reporting

    def _report(self, group: GroupRuntime) -> DeviceMemoryReport:
        weights_bytes, kv_bytes = _held(group)
        uuid = self._uuids.get(group.name)
        card = self._cards.get(uuid) if uuid is not None else None
        memory = card.memory if card is not None else None
        if card is None:
            error = "no cache daemon has said which card it is"
        elif memory is None and card.error is None:
            error = "it was not asked about yet"
        else:
            error = card.error or ""
        known_s = card.known_s if card is not None else None
        return DeviceMemoryReport(
            device=group.load.device,
            uuid=uuid,
            total_bytes=memory.total_bytes if memory is not None else None,
            free_bytes=memory.free_bytes if memory is not None else None,
            weights_bytes=weights_bytes,
            kv_bytes=kv_bytes,
            engines=card.engines.get(group.name, ()) if card is not None else (),
            others_bytes=card.others_bytes if card is not None else None,
            age_s=round(self._now_s() - known_s, 1) if known_s is not None else None,
            error=error or None,
        )

    def _now_s(self) -> float:
        return self._services.clock.monotonic()


def _held(group: GroupRuntime) -> tuple[int | None, int | None]:
    """Weights and KV: by the daemon's word, or, while there is no daemon, by what we hold."""
    cache = group.cache
    if cache is None:
        return None, None
    if cache.status is not None:
        return cache.status.weights_bytes, cache.status.kv_bytes
    if cache.held is None:
        return None, None
    kv = cache.held.kv
    return sum(cache.held.manifest.extent_bytes), sum(kv.extent_bytes) if kv is not None else 0


def _sum(figures: Iterable[int | None]) -> int | None:
    """None where one of them is not known: a part is not the whole."""
    total = 0
    for figure in figures:
        if figure is None:
            return None
        total += figure
    return total
