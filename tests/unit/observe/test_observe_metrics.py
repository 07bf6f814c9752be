"""The registry: zeros from the first scrape, one-hot sets, and counters that never go back."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cache.protocol import CacheStatus
from engines.contract import EngineStatus
from supervisor.core.states import EngineState
from supervisor.core.verdict import Verdict
from supervisor.gateway.protocol import (
    OVERHEAD_BUCKETS_S,
    TTFT_BUCKETS_S,
    GatewayStatus,
    GroupCounters,
)
from supervisor.observe.events import EventLog
from supervisor.observe.journal import Journal
from supervisor.observe.looplag import LoopLag
from supervisor.observe.metrics import ENGINE_STATES, VERDICTS, Metrics
from supervisor.observe.metrics_doc import render_metrics_doc
from supervisor.topology.schema import Topology

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs" / "prometheus" / "understudy.rules.yml"

TOPOLOGY = Topology.model_validate({
    "version": 1,
    "name": "demo",
    "state_dir": "run",
    "groups": [{
        "name": "chat",
        "model": {"path": "model"},
        "engines": [
            {"name": "chat-a", "role": "primary"},
            {"name": "chat-b", "role": "standby"},
            {"name": "chat-batch", "role": "batch"},
        ],
    }],
})  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(TOPOLOGY, version="1.2.3")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    metrics.render()
    return metrics.registry.get_sample_value(name, labels)


def status(instance: str, **counters: Any) -> GatewayStatus:
    return GatewayStatus(
        instance=instance, pid=7, sequence=1, epochs={"chat": 2}, connections=3, loop_lag_s=0.001,
        groups=[GroupCounters(model="chat", **counters)],
    )  # fmt: skip


def test_unfinished_tasks_are_counted_at_each_scrape(metrics: Metrics) -> None:
    counts = iter((3, 5))
    metrics.watch(count_tasks=lambda: next(counts))
    assert value(metrics, "understudy_tasks") == 3
    assert value(metrics, "understudy_tasks") == 5
    metrics.watch(count_tasks=lambda: 0)
    report = msgspec.structs.replace(status("gateway-0-a"), tasks=7)
    metrics.set_gateway("gateway-0", report)
    assert value(metrics, "understudy_gateway_tasks", worker="gateway-0") == 7


def test_the_first_scrape_has_zeros_for_every_name(metrics: Metrics) -> None:
    page = metrics.render().decode()
    for line in (
        'understudy_failovers_total{cause="dead",group="chat",outcome="done"} 0.0',
        'understudy_failover_duration_seconds_count{group="chat",phase="first_token"} 0.0',
        'understudy_evictions_total{engine="chat-batch",group="chat",outcome="done"} 0.0',
        'understudy_eviction_duration_seconds_count{group="chat"} 0.0',
        'understudy_engine_state{engine="chat-a",group="chat",state="absent"} 1.0',
        'understudy_engine_verdict{engine="chat-a",group="chat",verdict="dead"} 0.0',
        'understudy_epoch{group="chat"} 0.0',
        'understudy_standby_ready{group="chat"} 0.0',
        'understudy_standbys_configured{group="chat"} 1.0',
        'understudy_weights_bytes{device="cpu",group="chat"} 0.0',
        'understudy_weights_load_seconds{device="cpu",group="chat"} 0.0',
        'understudy_attach_seconds_count{group="chat"} 0.0',
        'understudy_gateway_up{worker="gateway-0"} 0.0',
        'understudy_gateway_requests_total{model="chat",worker="gateway-0"} 0.0',
        'understudy_gateway_requests_total{model="chat:batch",worker="gateway-0"} 0.0',
        "understudy_loop_lag_seconds 0.0",
        'understudy_journal_degraded{file="events"} 0.0',
        'understudy_journal_degraded{file="state"} 0.0',
        'understudy_restarts_total{group="chat",kind="engine",name="chat-b"} 0.0',
        'understudy_restarts_total{group="",kind="gateway",name="gateway-0"} 0.0',
    ):
        assert line in page.splitlines(), line
    assert 'version="1.2.3"' in page


def test_the_page_parses_and_keeps_the_naming_rules(metrics: Metrics) -> None:
    metrics.set_gateway("gateway-0", status("gateway-0-a", requests=1))
    families = list(text_string_to_metric_families(metrics.render().decode()))
    assert len(families) > 60
    for family in families:
        assert family.name.startswith("understudy_")
        assert not re.search(r"_(ms|milliseconds|kib|mib|percent)\b", family.name)
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            if family.type == "counter":
                assert sample.name.endswith("_total")


def test_the_sets_are_those_of_the_core() -> None:
    assert set(ENGINE_STATES) == {state.value for state in EngineState}
    assert set(VERDICTS) == {verdict.value for verdict in Verdict}


def test_state_sets_stay_one_hot_also_with_a_new_state(metrics: Metrics) -> None:
    metrics.set_engine("chat", "chat-a", EngineState.PRIMARY, Verdict.BUSY, role="primary")
    metrics.set_group_state("chat", "redundant")
    metrics.set_group_state("chat", "single")
    metrics.set_engine("chat", "chat-b", "levitating", "healthy")
    hot: dict[tuple[str, ...], list[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.name in {"understudy_engine_state", "understudy_group_state"}:
            for sample in family.samples:
                key = (family.name, sample.labels.get("engine", ""))
                hot.setdefault(key, [])
                if sample.value == 1.0:
                    hot[key].append(sample.labels["state"])
    assert hot == {
        ("understudy_engine_state", "chat-a"): ["primary"],
        ("understudy_engine_state", "chat-b"): ["levitating"],
        ("understudy_engine_state", "chat-batch"): ["absent"],
        ("understudy_group_state", ""): ["single"],
    }
    labels = {"group": "chat", "engine": "chat-a"}
    assert value(metrics, "understudy_engine_state", **labels, state="levitating") == 0.0
    assert value(metrics, "understudy_engine_verdict", **labels, verdict="busy") == 1.0
    assert value(metrics, "understudy_engine_role", **labels, role="none") == 0.0


def test_a_failover_is_counted_with_its_phases(metrics: Metrics) -> None:
    metrics.failover("chat", "dead", "done", {"detect": 0.004, "total": 0.04})
    metrics.failover_phase("chat", "first_token", 0.05)
    labels = {"group": "chat", "cause": "dead", "outcome": "done"}
    assert value(metrics, "understudy_failovers_total", **labels) == 1.0
    name = "understudy_failover_duration_seconds"
    assert value(metrics, f"{name}_bucket", group="chat", phase="total", le="0.05") == 1.0
    assert value(metrics, f"{name}_bucket", group="chat", phase="total", le="0.025") == 0.0
    assert value(metrics, f"{name}_count", group="chat", phase="first_token") == 1.0


def test_a_failed_eviction_has_no_duration(metrics: Metrics) -> None:
    metrics.eviction("chat", "chat-batch", "failed", 9.0)
    metrics.eviction("chat", "chat-batch", "done", 0.15)
    assert value(metrics, "understudy_eviction_duration_seconds_sum", group="chat") == 0.15


def test_a_restarted_worker_does_not_turn_counters_back(metrics: Metrics) -> None:
    def totals() -> dict[str, float]:
        return {
            sample.name + str(sorted(sample.labels.items())): sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
        }

    ttft = [index for index, _ in enumerate(TTFT_BUCKETS_S, start=1)]
    overhead = [2] * len(OVERHEAD_BUCKETS_S)
    first = status(
        "gateway-0-aaaaaaaa", requests=100, tokens=500, resumed_slot=4, refused={"429": 3},
        ttft_buckets=ttft, ttft_sum_s=9.5, overhead_buckets=overhead, overhead_sum_s=0.5,
        streams_open=6,
    )  # fmt: skip
    metrics.set_gateway("gateway-0", first)
    before = totals()
    metrics.restart(kind="gateway", group="", name="gateway-0")
    at_death = totals()
    metrics.set_gateway("gateway-0", status("gateway-0-bbbbbbbb", requests=1, refused={"503": 1}))
    after = totals()
    assert all(at_death[key] >= before[key] for key in before)
    assert all(after[key] >= at_death[key] for key in at_death)

    labels = {"worker": "gateway-0", "model": "chat"}
    assert value(metrics, "understudy_gateway_requests_total", **labels) == 101.0
    assert value(metrics, "understudy_gateway_refused_total", **labels, status="429") == 3.0
    assert value(metrics, "understudy_gateway_refused_total", **labels, status="503") == 1.0
    assert value(metrics, "understudy_gateway_streams_open", **labels) == 0.0
    name = "understudy_gateway_time_to_first_token_seconds"
    assert value(metrics, f"{name}_bucket", **labels, le="+Inf") == float(ttft[-1])
    assert value(metrics, f"{name}_sum", **labels) == 9.5

    metrics.set_gateway("gateway-0", first)  # a message of the dead, late
    assert value(metrics, "understudy_gateway_requests_total", **labels) == 101.0
    metrics.set_gateway("gateway-0", status("gateway-0-cccccccc", requests=2))
    assert value(metrics, "understudy_gateway_requests_total", **labels) == 103.0


def test_a_dead_worker_has_no_connections_but_keeps_its_counters(metrics: Metrics) -> None:
    metrics.set_gateway("gateway-0", status("gateway-0-a", requests=5, streams_open=2))
    assert value(metrics, "understudy_gateway_connections", worker="gateway-0") == 3.0
    metrics.set_gateway("gateway-0", None)
    labels = {"worker": "gateway-0", "model": "chat"}
    assert value(metrics, "understudy_gateway_up", worker="gateway-0") == 0.0
    assert value(metrics, "understudy_gateway_connections", worker="gateway-0") == 0.0
    assert value(metrics, "understudy_gateway_streams_open", **labels) == 0.0
    assert value(metrics, "understudy_gateway_requests_total", **labels) == 5.0


def test_cache_status_and_a_restarted_daemon(metrics: Metrics) -> None:
    labels = {"group": "chat", "device": "cpu"}
    first = CacheStatus(
        state="serving", instance="cache-chat-a", pid=1, device="cpu", weights_bytes=100,
        kv_bytes=50, loads=1, load_s=2.5,
    )  # fmt: skip
    metrics.set_cache("chat", first)
    assert value(metrics, "understudy_cache_up", **labels) == 1.0
    assert value(metrics, "understudy_weights_bytes", **labels) == 100.0
    assert value(metrics, "understudy_weights_load_seconds", **labels) == 2.5
    metrics.restart(kind="cache", group="chat", name="cache-chat")
    assert value(metrics, "understudy_cache_up", **labels) == 0.0
    assert value(metrics, "understudy_cache_state", **labels, state="down") == 1.0
    second = CacheStatus(state="serving", instance="cache-chat-b", pid=2, device="cpu", donations=1)
    metrics.set_cache("chat", second)
    assert value(metrics, "understudy_cache_loads_total", **labels) == 1.0
    assert value(metrics, "understudy_cache_donations_total", **labels) == 1.0


def test_an_engine_s_own_numbers(metrics: Metrics) -> None:
    own = EngineStatus(
        name="chat-a", instance="chat-a-1", pid=1, state="serving", role="primary", epoch=1,
        exact=True, active=3, parked=1, queued=2, slots=16,
    )  # fmt: skip
    metrics.set_engine("chat", "chat-a", "primary", "healthy", status=own)
    labels = {"group": "chat", "engine": "chat-a"}
    assert value(metrics, "understudy_engine_queued", **labels) == 2.0
    assert value(metrics, "understudy_engine_slots", **labels) == 16.0


def test_what_is_watched_is_read_at_every_scrape(metrics: Metrics, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    events, journal, lag = EventLog(tmp_path), Journal(tmp_path), LoopLag()
    metrics.watch(events=events, journal=journal, loop_lag=lag)
    events.append("a", "cannot be written")
    assert not events.flush(timeout_s=5)
    assert value(metrics, "understudy_journal_degraded", file="events") == 1.0
    assert value(metrics, "understudy_journal_degraded", file="state") == 0.0
    assert value(metrics, "understudy_events_total") == float(events.last_seq)
    (tmp_path / "events.jsonl").rmdir()
    events.close()
    journal.close()


def test_the_document_is_current() -> None:
    assert (ROOT / "docs" / "METRICS.md").read_text() == render_metrics_doc(), (
        "run: python -m supervisor.observe.metrics_doc > docs/METRICS.md"
    )


def test_rules_name_only_metrics_that_exist(metrics: Metrics) -> None:
    known = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    for rule in rules:
        named = set(re.findall(r"understudy_\w+", rule["expr"]))
        assert named <= known, rule["alert"]
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"].keys() == {"summary", "description"}
    alerts = {rule["alert"] for rule in rules}
    assert alerts >= {
        "UnderstudyNoStandby", "UnderstudyFailover", "UnderstudyGatewayRestarting",
        "UnderstudyJournalDegraded", "UnderstudyCacheDown",
    }  # fmt: skip


def test_promtool_accepts_rules_and_page(metrics: Metrics) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    checked = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = subprocess.run(
        [promtool, "test", "rules", str(RULES.with_suffix(".test.yml"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
    page = subprocess.run(
        [promtool, "check", "metrics"], input=metrics.render(), capture_output=True, check=False
    )
    assert page.returncode == 0, page.stdout + page.stderr
