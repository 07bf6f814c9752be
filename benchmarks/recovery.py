"""How long recovery takes, over fifty faults of each kind: what clients and operators wait for.

`python -m benchmarks.recovery` runs the chaos scenarios `fifty-*` one after the other: SIGKILL and
SIGSTOP of the primary, SIGKILL of the supervisor and of the cache daemon, under an open-loop load
of real streaming clients. Each record is judged first; one that breaks a guarantee gives no
figures.
"""

import argparse
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.report import ROOT, Row, write_report
from cache.errors import UnderstudyError
from chaos.checkers import judge
from chaos.figures import LatencyRow, latency_rows
from chaos.history import History
from chaos.runner import perform
from chaos.scenario import load_scenario

SCENARIOS: Final = ("fifty-failovers", "fifty-hangs", "fifty-supervisors", "fifty-daemons")
_LOADS: Final[dict[str, float]] = {}
TARGETS: Final = {
    "SIGKILL primary -> next token": "p99 <= 100 ms",
    "SIGKILL primary -> whole again": "<= 1 s",
    "SIGSTOP primary -> next token": "p99 <= 600 ms",
    "of which adoption, at the supervisor": "<= 1 s",
    "cache daemon died -> memory served again": "<= 1 s",
}
TEXT: Final = """\
Each row is one kind of fault, fifty times, while streams arrive at a fixed rate whatever happens
(three a second, 40 to 160 tokens, half greedy and half at temperature 1). A sample of "next token"
is one client's stream: from the signal to the first token behind the pause that it tore (the
longest that begins within 50 ms; what was in flight still arrives). "Whole again"
is seen in a status that is asked for every 100 ms: nothing is missing that the topology names.
Engines carry 1 GiB of ballast. Clients, gateway, engines and the watchers share the cores named
above, so these are upper bounds. Every text was equal to that of an undisturbed run, and every
other guarantee of `chaos/checkers.py` held. Made by `python -m benchmarks.recovery`."""


def main() -> int:
    """Measure and write; 1 when something was not as promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", action="append", default=[], help="default: all four")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--keep", action="store_true", help="keep the records")
    parser.add_argument(
        "--record", action="append", default=[], type=Path, help="use a kept record of this machine"
    )
    arguments = parser.parse_args()
    rows: list[LatencyRow] = []
    kept = {History.load(path).meta.scenario: path for path in arguments.record}
    for name in arguments.scenario or SCENARIOS:
        if name in kept:
            rows += _rows(kept[name])
            continue
        directory = Path(tempfile.mkdtemp(prefix=f"understudy-{name}-"))
        try:
            perform(name, load_scenario(name), seed=arguments.seed, directory=directory, tell=_say)
        except UnderstudyError as error:
            _say(f"error: {error.stable_code}: {error}")
            return 1
        found = _rows(directory)
        if not found:
            return 1
        rows += found
        if not arguments.keep:
            shutil.rmtree(directory)
    loads = ", ".join(f"{name} {load:.1f}" for name, load in _LOADS.items())
    path = write_report(
        arguments.out,
        "recovery",
        title="Recovery, fifty times each",
        rows=[Row(r.what, r.rounds, r.spread, TARGETS.get(r.what, "")) for r in rows],
        text=f"{TEXT}\n\nLoad average of the machine when each scenario began: {loads}.",
        data=[asdict(row) for row in rows],
    )
    _say(f"written: {path}")
    return 0


def _rows(directory: Path) -> list[LatencyRow]:
    """Figures of a record; none when it breaks a promise."""
    history = History.load(directory)
    verdict = judge(history)
    _LOADS[history.meta.scenario] = history.meta.machine.get("load_average", 0.0)
    _say(f"{history.meta.scenario}: {verdict.sentence()}")
    if not verdict.is_passed:
        _say(f"the record is in {directory}")
        return []
    return [row for row in latency_rows(history) if not row.what.startswith("warm-up")]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
