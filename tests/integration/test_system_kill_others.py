"""SIGKILL everything that is not the primary: streams never notice, and what died comes back."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest

from cache.errors import ConnectionClosedError
from chaos.client import CacheView, EngineView, wait_until
from chaos.leftovers import memory_of
from chaos.streams import StreamFleet, make_requests
from chaos.system import RunningSystem, SystemOptions
from engines.native.faults import FAULTS_VARIABLE, InjectFault
from supervisor.process.stat import read_stat
from tests.harness.rounds import Load
from tests.integration.engines_support import Engine, engine_spec

RESTORED_S = 60.0


@pytest.fixture(scope="module")
def system_options() -> SystemOptions:
    return SystemOptions(batch=True, extra_environment={FAULTS_VARIABLE: "1"})


def pids(system: RunningSystem, *roles: str) -> list[int]:
    return [system.process(role).pid for role in roles]


def replaced(system: RunningSystem, role: str, old_pid: int) -> Callable[[], int | None]:
    """Whether another process has the role and, for engines, serves in it."""
    good_states = {"standby": "standby", "batch": "batch", "primary": "primary"}

    def probe() -> int | None:
        status = system.status()
        if status is None:
            return None
        if role in good_states:
            engine: EngineView | None = status.group.engine(role)
            if engine is None or engine.state != good_states[role]:
                return None
            pid = engine.pid
        elif role == "gateway":
            pid = status.gateway[0].pid if status.gateway else None
        elif role == "cache":
            pid = status.group.cache[0].pid if status.group.cache else None
        else:
            pid = status.group.zygote.pid if status.group.zygote else None
        return pid if pid and pid != old_pid else None

    return probe


def cache_view(system: RunningSystem) -> CacheView:
    return system.admin.status().group.cache[0]


@pytest.mark.parametrize("role", ["standby", "batch", "zygote"])
def test_its_death_is_nothing_to_the_streams_and_it_comes_back(
    system: RunningSystem, load: Load, role: str
) -> None:
    before = system.wait_whole().group
    primary = system.process("primary")
    victim = system.process(role)

    load.under_fault(system, lambda: system.kill(role)[1], after_tokens=30)

    wait_until(replaced(system, role, victim.pid), f"a new {role}", timeout_s=RESTORED_S)
    after = system.wait_whole().group
    assert (after.epoch, after.primary) == (before.epoch, before.primary)
    assert system.process("primary") == primary


def test_a_new_zygote_forks_the_next_standby(system: RunningSystem) -> None:
    system.wait_whole()
    zygote, _ = system.kill("zygote")
    wait_until(replaced(system, "zygote", zygote.pid), "a new zygote", timeout_s=RESTORED_S)
    standby, _ = system.kill("standby")
    wait_until(replaced(system, "standby", standby.pid), "a new standby", timeout_s=RESTORED_S)


def test_a_killed_cache_daemon_serves_the_same_memory_again_without_the_disk(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    engines = pids(system, "primary", "standby", "batch")
    weights = {i for i in memory_of(engines[0]) if i.name == "understudy-weights"}
    daemon = system.process("cache")

    load.under_fault(system, lambda: system.kill("cache")[1], after_tokens=30)

    wait_until(replaced(system, "cache", daemon.pid), "a new cache daemon", timeout_s=RESTORED_S)
    wait_until(lambda: cache_view(system).state == "serving", "the daemon to serve", timeout_s=30)
    assert pids(system, "primary", "standby", "batch") == engines

    standby, _ = system.kill("standby")
    new_pid = wait_until(
        replaced(system, "standby", standby.pid), "a new standby", timeout_s=RESTORED_S
    )
    status = cache_view(system)
    assert status.loads == 0, "the restarted daemon read the disk"
    assert status.donations >= 1
    assert {i for i in memory_of(new_pid) if i.name == "understudy-weights"} == weights


def test_after_the_cache_daemons_death_a_failover_still_adopts(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    daemon, _ = system.kill("cache")
    wait_until(replaced(system, "cache", daemon.pid), "a new cache daemon", timeout_s=RESTORED_S)
    system.wait_whole()
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=30)


def break_weights(system: RunningSystem, role: str) -> int:
    """Let an engine write into the weights that it maps; the moment in nanoseconds."""
    engine = system.admin.status().group.engine(role)
    assert engine is not None
    assert engine.instance is not None
    spec = engine_spec(system.state_dir / "run", engine.name, instance=engine.instance)
    moment_ns = time.monotonic_ns()
    with pytest.raises(ConnectionClosedError):
        asyncio.run(Engine(spec).call("fault", InjectFault("write_weights")))
    return moment_ns


def test_a_write_into_the_weights_kills_the_writer_alone(system: RunningSystem, load: Load) -> None:
    before = system.wait_whole().group
    others = pids(system, "standby", "batch", "cache", "zygote")
    writer = before.engine("primary")
    assert writer is not None
    assert writer.pid is not None
    stat = read_stat(writer.pid)
    assert stat is not None
    has_parent = stat.ppid == system.process("zygote").pid  # else its zygote died in another test

    load.under_fault(system, lambda: break_weights(system, "primary"), after_tokens=30)

    after = system.wait_whole().group
    assert after.epoch == before.epoch + 1
    assert after.primary == before.standby[0]
    assert pids(system, "primary", "batch", "cache", "zygote") == others
    log = system.state_dir / "logs" / "zygote-chat.log"
    line = f"{writer.instance}, pid {writer.pid}, ended with wait status {signal.SIGSEGV}"
    # The kernel first tears the memory down; only then can the zygote reap, and say how it ended.
    if has_parent:
        wait_until(lambda: line in log.read_text("utf-8"), "the zygote's report",
                   timeout_s=RESTORED_S)  # fmt: skip


class Knocker:
    """Connects to the gateway again and again; every refusal is kept."""

    def __init__(self, port: int) -> None:
        self.attempts = 0
        self.refusals: list[str] = []
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Knocker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.attempts += 1
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
            except OSError as error:
                self.refusals.append(repr(error))


def test_a_killed_gateway_worker_refuses_nobody_and_its_slots_come_free(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    worker = system.process("gateway")
    engines = pids(system, "primary", "standby")
    with StreamFleet(system.base_url, make_requests(16, max_tokens=1500)) as fleet:
        fleet.wait_tokens(5)
        with Knocker(system.gateway_port) as knocker:
            system.kill("gateway")
            wait_until(
                replaced(system, "gateway", worker.pid), "a new worker", timeout_s=RESTORED_S
            )
            requests = make_requests(16, max_tokens=20)
            started = time.monotonic()
            with StreamFleet(system.base_url, requests) as second:
                second.wait_done(timeout_s=60)
            waited_s = time.monotonic() - started
    assert all(record.error is None for record in second.records)
    assert knocker.attempts > 10
    assert knocker.refusals == []
    assert waited_s < 9, "slots of the dead worker were held until their grace ended"
    assert pids(system, "primary", "standby") == engines


def test_a_killed_supervisor_breaks_no_stream_and_the_next_one_adopts_every_process(
    system: RunningSystem, load: Load
) -> None:
    roles = ("primary", "standby", "batch", "zygote", "cache", "gateway")
    before = system.wait_whole().group
    everybody = {role: system.process(role) for role in roles}

    def kill_and_restart() -> int:
        _, moment_ns = system.kill("supervisor")
        system.wait_supervisor(timeout_s=10)
        system.spawn_supervisor()
        return moment_ns

    felt = load.under_fault(system, kill_and_restart, after_tokens=30)

    system.wait_ready(timeout_s=60)
    assert {role: system.process(role) for role in roles} == everybody
    after = system.admin.status().group
    assert (after.epoch, after.primary) == (before.epoch, before.primary)
    ages_s = {engine.name: engine.uptime_s for engine in before.engines}
    assert all(
        ages_s[engine.name] < engine.uptime_s < ages_s[engine.name] + 60 for engine in after.engines
    ), "an adopted engine is as old as it is"
    assert max(one.gap_ms for one in felt) < 1500


def test_an_adopted_pair_still_fails_over(system: RunningSystem, load: Load) -> None:
    before = system.wait_whole().group
    system.kill("supervisor")
    system.wait_supervisor(timeout_s=10)
    system.spawn_supervisor()
    system.wait_ready(timeout_s=60)
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=30)
    assert system.wait_whole().group.epoch > before.epoch


def test_a_primary_that_dies_while_nobody_watches_is_replaced_by_the_next_supervisor(
    system: RunningSystem, load: Load
) -> None:
    before = system.wait_whole().group
    primary = system.process("primary")

    def kill_supervisor_then_primary() -> int:
        system.kill("supervisor")
        system.wait_supervisor(timeout_s=10)
        moment_ns = system.kill_process(primary)
        system.spawn_supervisor()
        return moment_ns

    load.under_fault(system, kill_supervisor_then_primary, after_tokens=30)
    system.wait_ready(timeout_s=60)
    assert system.admin.status().group.epoch > before.epoch
