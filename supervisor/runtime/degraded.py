"""What the supervisor itself lacks: serving goes on all the same, and the operator is told."""

from collections.abc import Callable
from typing import Final

from supervisor.process import RESERVE
from supervisor.runtime.services import Services

__all__ = ["Degraded"]

_LACKS: Final = {
    "disk": "room on its disk",
    "descriptors": "file descriptors",
    "start": "what a new process needs",
    "address": "an address to listen on",
}


class Degraded:
    """The causes that hold now, by name, and what is said when one begins or is over."""

    def __init__(self, services: Services, look: Callable[[], dict[str, str]]) -> None:
        """`look` says why, for each cause; empty where it does not hold."""
        self._services = services
        self._look = look
        self._told: dict[str, str] = {}

    def current(self) -> dict[str, str]:
        """Why, by cause."""
        found = self._look() | {
            "descriptors": "no file descriptor is left" if RESERVE.is_short else ""
        }
        return {cause: found[cause] for cause in _LACKS if found[cause]}

    def note(self) -> None:
        """Events and metric for what has begun and what is over since the last time."""
        RESERVE.fill()
        before, self._told = self._told, self.current()
        self._services.metrics.set_degraded(self._told)
        append = self._services.events.append
        for cause in self._told.keys() - before.keys():
            text = f"the supervisor lacks {_LACKS[cause]}: {self._told[cause]}"
            append("degraded", text, cause=cause)
        for cause in before.keys() - self._told.keys():
            append("recovered", f"the supervisor has {_LACKS[cause]} again", cause=cause)
