"""`python -m chaos run | list | check | report`.

Exit codes: 0 everything held, 1 a guarantee was broken, 2 a wrong command line or scenario,
3 not judged (an assumption did not hold), 4 skipped (this machine cannot run it).
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cache.errors import UnderstudyError
from chaos.checkers import Verdict, judge
from chaos.disk import SkippedError
from chaos.faults import catalogue
from chaos.history import History
from chaos.report import write_report
from chaos.runner import perform
from chaos.scenario import ScenarioError, load_scenario, names
from chaos.system import ROOT

__all__ = ["main", "run_and_judge"]

_OUT: Final = ROOT / "run" / "chaos"


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="chaos", description="Faults under load, judged afterwards."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run scenarios on a real system and judge them")
    run.add_argument("--scenario", action="append", default=[], help="name; may be repeated")
    run.add_argument("--all", action="store_true", help="the long set: every scenario of it")
    run.add_argument("--seed", type=int, help="default: a random one, which is printed")
    run.add_argument("--device", default="cpu", help="what engines compute on: cpu, or cuda:0")
    run.add_argument("--out", type=Path, help="folder of the record and its report")
    verbs.add_parser("list", help="scenarios and faults")
    check = verbs.add_parser("check", help="judge a recorded run again")
    check.add_argument("directory", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.verb == "list":
            return _list()
        if given.verb == "check":
            return _check(given.directory)
        return _run(given)
    except ScenarioError as error:
        sys.stderr.write(f"error: {error.stable_code}: {error}\n")
        return 2


def _list() -> int:
    _say("Scenarios (python -m chaos run --scenario NAME --seed N)")
    for name in names():
        scenario = load_scenario(name)
        _say(f"  {name:28} {scenario.title}")
    _say("\nFaults")
    for fault in catalogue():
        kind = fault.model_fields["kind"].default
        _say(f"  {kind:28} {(fault.__doc__ or '').splitlines()[0]}")
    return 0


def _check(directory: Path) -> int:
    try:
        history = History.load(directory)
    except FileNotFoundError:
        raise ScenarioError(f"there is no record in {directory}") from None
    verdict = judge(history)
    write_report(directory, history, verdict)
    _show(verdict)
    return _code(verdict)


def _run(given: argparse.Namespace) -> int:
    chosen = list(given.scenario)
    if given.all:
        chosen += [n for n in names() if load_scenario(n).in_long_set and n not in chosen]
    if not chosen:
        raise ScenarioError("name a scenario with --scenario, or --all", hint="see chaos list")
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    codes = []
    for name in chosen:
        out = given.out or _OUT
        directory = out if given.out is not None and len(chosen) == 1 else out / f"{name}-{seed}"
        codes.append(run_and_judge(name, seed, directory, device=given.device))
    return max((code for code in codes if code != 4), default=4)


def run_and_judge(name: str, seed: int, directory: Path, *, device: str = "cpu") -> int:
    """One scenario from start to report; the exit code."""
    scenario = load_scenario(name)
    began_s = time.monotonic()
    _say(f"{name} --seed {seed}: {scenario.title}")

    def tell(text: str) -> None:
        _say(f"{time.monotonic() - began_s:7.1f} {text}")

    try:
        perform(name, scenario, seed=seed, device=device, directory=directory, tell=tell)
    except SkippedError as error:
        _say(f"skipped: {error}")
        return 4
    except UnderstudyError as error:
        _say(f"not judged: {error.stable_code}: {error}")
        return 3
    history = History.load(directory)
    verdict = judge(history)
    page = write_report(directory, history, verdict)
    _show(verdict)
    _say(f"report: {page}\n")
    return _code(verdict)


def _show(verdict: Verdict) -> None:
    for outcome in verdict.outcomes:
        if outcome.state == "broken":
            _say(f"  broken {outcome.kind}: {outcome.name}")
            for problem in outcome.problems:
                _say(f"    {problem}")
    _say(verdict.sentence())


def _code(verdict: Verdict) -> int:
    if verdict.is_passed:
        return 0
    return 1 if verdict.is_judged else 3


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
