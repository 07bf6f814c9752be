"""Guarantees name tests that exist; the runbook has a section for every alert and bad state."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text("utf-8")
RULES = ROOT / "configs" / "prometheus" / "understudy.rules.yml"


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(f.name for f in functions)


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[^`]+::\w+)`", GUARANTEES))))
def test_a_test_that_shows_a_guarantee_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert (ROOT / path).is_file()
    assert name in functions_of(path)


@pytest.mark.parametrize("named", sorted(set(re.findall(r"chaos: `([\w-]+)`", GUARANTEES))))
def test_a_scenario_that_shows_a_guarantee_exists(named: str) -> None:
    assert (ROOT / "chaos" / "scenarios" / f"{named}.yaml").is_file()


def test_every_promise_is_shown_by_something() -> None:
    promises = [
        line
        for line in GUARANTEES.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| promise"))
    ]
    assert len(promises) > 25
    for line in promises:
        assert re.search(r"`tests/|chaos: `|python -m tests\.sim", line), line


def headings() -> set[str]:
    return {line.removeprefix("### ") for line in RUNBOOK.splitlines() if line.startswith("### ")}


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    rules = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
    alerts = {rule["alert"] for rule in rules}
    assert {h for h in headings() if h.startswith("Understudy")} == alerts


@pytest.mark.parametrize(
    "state", ["single", "down", "blocked", "fatal", "unkillable", "degraded journal"]
)
def test_every_bad_state_has_a_section(state: str) -> None:
    assert state in headings()
