"""`python -m tests.sim --seed N --schedules M`: many random schedules, the first failure shrunk."""

import argparse
import sys
import time

from tests.sim.schedule import draw
from tests.sim.shrink import report, shrink
from tests.sim.simulate import simulate


def main() -> int:
    """Run; exit status 1 when an invariant does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--schedules", type=int, default=1000, help="how many seeds")
    parser.add_argument("--keep-going", action="store_true", help="count failures, shrink none")
    parser.add_argument("--verbose", action="store_true", help="print every history")
    options = parser.parse_args()
    begun_s = time.monotonic()
    failures: dict[str, list[int]] = {}
    virtual_s = promotions = 0.0
    for seed in range(options.seed, options.seed + options.schedules):
        outcome = simulate(draw(seed))
        virtual_s += outcome.virtual_s
        promotions += outcome.promotions
        if options.verbose:
            print("\n".join(outcome.history))
        for violation in outcome.violations:
            failures.setdefault(violation, []).append(seed)
        if outcome.violations and not options.keep_going:
            print(report(shrink(outcome)))
            return 1
    took_s = time.monotonic() - begun_s
    rate = options.schedules / took_s * 60
    print(f"{options.schedules} schedules from seed {options.seed} in {took_s:.1f} s: "
          f"{rate:.0f} a minute, {virtual_s / 3600:.1f} virtual hours, {promotions:.0f} promotions")  # fmt: skip
    for violation, seeds in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):5d} x  {violation[:230]}  seeds {seeds[:4]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
