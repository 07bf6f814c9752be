"""Each schedule that once broke an invariant holds now, and for ever."""

import pytest

from tests.sim.seeds import SEEDS
from tests.sim.shrink import report
from tests.sim.simulate import simulate


@pytest.mark.parametrize("name", list(SEEDS))
def test_seed(name: str) -> None:
    outcome = simulate(SEEDS[name])
    assert not outcome.violations, report(outcome)
