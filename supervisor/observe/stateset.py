"""A one-hot set: exactly one of the states has the value 1, and all have a series."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["StateSet"]


class StateSet(Collector):
    """A gauge whose last label is the state. A state that was not known joins the set, for all.

    A scrape in another thread copies the current states first: it never sees two, or none.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], states: Iterable[str] = ()
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._states = list(states)
        self._current: dict[tuple[str, ...], str] = {}

    def set(self, key: tuple[str, ...], state: str) -> None:
        """Make `state` the one; the empty string stands for none."""
        if state and state not in self._states:
            self._states.append(state)
        self._current[key] = state

    def collect(self) -> Iterator[Metric]:
        """The family as it is now."""
        current, states = dict(self._current), list(self._states)
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for key, hot in current.items():
            for state in states:
                family.add_metric([*key, state], float(state == hot))
        yield family

    def describe(self) -> Iterator[Metric]:
        """The name only, for the registry's check on duplicates."""
        yield GaugeMetricFamily(self._name, self._text, labels=self._labels)
