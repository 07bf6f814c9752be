"""How many failovers by judgement may follow one another: `intensity` within `period`.

Whatever hangs primaries in a row is not cured by one more failover. A judgement may be wrong, a
death cannot: only what was judged (HUNG, or a wrong answer) is counted here.
"""

__all__ = ["Intensity"]


class Intensity:
    """Remembers failovers by judgement. Pure: the caller brings the monotonic clock."""

    def __init__(self, limit: int, *, period_s: float) -> None:
        self._limit = limit
        self._period_s = period_s
        self._judged_s: list[float] = []

    @property
    def judged_s(self) -> list[float]:
        """When they were, oldest first; what a later supervisor of this boot must know."""
        return self._judged_s

    def recall(self, judged_s: list[float]) -> None:
        """What the last supervisor has counted."""
        self._judged_s = list(judged_s)

    def count(self, now_s: float) -> None:
        """One more."""
        self._judged_s = [*self._judged_s, now_s]

    def is_used_up(self, now_s: float) -> bool:
        """Whether no judgement may end a primary now: BLOCKED."""
        self._judged_s = [t for t in self._judged_s if t > now_s - self._period_s]
        return len(self._judged_s) >= self._limit

    def free_in_s(self, now_s: float) -> float:
        """How long it stays used up by time alone; 0 when it is not."""
        if not self.is_used_up(now_s):
            return 0.0
        return self._judged_s[-self._limit] + self._period_s - now_s

    def forgive(self) -> None:
        """The operator has seen it."""
        self._judged_s = []
