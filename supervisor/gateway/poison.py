"""Which request crashes engines: evidence against one, and trials that protect its neighbours.

When an engine crashes, every request that it had is under suspicion. One that was present at three
crashes (which nobody caused from outside) ends. A request that crashes every engine it meets would
take all its neighbours along, so from the second crash on suspects go on one at a time, the next
one when the last has shown that the engine survives it. A crash during a trial is the defendant's
alone.

Invariants
    1. Nothing here delays a request that was present at fewer than two crashes.
    2. A trial and the wait for it are bounded: no request misses its deadline for them. Some
       hundred suspects have their turn within that bound; the rest go on without.
    3. The verdict needs crashes that the supervisor has confirmed; a death that nobody has
       explained yet only makes the request wait.

WARNING: trials are per worker. With several workers one innocent request of each other worker may
run beside the guilty one and share its end.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Final

from supervisor.gateway.limits import TRIAL_FRAMES, TRIAL_LEAST_S, TRIAL_S, TRIAL_WAIT_S
from supervisor.gateway.routes import RouteTable

__all__ = ["POISON_CRASHES", "Courtroom", "Opinion", "Suspicion", "Trial"]

POISON_CRASHES: Final = 3
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

    @property
    def instances(self) -> list[str]:
        """Engines that were lost while they had the request, oldest first."""
        return list(self._lost_at)

    def lost(self, instance: str) -> None:
        """An engine was lost while it had the request."""
        if instance not in self._lost_at:
            self._lost_at = [*self._lost_at, instance][-_REMEMBERED:]

    def opinion(self, table: RouteTable, group: str) -> Opinion:
        """What the deaths that the table knows of mean for this request."""
        if len(self._lost_at) < POISON_CRASHES - 1:
            return Opinion.CLEAR
        crashes = table.crashes_among(group, self._lost_at)
        possible = crashes + table.unexplained_among(group, self._lost_at)
        if crashes >= POISON_CRASHES:
            return Opinion.POISON
        if possible >= POISON_CRASHES:
            return Opinion.UNEXPLAINED
        return Opinion.SUSPECT if possible == POISON_CRASHES - 1 else Opinion.CLEAR


class Trial:
    """One suspect's turn at one engine. Ends by progress, by time, or with the attempt."""

    def __init__(self, court: "_Court", suspicion: Suspicion, instance: str) -> None:
        self.suspicion = suspicion
        self.instance = instance
        self._court = court
        self._frames = 0
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._least = self._loop.time() + TRIAL_LEAST_S
        self._timer = self._loop.call_later(TRIAL_S, self.end)

    def saw_tokens(self) -> None:
        """The engine has sent tokens of this request."""
        self._frames += 1
        if self._frames == TRIAL_FRAMES and not self._is_over:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._least, self.end)

    def failed(self) -> None:
        """The engine was lost during the trial: nobody else is to blame."""
        if not self._is_over:
            self._court.convicted.append(self.instance)

    def end(self) -> None:
        """Let the next one have its turn. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._timer.cancel()
            self._court.trial = None
            self._court.lock.release()


class _Court:
    """The trials of one group: one at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.trial: Trial | None = None
        self.convicted: deque[str] = deque(maxlen=_REMEMBERED)  # engines lost in a trial


class Courtroom:
    """Where suspects of one worker wait for their turn."""

    def __init__(self) -> None:
        self._courts: dict[str, _Court] = {}

    def _of(self, group: str) -> _Court:
        return self._courts.setdefault(group, _Court())

    @asynccontextmanager
    async def trial(
        self, suspicion: Suspicion, group: str, instance: str, *, is_suspect: bool
    ) -> AsyncIterator[Trial | None]:
        """Wait for the turn of a suspect; None: it goes on without a trial.

        Raises nothing: a suspect whose turn does not come in time goes on too.
        """
        court = self._of(group)
        trial = None
        if is_suspect:
            try:
                async with asyncio.timeout(TRIAL_WAIT_S):
                    await court.lock.acquire()
            except TimeoutError:
                yield None
                return
            trial = court.trial = Trial(court, suspicion, instance)
        try:
            yield trial
        finally:
            if trial is not None:
                trial.end()

    def is_excused(self, suspicion: Suspicion, group: str, instance: str) -> bool:
        """Whether the loss of this engine is somebody else's: it was lost during their trial."""
        court = self._of(group)
        trial = court.trial
        if trial is not None and trial.instance == instance:
            return trial.suspicion is not suspicion
        return instance in court.convicted
