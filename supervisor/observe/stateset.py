"""A one-hot set: exactly one of the states has the value 1, and all have a series."""

from collections.abc import Iterable

from prometheus_client import Gauge

__all__ = ["StateSet"]


class StateSet:
    """Sets one state of a labelled gauge to 1 and the others to 0; the state is its last label.

    A state that was not known joins the set, for every key.
    """

    def __init__(self, gauge: Gauge, states: Iterable[str] = ()) -> None:
        self._gauge = gauge
        self._states = list(states)
        self._current: dict[tuple[str, ...], str] = {}

    def set(self, key: tuple[str, ...], state: str) -> None:
        """Make `state` the one; the empty string stands for none."""
        is_new_state = bool(state) and state not in self._states
        if is_new_state:
            self._states.append(state)
        self._current[key] = state
        for each in self._current if is_new_state else (key,):
            for name in self._states:
                self._gauge.labels(*each, name).set(name == self._current[each])
