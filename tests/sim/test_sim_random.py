"""Random schedules for about a minute. A failure is shrunk, and printed as a story.

A red prints the command that repeats it; for longer runs see the README.
"""

import os
import secrets
import subprocess

import pytest

from supervisor.runtime.cache import CacheUnit
from tests.sim.campaign import run
from tests.sim.schedule import Schedule, Step, draw
from tests.sim.shapes import Shape
from tests.sim.shrink import report, shrink
from tests.sim.simulate import Outcome, simulate

_SECONDS = float(os.environ.get("SIM_SECONDS", "60"))
_SEED = os.environ.get("SIM_SEED", "")


@pytest.mark.timeout(_SECONDS + 240)
def test_no_random_schedule_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    first = int(_SEED) if _SEED else secrets.randbelow(1 << 40)
    campaign, last = run(
        range(first, first + 10_000_000),
        first_seed=first,
        is_over=lambda c, outcome: bool(outcome.violations) or c.took_s > _SECONDS,
    )
    with capsys.disabled():
        print(f"\nsimulator: {campaign}")
    assert last is not None
    if last.violations:
        pytest.fail(report(shrink(last)), pytrace=False)


def test_a_red_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed and the command, and the shrunk schedule as it goes into the seeds."""
    monkeypatch.setattr(CacheUnit, "close", lambda _: None)  # every schedule with a cache leaks
    _, last = run(range(77, 99), first_seed=77, is_over=lambda _, outcome: bool(outcome.violations))
    assert last is not None
    assert last.violations
    seed, told = last.schedule.seed, report(shrink(last))
    command = next(line for line in told.splitlines() if line.startswith("to repeat it: "))
    assert command.endswith(f" -m tests.sim --seed {seed} --schedules 1")
    code = next(line for line in told.splitlines() if line.startswith("as it goes into "))
    names = {"_schedule": _rebuilt, "Step": Step, "Shape": Shape}
    again = eval(code.partition(": ")[2], names)  # noqa: S307 - as if it were pasted
    assert simulate(again).violations
    monkeypatch.undo()
    words = [*command.partition(": ")[2].split(), "--history"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "supervisor 1 starts" in answer.stdout


def _rebuilt(seed: int, *steps: Step, shape: Shape, heals: bool) -> Schedule:
    return Schedule(seed, shape, steps, heals)


def test_an_error_of_the_simulator_itself_names_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Schedule) -> Outcome:
        raise RuntimeError("nothing will ever happen again")

    monkeypatch.setattr("tests.sim.campaign.simulate", broken)
    with pytest.raises(RuntimeError) as caught:
        run([42], first_seed=42, is_over=lambda *_: True)
    assert "--seed 42 " in caught.value.__notes__[0]


def test_the_same_schedule_gives_the_same_history() -> None:
    def numbers(seed: int) -> list[str]:
        return [line.split(" s  ")[0] for line in simulate(draw(seed)).history]

    for seed in (7, 3333, 90210):
        assert numbers(seed) == numbers(seed)
