"""Many schedules, one seed after another, and what they found."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.sim.schedule import draw
from tests.sim.shrink import command_of, kind_of
from tests.sim.simulate import Outcome, simulate

__all__ = ["Campaign", "run"]


@dataclass
class Campaign:
    """Counts of a campaign so far."""

    first_seed: int
    schedules: int = 0
    took_s: float = 0.0
    virtual_s: float = 0.0
    promotions: int = 0
    failures: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by kind

    def __str__(self) -> str:
        rate = self.schedules / self.took_s * 60 if self.took_s else 0.0
        return (
            f"{self.schedules} schedules from seed {self.first_seed} in {self.took_s:.1f} s "
            f"({rate:.0f} a minute): {self.virtual_s / 3600:.1f} hours of virtual time, "
            f"{self.promotions} promotions, {len(self.failures)} kinds of breach"
        )


def run(
    seeds: Iterable[int],
    *,
    first_seed: int,
    is_over: Callable[[Campaign, Outcome], bool],
) -> tuple[Campaign, Outcome | None]:
    """Run seeds until there are no more, or `is_over`; returns the last outcome too."""
    campaign, outcome = Campaign(first_seed), None
    begun_s = time.monotonic()
    for seed in seeds:
        try:
            outcome = simulate(draw(seed))
        except BaseException as error:  # an interrupt and a timeout of the test runner too
            error.add_note(f"in the schedule of seed {seed}; to repeat it: {command_of(seed)}")
            raise
        campaign.schedules += 1
        campaign.virtual_s += outcome.virtual_s
        campaign.promotions += outcome.promotions
        campaign.took_s = time.monotonic() - begun_s
        for violation in outcome.violations:
            campaign.failures[kind_of(violation)].append(seed)
        if is_over(campaign, outcome):
            break
    return campaign, outcome
