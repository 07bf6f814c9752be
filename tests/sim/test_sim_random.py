"""Random schedules for about a minute. A failure is shrunk, and printed as a story.

To repeat one: `python -m tests.sim --seed N --schedules 1`; for longer runs give more schedules.
"""

import os
import secrets

import pytest

from tests.sim.campaign import run
from tests.sim.schedule import draw
from tests.sim.shrink import report, shrink
from tests.sim.simulate import simulate

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


def test_the_same_schedule_gives_the_same_history() -> None:
    def numbers(seed: int) -> list[str]:
        return [line.split(" s  ")[0] for line in simulate(draw(seed)).history]

    for seed in (7, 3333, 90210):
        assert numbers(seed) == numbers(seed)
