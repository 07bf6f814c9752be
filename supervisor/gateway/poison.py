"""Which request crashes engines: evidence against one, and trials that clear the others.

When an engine crashes, every request that it had is under suspicion, and with three crashes (that
nobody caused from outside) the guilty one must end, not its neighbours. So from the second crash
on, suspects go on one at a time: the next one only when the last has shown that the engine
survives it. Whoever passes such a trial may be present at one crash more.

Invariants
    1. Nothing here delays a request that was present at fewer than two crashes.
    2. A trial and the wait for it are bounded: no innocent request misses its deadline for them.
    3. The verdict needs crashes that the supervisor has confirmed; a death that nobody has
       explained yet only makes the request wait.

WARNING: trials are per worker. With several workers one innocent request of each other worker may
run beside the guilty one and share its end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Final

from supervisor.gateway.limits import TRIAL_FRAMES, TRIAL_S, TRIAL_WAIT_S
from supervisor.gateway.routes import RouteTable

__all__ = ["POISON_CRASHES", "Courtroom", "Opinion", "Suspicion", "Trial"]

POISON_CRASHES: Final = 3
_MOST_ACQUITTALS: Final = 3
_REMEMBERED: Final = 32


class Opinion(Enum):
    """What the evidence allows."""

    CLEAR = auto()
    SUSPECT = auto()  # goes on, but only in a trial
    UNEXPLAINED = auto()  # the last death decides, and nobody knows yet what it was
    POISON = auto()


class Suspicion:
    """The evidence against one request."""

    def __init__(self) -> None:
        self._lost_at: list[str] = []
        self._acquittals = 0

    @property
    def instances(self) -> list[str]:
        """Engines that were lost while they had the request, oldest first."""
        return list(self._lost_at)

    def lost(self, instance: str) -> None:
        """An engine was lost while it had the request."""
        if instance not in self._lost_at:
            self._lost_at = [*self._lost_at, instance][-_REMEMBERED:]

    def acquitted(self) -> None:
        """It has passed a trial."""
        self._acquittals = min(self._acquittals + 1, _MOST_ACQUITTALS)

    def opinion(self, table: RouteTable, group: str) -> Opinion:
        """What the deaths that the table knows of mean for this request."""
        limit = POISON_CRASHES + self._acquittals
        if len(self._lost_at) < limit - 1:
            return Opinion.CLEAR
        crashes = table.crashes_among(group, self._lost_at)
        possible = crashes + table.unexplained_among(group, self._lost_at)
        if crashes >= limit:
            return Opinion.POISON
        if possible >= limit:
            return Opinion.UNEXPLAINED
        return Opinion.SUSPECT if possible >= limit - 1 else Opinion.CLEAR


class Trial:
    """One request's turn. Ends by progress, by time, or with the attempt."""

    def __init__(self, lock: asyncio.Lock | None, suspicion: Suspicion) -> None:
        self._lock = lock
        self._suspicion = suspicion
        self._frames = 0
        self._timer = (
            None if lock is None else asyncio.get_running_loop().call_later(TRIAL_S, self._pass)
        )

    def saw_tokens(self) -> None:
        """The engine has sent tokens of this request."""
        if self._timer is not None:
            self._frames += 1
            if self._frames >= TRIAL_FRAMES:
                self._pass()

    def _pass(self) -> None:
        if self._timer is not None:
            self._suspicion.acquitted()
            self.end()

    def end(self) -> None:
        """Let the next one have its turn. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._lock is not None:
                self._lock.release()


class Courtroom:
    """Where suspects of one worker wait for their turn: one at a time in each group."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def trial(
        self, suspicion: Suspicion, group: str, *, is_suspect: bool
    ) -> AsyncIterator[Trial]:
        """Wait for the turn of a suspect; others go on at once."""
        trial = await self._begin(suspicion, group) if is_suspect else Trial(None, suspicion)
        try:
            yield trial
        finally:
            trial.end()

    async def _begin(self, suspicion: Suspicion, group: str) -> Trial:
        lock = self._locks.setdefault(group, asyncio.Lock())
        try:
            async with asyncio.timeout(TRIAL_WAIT_S):
                await lock.acquire()
        except TimeoutError:
            return Trial(None, suspicion)
        return Trial(lock, suspicion)
