"""What must hold at every moment and at the end; a breach is recorded, the run goes on.

The record is on one clock, so "at most one primary" is a check of intervals: an engine acts as
primary from the moment its mapping is writable until it has given the role up or its death is
proven. A stopped or condemned process still counts: it might write when it is let go on.
"""

from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.sim.clock import VirtualTime
    from tests.sim.proc import Proc

__all__ = ["Judge", "Violation"]

_STARTS_PER_WINDOW: Final = 14
_WINDOW_NS: Final = 10_000_000_000


class Violation(Exception):  # noqa: N818 - the field's word
    """An invariant does not hold."""


class Judge:
    """Takes down what happens, and objects."""

    def __init__(self, clock: "VirtualTime") -> None:
        self._clock = clock
        self.violations: list[str] = []
        self.history: list[tuple[float, str]] = []
        self.is_paused = False  # the operator has been told so
        self.operator_touched: set[str] = set()  # units that a command may end now
        self._writers: dict[tuple[str, int], Proc] = {}  # who acted last as primary of an epoch
        self._acting: dict[str, Proc] = {}  # by group
        self._epochs: dict[str, int] = defaultdict(int)
        self.journal_was_lost = False  # then an epoch that nobody alive knows may come again
        self._starts: dict[str, deque[int]] = defaultdict(deque)
        self.promotions = 0
        self.births: Counter[str] = Counter()

    def note(self, sentence: str) -> None:
        """One line of the history."""
        self.history.append((self._clock.elapsed_s, sentence))

    def breach(self, sentence: str) -> None:
        """An invariant is broken."""
        self.violations.append(sentence)
        self.note(f"VIOLATION: {sentence}")

    def sentences(self) -> list[str]:
        """The history, one line each."""
        return [f"{at_s:9.4f} s  {text}" for at_s, text in self.history]

    # ---------------------------------------------------------------- processes

    def born(self, proc: "Proc", *, is_stray: bool) -> None:
        """A process was started; a stray by order of a supervisor that is dead by now."""
        self.note(f"{proc} was started")
        self.births[proc.kind] += 1
        starts = self._starts[proc.unit]
        starts.append(self._clock.now_ns)
        while starts and starts[0] < self._clock.now_ns - _WINDOW_NS:
            starts.popleft()
        if len(starts) > _STARTS_PER_WINDOW:
            self.breach(f"{proc.unit} was started {len(starts)} times within 10 s")
        if self.is_paused and not is_stray:
            self.breach(f"{proc.unit} was started while paused")

    def ended(self, proc: "Proc") -> None:
        """Its death is proven."""
        self.note(f"{proc} is dead")
        if self._acting.get(proc.group) is proc:
            del self._acting[proc.group]

    def signalled(self, proc: "Proc", what: str, *, expected: bool) -> None:
        """A supervisor signals a living process."""
        self.note(f"the supervisor sends {what} to {proc}")
        if self.is_paused:
            self.breach(f"{proc.unit} got {what} while paused")
        if what == "SIGKILL" and not expected:
            self.breach(f"{proc.unit} was killed though it did its work")

    # -------------------------------------------------------------------- roles

    def ordered_primary(self, proc: "Proc", epoch: int) -> None:
        """A supervisor orders a promotion."""
        acting = self._acting.get(proc.group)
        if self.is_paused and acting is not proc:  # a higher epoch for who serves is no promotion
            self.breach(f"{proc.unit} was promoted while paused")
        if acting is not None and acting is not proc:
            self.breach(
                f"{proc.unit} was promoted to epoch {epoch} while {acting.unit} was not fenced"
            )

    def acts(self, proc: "Proc", epoch: int) -> None:
        """An engine begins to act as primary."""
        self.note(f"{proc} acts as primary of epoch {epoch}")
        self.promotions += 1
        acting = self._acting.get(proc.group)
        if acting is not None and acting is not proc:
            self.breach(f"{proc.unit} and {acting.unit} act as primary at the same time")
        before = self._writers.get((proc.group, epoch))
        is_forgotten = self.journal_was_lost and acting is None
        if before is not None and before is not proc and not is_forgotten:
            self.breach(f"{before} and {proc} were both primary of epoch {epoch}")
        highest = self._epochs[proc.group]
        if epoch < highest and not is_forgotten:
            self.breach(f"{proc.unit} acts at epoch {epoch}, behind epoch {highest}")
        self._epochs[proc.group] = max(highest, epoch)
        self._writers[proc.group, epoch] = proc
        self._acting[proc.group] = proc

    def got_stale_routes(self, worker: "Proc", epoch: int, known: int) -> None:
        """A gateway is told of an epoch below the one that it knows, and refuses."""
        sentence = f"{worker.unit} got routes of epoch {epoch} after {known}"
        if self.journal_was_lost:
            self.note(sentence)  # from then on the supervisor must go above it
        else:
            self.breach(sentence)

    def rests(self, proc: "Proc") -> None:
        """An engine has given up its role."""
        self.note(f"{proc} has given up its role")
        if self._acting.get(proc.group) is proc:
            del self._acting[proc.group]

    # ------------------------------------------------------------------- events

    def check_events(self, events: list[dict[str, Any]], *, first_seq: int) -> None:
        """Sequence numbers rise by one."""
        found = [e["seq"] for e in events]
        if found != list(range(first_seq, first_seq + len(found))):
            self.breach("the events' sequence has a gap")
