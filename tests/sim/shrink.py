"""Makes a failing schedule small: fewer steps, a simpler shape, the same kind of breach.

And tells it: what broke, how to repeat it, the schedule as it goes into `seeds/`, the history.
"""

import re
import sys
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Final

from tests.sim.schedule import Schedule, Step
from tests.sim.shapes import Shape
from tests.sim.simulate import Outcome, simulate

__all__ = ["command_of", "kind_of", "report", "shrink"]

_RUNS: Final = 150
_NUMBERS: Final = re.compile(r"[0-9]+|-[0-9a-f]{8}\b")


def shrink(outcome: Outcome) -> Outcome:
    """The smallest schedule found that breaks one of the same invariants."""
    wanted = {kind_of(v) for v in outcome.violations}
    best, runs, progress = outcome, 0, True
    while progress and runs < _RUNS:
        progress = False
        for candidate in _smaller(best.schedule):
            runs += 1
            tried = simulate(candidate)
            if wanted & {kind_of(v) for v in tried.violations}:
                best, progress = tried, True
                break
            if runs >= _RUNS:
                break
    return best


def kind_of(violation: str) -> str:
    """A breach without the numbers and names of one run."""
    return _NUMBERS.sub("#", violation)[:60]


def command_of(seed: int) -> str:
    """The command that repeats the schedule of a seed, and shrinks it when it breaks something."""
    return f"{sys.executable} -m tests.sim --seed {seed} --schedules 1"


def _smaller(schedule: Schedule) -> list[Schedule]:
    steps = schedule.steps
    halves = len(steps) // 2
    cuts = [steps[:halves], steps[halves:]] if halves > 1 else []
    cuts += [steps[:i] + steps[i + 1 :] for i in range(len(steps))]
    found = [replace(schedule, steps=cut) for cut in cuts]
    plain = Shape(has_batch=schedule.shape.has_batch)
    if schedule.shape != plain:
        found.append(replace(schedule, shape=plain))
    if schedule.shape.has_batch:
        found.append(replace(schedule, shape=replace(schedule.shape, has_batch=False)))
    return found


def report(outcome: Outcome) -> str:
    """A failure as a person reads it: what broke, how to repeat it, the schedule, the history."""
    schedule = outcome.schedule
    return "\n".join([
        *(f"BROKEN: {v}" for v in outcome.violations),
        f"to repeat it: {command_of(schedule.seed)}",
        f"as it goes into tests/sim/seeds: {_as_code(schedule)}",
        *(f"    {step}" for step in schedule.steps),
        "history:",
        *(f"    {line}" for line in outcome.history),
    ])  # fmt: skip


def _as_code(schedule: Schedule) -> str:
    steps = [_step_as_code(step) for step in schedule.steps]
    rest = [f"shape={schedule.shape}", f"heals={schedule.heals}"]
    return f"_schedule({', '.join([str(schedule.seed), *steps, *rest])})"


def _step_as_code(step: Step) -> str:
    fields = [getattr(step, f.name) for f in dataclass_fields(step)]
    while fields and fields[-1] in ("", 0.0):
        fields.pop()
    return f"Step({', '.join(repr(value) for value in fields)})"
