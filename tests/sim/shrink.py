"""Makes a failing schedule small: fewer steps, a simpler shape, the same kind of breach."""

import re
from dataclasses import replace
from typing import Final

from tests.sim.schedule import Schedule
from tests.sim.shapes import Shape
from tests.sim.simulate import Outcome, simulate

__all__ = ["report", "shrink"]

_RUNS: Final = 150
_NUMBERS: Final = re.compile(r"[0-9]+|-[0-9a-f]{8}\b")


def shrink(outcome: Outcome) -> Outcome:
    """The smallest schedule found that breaks one of the same invariants."""
    wanted = {_shape_of(v) for v in outcome.violations}
    best, runs, progress = outcome, 0, True
    while progress and runs < _RUNS:
        progress = False
        for candidate in _smaller(best.schedule):
            runs += 1
            tried = simulate(candidate)
            if wanted & {_shape_of(v) for v in tried.violations}:
                best, progress = tried, True
                break
            if runs >= _RUNS:
                break
    return best


def _shape_of(violation: str) -> str:
    """A breach without the numbers and names of one run."""
    return _NUMBERS.sub("#", violation)[:60]


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
    """A failure as a person reads it: what broke, the schedule, the history."""
    schedule = outcome.schedule
    return "\n".join([
        *(f"BROKEN: {v}" for v in outcome.violations),
        f"seed {schedule.seed}, {schedule.shape}, heals={schedule.heals}",
        *(f"    {step}" for step in schedule.steps),
        "history:",
        *(f"    {line}" for line in outcome.history),
    ])  # fmt: skip
