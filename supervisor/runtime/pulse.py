"""Whether a process still answers its control socket.

Engines are judged by their progress too; helpers (zygote, cache daemon, gateway worker) have none.
All are asked something cheap once a second. `UNANSWERED` questions in a row, or for a helper state
`T` at two looks in a row, make one silent: it lives and is of no use. What follows is decided
elsewhere; here nothing is signalled. One that nobody is connected to (it did not answer in time
when it was adopted) is connected to first.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from supervisor.core.verdict import STARVED_SHARE
from supervisor.errors import RemoteError, UnderstudyError
from supervisor.runtime.lack import is_our_lack
from supervisor.runtime.unit import Unit

__all__ = ["BEAT_S", "UNANSWERED", "Pulse"]

BEAT_S: Final = 1.0
UNANSWERED: Final = 5
"""A zygote forks for up to 0.1 s and a daemon checks a donation; nobody is busy for seconds."""

_STOPPED_LOOKS: Final = 2


class Pulse:
    """The pulse of one unit. `is_starting` tells when it has a deadline of its own.

    Counted in questions without an answer, not in time: a supervisor that was stalled itself has
    asked nothing meanwhile. One that waited for a CPU most of the time is starved, and not silent.
    """

    def __init__(
        self,
        unit: Unit,
        verb: str,
        *,
        is_starting: Callable[[], bool],
        rejoin: Callable[[], Awaitable[None]],
    ) -> None:
        self._unit = unit
        self._rejoin = rejoin
        self._verb = verb
        self._is_starting = is_starting
        self._instance = ""
        self._unanswered = 0
        self._stopped_looks = 0
        self._answered_ns = 0
        self._delay_ns = 0  # at that time, on run queues

    @property
    def is_silent(self) -> bool:
        """Whether the unit lives and does not answer."""
        if not self._unit.is_alive or self._unit.instance != self._instance:
            return False
        return self._stopped_looks >= _STOPPED_LOOKS or self.is_deaf

    @property
    def is_deaf(self) -> bool:
        """Whether questions stay without an answer; for engines, which may be stopped on order."""
        if not self._unit.is_alive or self._unit.instance != self._instance:
            return False
        return self._unanswered >= UNANSWERED and not self._is_starved()

    def _is_starved(self) -> bool:
        services, pid = self._unit.services, self._unit.pid
        if pid is None:
            return False
        delayed_ns = services.machine.cpu(pid).run_delay_ns - self._delay_ns
        return delayed_ns > STARVED_SHARE * (services.clock.monotonic_ns() - self._answered_ns)

    async def beat(self) -> None:
        """Ask once; takes at most `BEAT_S`. To be called once in that time."""
        unit = self._unit
        if unit.instance != self._instance:
            self._instance = unit.instance
            self._stopped_looks = 0
            self._note_answer()
        if not unit.is_alive:
            return
        self._stopped_looks = self._stopped_looks + 1 if unit.is_stopped_by_signal else 0
        if self._is_starting() or await self._answers():
            self._note_answer()
        elif unit.instance == self._instance:
            self._unanswered += 1

    def _note_answer(self) -> None:
        services, pid = self._unit.services, self._unit.pid
        self._unanswered = 0
        self._answered_ns = services.clock.monotonic_ns()
        self._delay_ns = services.machine.cpu(pid).run_delay_ns if pid is not None else 0

    async def _answers(self) -> bool:
        try:
            if not self._unit.is_connected:
                await self._rejoin()
            else:
                await self._unit.call(self._verb, timeout_s=BEAT_S)
        except RemoteError:
            return True  # an error is an answer
        except (UnderstudyError, OSError) as error:
            return is_our_lack(error)  # then nothing is known, and nothing is held against it
        return True
