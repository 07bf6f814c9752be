"""What outlives a supervisor in its journal: told to the disk here, and recalled by the next one.

Only what no process can tell is recalled; who runs and in which role is asked of the processes.

Invariants
    1. The ceiling of the epochs is on disk before the epoch is given out: it is raised long before
       it is reached, so that no promotion waits for a disk.
    2. Before everything that was found is adopted, nothing that was saved is written over.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from supervisor.observe.journal import Journal, JournalState, ProcessRecord
from supervisor.process import ProcessId, own_boot_id
from supervisor.runtime.services import Services
from supervisor.runtime.strays import unit_name
from supervisor.runtime.unit import Unit

if TYPE_CHECKING:
    from supervisor.runtime.group import GroupRuntime

__all__ = ["Keeping"]

log = logging.getLogger(__name__)

_EPOCHS_AHEAD: Final = 16
"""The journal holds a ceiling: so many promotions need no disk."""

_RESERVE_S: Final = 0.5


class Keeping:
    """The journal of one supervisor, in terms of groups and units."""

    def __init__(
        self,
        services: Services,
        journal: Journal,
        saved: JournalState,
        *,
        groups: "list[GroupRuntime]",
        units: Callable[[], Iterable[Unit]],
    ) -> None:
        """`groups` may be filled later, before the first call."""
        self._services = services
        self._journal = journal
        self._saved = saved
        self._groups = groups
        self._units = units

    @property
    def trouble(self) -> str:
        """Why the disk takes nothing now; empty while it does."""
        return self._journal.degraded

    def recall(self) -> None:
        """Give every group what the last supervisor knew and no process can tell."""
        saved = self._saved
        for group in self._groups:
            group.epoch_ceiling = saved.epochs.get(group.name, 0)
        if saved.boot_id != own_boot_id():
            return  # no process of that time is left
        for group in self._groups:
            group.judged.recall(saved.judged.get(group.name, []))
            group.former_golden = saved.canaries.get(group.name)
            for engine in group.engines:
                engine.is_held = engine.name in saved.held
                engine.former_state = saved.roles.get(engine.name, "")
        for one in saved.attested:
            process = ProcessId(one.pid, one.start_ticks, own_boot_id())
            self._services.attested[one.instance] = process

    async def reserve_epochs(self) -> None:
        """Raise the ceilings before the first promotion, which goes above the last one's.

        Where nobody serves, that promotion follows at once, so the disk is waited for: a crash
        right behind it would give the same epoch out again. A disk that takes nothing, or hangs,
        is not waited for beyond a moment.
        """
        self._saved = msgspec.structs.replace(self._saved, epochs=self._epochs())
        self._journal.save(self._saved)
        if any(g.primary is None for g in self._groups):
            is_on_disk = await asyncio.to_thread(self._journal.flush, timeout_s=_RESERVE_S)
            if not is_on_disk:
                log.warning(
                    "the disk has not taken the epochs in time: after a crash from here on, one "
                    "that nobody alive knows may be given out again"
                )

    def save(self) -> None:
        """Tell the journal's thread what a later supervisor must know; never waits."""
        if all(g.is_open for g in self._groups):
            state = self._state()
        else:  # what was saved before is better than what we know while we look at what we found
            state = msgspec.structs.replace(self._saved, paused=self._services.is_paused)
        if state != self._saved:
            self._saved = state
            self._journal.save(state)

    def _epochs(self) -> dict[str, int]:
        """The ceilings: raised long before they are reached."""
        epochs = {}
        for group in self._groups:
            ceiling = self._saved.epochs.get(group.name, 0)
            low = group.epoch + _EPOCHS_AHEAD // 2
            epochs[group.name] = ceiling if ceiling > low else group.epoch + _EPOCHS_AHEAD
        return epochs

    def _state(self) -> JournalState:
        engines = [e for g in self._groups for e in g.engines]
        return JournalState(
            boot_id=own_boot_id(),
            name=self._services.topology.name,
            epochs=self._epochs(),
            processes=[
                ProcessRecord(u.kind, u.name, u.group, u.instance,
                              u.handle.process.pid, u.handle.process.start_ticks)
                for u in self._units()
                if u.handle is not None
            ],
            canaries={g.name: g.golden for g in self._groups if g.golden is not None},
            paused=self._services.is_paused,
            roles={e.name: e.state.value for e in engines},
            held=[e.name for e in engines if e.is_held],
            judged={g.name: g.judged.judged_s for g in self._groups if g.judged.judged_s},
            attested=[
                ProcessRecord("engine", unit_name(instance), "", instance, p.pid, p.start_ticks)
                for instance, p in self._services.attested.items()
            ],
        )  # fmt: skip
