"""The batch engine gives way and comes back; the serving pair does not notice."""

import time
from pathlib import Path

import openai
import pytest

from chaos.client import EngineView, wait_until
from chaos.system import RunningSystem, SystemOptions
from supervisor.process.identity import is_same
from tests.harness.rounds import Load

ENGINE = "chat-batch"


@pytest.fixture(scope="module")
def system_options() -> SystemOptions:
    return SystemOptions(batch=True, ballast="128MiB")


def view(system: RunningSystem) -> EngineView:
    return next(e for e in system.admin.status().group.engines if e.name == ENGINE)


def wait_serving(system: RunningSystem) -> EngineView:
    def probe() -> EngineView | None:
        engine = view(system)
        return engine if engine.state == "batch" and engine.pid else None

    return wait_until(probe, "the batch engine to serve", timeout_s=60)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def ask(system: RunningSystem) -> str:
    with openai.OpenAI(base_url=system.base_url, api_key="unused", timeout=60) as client:
        answer = client.completions.create(
            model="chat:batch", prompt="Once", max_tokens=8, temperature=0
        )
        return answer.choices[0].text


def test_evicted_it_is_gone_and_resumed_it_answers_as_before(
    system: RunningSystem, load: Load
) -> None:
    wait_serving(system)
    text = ask(system)
    victim = system.process("batch")

    def evict() -> int:
        moment_ns = time.monotonic_ns()
        operation = system.admin.post(f"/v1/evict/{ENGINE}", hold=True, timeout_s=20)
        assert operation.state == "done", operation.text
        return moment_ns

    load.under_fault(system, evict, after_tokens=20)
    wait_until(lambda: not is_same(victim), "the end of the batch engine", timeout_s=5)
    assert view(system).pid is None
    assert system.admin.metric("understudy_evictions_total") >= 1

    operation = system.admin.post(f"/v1/resume/{ENGINE}", timeout_s=30)
    assert operation.state == "done", operation.text
    assert wait_serving(system).pid != victim.pid
    assert ask(system) == text


def test_frozen_it_computes_nothing_and_thawed_it_goes_on(
    system: RunningSystem, load: Load
) -> None:
    pid = wait_serving(system).pid
    assert pid is not None

    def freeze() -> int:
        moment_ns = time.monotonic_ns()
        operation = system.admin.post(f"/v1/freeze/{ENGINE}")
        assert operation.state == "done", operation.text
        return moment_ns

    load.under_fault(system, freeze, after_tokens=20)
    assert process_state(pid) == "T"
    assert view(system).verdict != "hung"

    system.admin.post(f"/v1/thaw/{ENGINE}")
    wait_until(lambda: process_state(pid) != "T", "the thaw", timeout_s=5)
    assert wait_serving(system).pid == pid
    ask(system)


def test_a_frozen_batch_engine_does_not_delay_a_failover(system: RunningSystem, load: Load) -> None:
    wait_serving(system)
    system.wait_whole()
    system.admin.post(f"/v1/freeze/{ENGINE}")
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=20)
    system.wait_whole()
    system.admin.post(f"/v1/thaw/{ENGINE}")
    wait_serving(system)
