"""Judging a finished record. Assumptions about the record first, guarantees of the product next.

When an assumption does not hold, the record proves nothing and no guarantee is looked at. After
the first broken guarantee the rest is skipped: what follows from a broken one is noise.

A stream whose end the record does not hold is "may have gone on": what arrived of it must be
right, and nothing is said about the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from chaos import accounts, assumptions, guarantees, lives
from chaos.history import History

__all__ = ["ASSUMPTIONS", "GUARANTEES", "Check", "Outcome", "Verdict", "judge"]

_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Check:
    """One question to a record; the answer is a list of sentences, empty when all is well."""

    name: str
    find_problems: Callable[[History], list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check."""

    name: str
    kind: Literal["assumption", "guarantee"]
    state: Literal["held", "broken", "skipped"]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """All outcomes."""

    outcomes: tuple[Outcome, ...]

    @property
    def is_judged(self) -> bool:
        """Whether the record could be judged at all."""
        return all(o.state == "held" for o in self.outcomes if o.kind == "assumption")

    @property
    def is_passed(self) -> bool:
        """Whether everything held."""
        return all(o.state == "held" for o in self.outcomes)

    def sentence(self) -> str:
        """The result in one line."""
        broken = [o for o in self.outcomes if o.state == "broken"]
        if not broken:
            return f"passed: {len(self.outcomes)} checks held"
        first = broken[0]
        verb = "not judged" if first.kind == "assumption" else "FAILED"
        more = f" (and {len(first.problems) - 1} more)" if len(first.problems) > 1 else ""
        return f"{verb}: {first.name}: {first.problems[0]}{more}"


ASSUMPTIONS: Final = (
    Check("the record is complete", assumptions.record_is_complete),
    Check("the clocks agree", assumptions.clocks_agree),
    Check("the watchers kept looking", assumptions.watchers_kept_looking),
    Check("the reference can show a difference", assumptions.reference_is_telling),
    Check("every fault struck under load", assumptions.faults_struck_under_load),
    Check("whoever was killed died", assumptions.victims_died),
)

GUARANTEES: Final = (
    Check("one primary per epoch, and epochs only rise", guarantees.one_primary_per_epoch),
    Check("never two primaries at once", guarantees.no_two_primaries_at_once),
    Check("fenced before promoted", guarantees.fenced_before_promoted),
    Check("every stream is complete and exact", guarantees.streams_are_exact),
    Check("what the scenario expects came", guarantees.expectations_were_met),
    Check("what was asked meanwhile was answered well", guarantees.answers_were_right),
    Check("pause means pause", lives.pause_means_pause),
    Check("failovers by judgement are limited", guarantees.judgement_is_limited),
    Check("the next token came within its bound", guarantees.next_token_within_bound),
    Check("the system was whole within its bound", guarantees.whole_within_bound),
    Check("nobody died uninvited", lives.nobody_died_uninvited),
    Check("who dies young is restarted later and later", lives.restarts_back_off),
    Check("events have no gap", accounts.events_have_no_gap),
    Check("metrics equal the events", accounts.metrics_equal_events),
    Check("nothing is computed twice", accounts.nothing_is_computed_twice),
    Check("no descriptor leaks", accounts.no_descriptor_leaks),
    Check("no task leaks", accounts.no_task_leaks),
    Check("no process without an owner", accounts.no_strays),
    Check("nothing is left after the stop", accounts.nothing_left_behind),
)


def judge(history: History) -> Verdict:
    """Ask everything, in order."""
    outcomes = _ask(history, ASSUMPTIONS, "assumption", stop_early=False)
    holds = all(o.state == "held" for o in outcomes)
    if holds:
        outcomes += _ask(history, GUARANTEES, "guarantee", stop_early=True)
    else:
        outcomes += [Outcome(c.name, "guarantee", "skipped") for c in GUARANTEES]
    return Verdict(tuple(outcomes))


def _ask(
    history: History,
    checks: Sequence[Check],
    kind: Literal["assumption", "guarantee"],
    *,
    stop_early: bool,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    is_broken = False
    for check in checks:
        if is_broken and stop_early:
            outcomes.append(Outcome(check.name, kind, "skipped"))
            continue
        problems = check.find_problems(history)
        is_broken = is_broken or bool(problems)
        shown = (*problems[:_SHOWN], *(["..."] if len(problems) > _SHOWN else []))
        outcomes.append(Outcome(check.name, kind, "broken" if problems else "held", shown))
    return outcomes
