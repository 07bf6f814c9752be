"""Planned switchovers under sixteen streams: both engines live on, no stream breaks or drains."""

import random
import time
from pathlib import Path

import pytest

from chaos.judge import Spread
from chaos.system import RunningSystem, SystemOptions
from tests.harness.rounds import STREAM_TOKENS, Figures, Load

ROUNDS = 20


@pytest.fixture(scope="module")
def system_options(near_tie_model: Path) -> SystemOptions:
    return SystemOptions(model=near_tie_model)


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_roles_change_hands_and_the_streams_go_on_exactly(
    system: RunningSystem, load: Load, figures: Figures, round_: int
) -> None:
    before = system.wait_whole().group
    pids = {engine.name: engine.pid for engine in before.engines}

    def promote() -> int:
        moment_ns = time.monotonic_ns()
        operation = system.admin.post("/v1/promote", timeout_s=20)
        assert operation.state == "done", operation.text
        return moment_ns

    after_tokens = random.Random(round_).randrange(3, STREAM_TOKENS // 2)
    felt = load.under_fault(system, promote, after_tokens=after_tokens)

    after = system.wait_whole().group
    assert after.epoch == before.epoch + 1
    assert after.primary == before.standby[0]
    assert {engine.name: engine.pid for engine in after.engines} == pids
    figures.add(felt, system.admin.history()[-1].phases_ms)
    assert Spread.of([one.gap_ms for one in felt]).worst < 2000


def test_a_dry_run_changes_nothing(system: RunningSystem) -> None:
    before = system.wait_whole().group
    operation = system.admin.post("/v1/promote", dry_run=True)
    after = system.admin.status().group
    assert operation.state == "planned"
    assert (after.epoch, after.primary) == (before.epoch, before.primary)
