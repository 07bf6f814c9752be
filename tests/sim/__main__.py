"""`python -m tests.sim --seed N --schedules M`: many random schedules, the first failure shrunk."""

import argparse
import sys

from tests.sim.campaign import Campaign, run
from tests.sim.schedule import draw
from tests.sim.shrink import report, shrink
from tests.sim.simulate import Outcome, simulate


def main() -> int:
    """Run; exit status 1 when an invariant does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--schedules", type=int, default=1000, help="how many seeds")
    parser.add_argument("--keep-going", action="store_true", help="count breaches, shrink none")
    parser.add_argument("--history", action="store_true", help="tell the first seed's history")
    options = parser.parse_args()
    if options.history:
        print(report(simulate(draw(options.seed))))
        return 0

    def is_over(_: Campaign, outcome: Outcome) -> bool:
        if outcome.violations and options.keep_going:
            print(f"seed {outcome.schedule.seed}: {'; '.join(outcome.violations)}", flush=True)
        return bool(outcome.violations) and not options.keep_going

    campaign, last = run(
        range(options.seed, options.seed + options.schedules),
        first_seed=options.seed, is_over=is_over,
    )  # fmt: skip
    print(campaign)
    for kind, seeds in sorted(campaign.failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):5d} x  {kind}  seeds {seeds[:4]}")
    if campaign.failures and last is not None and not options.keep_going:
        print(report(shrink(last)))
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
