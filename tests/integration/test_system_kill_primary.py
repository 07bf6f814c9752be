"""SIGKILL the primary under sixteen streams, again and again: no client notices."""

import random
import signal
from pathlib import Path

import pytest

from chaos.judge import Spread
from chaos.system import RunningSystem, SystemOptions
from engines.contract import GenerateBody
from tests.harness.rounds import STREAM_TOKENS, Figures, Load, make_load
from tests.integration.engines_support import Engine, engine_spec

ROUNDS = 20
WORST_GAP_MS = 3000.0
"""Only a bound against waiting for something that should not be on the path: two shared cores say
nothing about 100 ms. The figures themselves are made by benchmarks/takeover.py."""

BEFORE_STREAMS = ("detect", "fence", "promote", "verify", "route")
WORST_SUPERVISOR_MS = 1000.0
"""Of the supervisor's own steps, which need hardly any CPU and wait for no memory to come back."""


@pytest.fixture(scope="module")
def system_options(near_tie_model: Path) -> SystemOptions:
    return SystemOptions(model=near_tie_model, ballast="2GiB")


async def test_a_stream_that_is_recomputed_would_be_noticed(system: RunningSystem) -> None:
    """The power of all tests below: other roundings, and the text soon is another one."""
    group = system.wait_whole().group
    primary = group.engine("primary")
    assert primary is not None
    assert primary.instance is not None
    spec = engine_spec(system.state_dir / "run", primary.name, instance=primary.instance)
    engine = Engine(spec)
    engine.epoch = group.epoch
    prompts = [request.prompt for request in make_load() if request.temperature == 0]
    for prompt in prompts:
        body = GenerateBody(
            "completion", prompt=prompt, max_tokens=40, temperature=0.0, ignore_eos=True
        )
        whole = await engine.complete(body)
        assert whole.accepted is not None
        delivered = [*whole.accepted.prompt_ids, *whole.token_ids[:10]]
        body = GenerateBody(
            "completion", prompt=delivered, max_tokens=30, temperature=0.0, ignore_eos=True
        )
        recomputed = await engine.complete(body)
        assert recomputed.token_ids != whole.token_ids[10:], prompt


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_the_streams_go_on_exactly(
    system: RunningSystem, load: Load, figures: Figures, round_: int
) -> None:
    before = system.wait_whole().group

    felt = load.under_fault(
        system,
        lambda: system.kill("primary")[1],
        after_tokens=random.Random(round_).randrange(3, STREAM_TOKENS // 2),
    )

    after = system.wait_whole().group
    assert after.epoch == before.epoch + 1
    assert after.primary == before.standby[0]
    phases_ms = system.admin.history()[-1].phases_ms
    figures.add(felt, phases_ms)
    assert sum(phases_ms[phase] for phase in BEFORE_STREAMS) < WORST_SUPERVISOR_MS, phases_ms
    assert Spread.of([one.next_token_ms for one in felt]).worst < WORST_GAP_MS


def test_the_official_client_does_not_notice_either(system: RunningSystem, load: Load) -> None:
    system.wait_whole()
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=40, transport="openai")


def test_a_stopped_primary_is_found_hung_and_replaced(system: RunningSystem, load: Load) -> None:
    before = system.wait_whole().group
    felt = load.under_fault(
        system, lambda: system.kill("primary", signal.SIGSTOP)[1], after_tokens=30
    )
    after = system.wait_whole().group
    assert after.epoch == before.epoch + 1
    assert Spread.of([one.next_token_ms for one in felt]).worst < WORST_GAP_MS


def test_streams_outlive_both_engines_of_the_pair(system: RunningSystem, load: Load) -> None:
    before = system.wait_whole().group

    victims = [system.process(role) for role in ("standby", "primary")]  # found before the load

    def kill_both() -> int:
        return max(system.kill_process(victim) for victim in victims)

    load.under_fault(system, kill_both, after_tokens=30)
    assert system.wait_whole().group.epoch > before.epoch


def test_a_failover_is_counted_with_its_phases(system: RunningSystem, load: Load) -> None:
    system.wait_whole()
    before = system.admin.metric("understudy_failovers_total", group="chat")
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=10)
    system.wait_whole()
    assert system.admin.metric("understudy_failovers_total", group="chat") == before + 1
    for phase in ("detect", "fence", "promote", "route", "total"):
        name = "understudy_failover_duration_seconds_count"
        assert system.admin.metric(name, group="chat", phase=phase) >= 1, phase
