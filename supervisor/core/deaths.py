"""How the engines of a group ended, as far as the gateways must know: the record behind poison.

A request that sits in a slot whenever an engine crashes is probably the reason. The gateways count
that; what a death was is known only after the reap, so a death is *unexplained* for a moment.

Invariants
    1. Pure: the caller brings the clock and the exit status.
    2. Only a process that ended by its own fault is a crash. SIGKILL, SIGTERM and the like come
       from outside (we, the operator, the kernel short of memory), and exit status 0 is no crash;
       unless it had said that it failed: then whoever ended it only was quicker.
    3. Bounded: the newest `REMEMBERED` crashes; an explanation that never comes stops being
       awaited after `EXPLAINED_WITHIN_S`.
"""

import signal
from collections import deque
from typing import Final

__all__ = ["EXPLAINED_WITHIN_S", "REMEMBERED", "DeathRecord", "is_own_fault", "sentence_of"]

REMEMBERED: Final = 32
EXPLAINED_WITHIN_S: Final = 10.0
"""The kernel needs up to a second to take a large engine down; a dead zygote reports nothing."""

_FROM_OUTSIDE: Final = frozenset({
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
})  # fmt: skip


def is_own_fault(exit_status: int) -> bool:
    """Whether a process that ended so (exit code, or the negative signal) has crashed."""
    return exit_status > 0 or (exit_status < 0 and -exit_status not in _FROM_OUTSIDE)


def sentence_of(exit_status: int) -> str:
    """`was ended by SIGSEGV`, or `left with status 1`."""
    if exit_status >= 0:
        return f"left with status {exit_status}"
    try:
        name = signal.Signals(-exit_status).name
    except ValueError:  # a realtime signal
        name = f"signal {-exit_status}"
    return f"was ended by {name}"


class DeathRecord:
    """Instances of one group that died, and why."""

    def __init__(self) -> None:
        self._crashed: deque[str] = deque(maxlen=REMEMBERED)
        self._explained: deque[str] = deque(maxlen=REMEMBERED)
        self._announced: deque[str] = deque(maxlen=REMEMBERED)
        self._unexplained: dict[str, float] = {}

    @property
    def crashed(self) -> list[str]:
        """The newest instances that ended by their own fault, oldest first."""
        return list(self._crashed)

    def unexplained(self, now_s: float) -> list[str]:
        """Instances that died a moment ago; nobody has said yet how."""
        for instance, seen_s in list(self._unexplained.items()):
            if now_s - seen_s > EXPLAINED_WITHIN_S:
                del self._unexplained[instance]
        return list(self._unexplained)

    def announced(self, instance: str) -> None:
        """It says itself that it has failed, and is about to end."""
        if instance not in self._announced:
            self._announced.append(instance)

    def died(self, instance: str, now_s: float) -> None:
        """Its death is proven. The explanation may have come before."""
        if instance not in self._explained:
            self._unexplained.setdefault(instance, now_s)

    def explained(self, instance: str, exit_status: int) -> bool:
        """How it ended is known; True when that is news and it was a crash."""
        self._unexplained.pop(instance, None)
        if instance in self._explained:
            return False
        self._explained.append(instance)
        if not (is_own_fault(exit_status) or instance in self._announced):
            return False
        self._crashed.append(instance)
        return True
