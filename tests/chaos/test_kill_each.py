"""The scenario that every change must pass: each component killed in turn, under load."""

from pathlib import Path

import pytest

from chaos.checkers import judge
from chaos.history import History
from chaos.report import write_report
from chaos.runner import perform
from chaos.scenario import load_scenario

SEED = 20261129


@pytest.mark.integration
@pytest.mark.timeout(480)
def test_every_component_may_be_killed_in_turn(tmp_path: Path) -> None:
    told: list[str] = []

    perform(
        "kill-each", load_scenario("kill-each"), seed=SEED, directory=tmp_path, tell=told.append
    )

    history = History.load(tmp_path)
    verdict = judge(history)
    page = write_report(tmp_path, history, verdict)
    assert verdict.is_passed, "\n".join([*told, verdict.sentence(), f"report: {page}"])
