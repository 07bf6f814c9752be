"""A supervisor without disk, descriptors or time of its own: streams go on, failover works, and
what was missing is made up for by itself.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.client import wait_until
from chaos.system import RunningSystem, SystemOptions
from tests.harness.rounds import Load
from tests.integration.engines_support import without_descriptors

RESTORED_S = 60.0
DISK_BYTES = 24 << 20


@pytest.fixture(scope="module")
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSystem]:
    """Its state directory is a small file system of its own, where one can be mounted."""
    folder = tmp_path_factory.mktemp("pressure")
    disk = folder / "disk"
    disk.mkdir()
    with contextlib.ExitStack() as stack:
        is_mounted = mount(disk)
        if is_mounted:
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
        system = RunningSystem(folder, SystemOptions(batch=True), state_dir=disk / "state")
        from tests.integration.conftest import SYSTEMS

        request.config.stash[SYSTEMS].append((request.path, system))
        yield stack.enter_context(system)


def mount(place: Path) -> bool:
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0  # noqa: S607


@pytest.fixture
def small_disk(system: RunningSystem) -> RunningSystem:
    facts = os.statvfs(system.state_dir)
    if facts.f_blocks * facts.f_frsize > DISK_BYTES * 2:
        pytest.skip("a small file system cannot be mounted here")
    return system


@contextlib.contextmanager
def full_disk(system: RunningSystem) -> Iterator[None]:
    ballast = system.state_dir.parent / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(64 << 10))
        with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:  # the last blocks, byte by byte
                file.write(bytes(1))
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def limited(pid: int, which: int, value: int) -> Iterator[None]:
    soft, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (value, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, which, (soft, hard))


def supervisor_status(system: RunningSystem) -> dict[str, Any]:
    status = system.admin.get("/v1/status")
    assert isinstance(status, dict)
    found: dict[str, Any] = status["supervisor"]
    return found


def wait_degraded(system: RunningSystem, cause: str) -> str:
    def probe() -> str | None:
        degraded: dict[str, str] = supervisor_status(system)["degraded"]
        return degraded.get(cause)

    return wait_until(probe, f"{cause} to be degraded", timeout_s=15)


def wait_healthy(system: RunningSystem) -> None:
    def probe() -> bool:
        is_well = not supervisor_status(system)["degraded"]
        return is_well and system.admin.metric("understudy_degraded") == 0

    wait_until(probe, "nothing to be degraded, in status and metrics", timeout_s=30)


def events_of(system: RunningSystem) -> list[dict[str, Any]]:
    lines = (system.state_dir / "events.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def assert_gap_free(system: RunningSystem) -> None:
    def probe() -> bool:
        found = events_of(system)
        return [e["seq"] for e in found] == list(range(1, len(found) + 1))

    wait_until(probe, "events without a gap", timeout_s=10)


def fail_over(system: RunningSystem, load: Load) -> None:
    """Kill the primary under load; every stream is exact and the pair whole again."""
    system.wait_whole(timeout_s=RESTORED_S)
    victim = system.process("primary")
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=20)
    system.wait_whole(timeout_s=RESTORED_S, not_led_by=victim)


def test_on_a_full_disk_failover_works_and_nothing_is_truncated(
    small_disk: RunningSystem, load: Load
) -> None:
    system = small_disk
    before = events_of(system)
    with full_disk(system):
        fail_over(system, load)
        fail_over(system, load)  # processes started on the full disk are as good as others
        wait_degraded(system, "disk")
        assert system.admin.metric("understudy_journal_degraded", file="events") == 1
        assert not any(e.state == "fatal" for e in system.admin.status().group.engines)
    wait_healthy(system)
    assert events_of(system)[: len(before)] == before
    assert_gap_free(system)
    fail_over(system, load)


def test_a_zygote_and_a_worker_that_die_on_a_full_disk_come_back(
    small_disk: RunningSystem, load: Load
) -> None:
    system = small_disk
    system.wait_whole()
    zygote, worker = system.process("zygote"), system.process("gateway")
    with full_disk(system):
        system.kill("zygote")
        system.kill("gateway")
        wait_degraded(system, "disk")

        def probe() -> bool:
            status = system.admin.status()
            new_zygote, new_worker = status.group.zygote, status.gateway[0]
            return (
                new_zygote is not None
                and new_zygote.ready
                and new_zygote.pid != zygote.pid
                and new_worker.state == "ready"
                and new_worker.pid not in (None, worker.pid)
            )

        wait_until(probe, "a new zygote and a new worker", timeout_s=RESTORED_S)
        fail_over(system, load)
    wait_healthy(system)


def test_the_next_supervisor_adopts_on_a_full_disk(small_disk: RunningSystem, load: Load) -> None:
    system = small_disk
    roles = ("primary", "standby", "batch", "zygote", "cache", "gateway")
    before = {role: system.process(role) for role in roles}
    with full_disk(system):

        def replace_supervisor() -> int:
            _, moment_ns = system.kill("supervisor")
            system.wait_supervisor(timeout_s=10)
            system.spawn_supervisor()
            return moment_ns

        load.under_fault(system, replace_supervisor, after_tokens=20)
        system.wait_ready(timeout_s=60)
        assert {role: system.process(role) for role in roles} == before
        fail_over(system, load)
    wait_healthy(system)


def test_a_file_size_limit_is_a_disk_that_takes_nothing(system: RunningSystem, load: Load) -> None:
    system.wait_whole()
    size = (system.state_dir / "events.jsonl").stat().st_size
    with limited(system.supervisor.pid, resource.RLIMIT_FSIZE, size):
        fail_over(system, load)
        assert "large" in wait_degraded(system, "disk")
    wait_healthy(system)
    assert_gap_free(system)


def test_without_a_descriptor_the_supervisor_still_fails_over(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    pid = system.supervisor.pid
    victim = system.process("primary")
    epoch = system.admin.status().group.epoch
    # So low that what a dead engine gives back is of no use either: the first numbers are the
    # reserve and what the supervisor opened at its start.
    with limited(pid, resource.RLIMIT_NOFILE, 34):
        load.under_fault(system, lambda: system.kill_process(victim), after_tokens=20)
        time.sleep(2)  # starts are tried, and refused
        assert system.supervisor.poll() is None
    system.wait_whole(timeout_s=RESTORED_S, not_led_by=victim)
    after = system.admin.status().group
    assert after.epoch == epoch + 1
    assert not any(e.state == "fatal" for e in after.engines)
    refused = system.admin.metric("understudy_start_refusals_total", kind="engine")
    assert refused >= 1
    wait_healthy(system)
    kinds = [e["kind"] for e in events_of(system)]
    assert "start_refused" in kinds
    fail_over(system, load)


def test_a_cache_daemon_without_descriptors_makes_no_standby_fatal(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    victim, cache = system.process("standby"), system.process("cache")
    primary = system.process("primary")
    with without_descriptors(cache.pid):
        load.under_fault(system, lambda: system.kill_process(victim), after_tokens=20)
        end_s = time.monotonic() + 10  # five young deaths in a row would be the end of it
        while time.monotonic() < end_s:
            assert not any(e.state == "fatal" for e in system.admin.status().group.engines)
            time.sleep(0.1)
        assert "start" in supervisor_status(system)["degraded"]
    system.wait_whole(timeout_s=RESTORED_S)
    assert system.process("primary") == primary
    wait_healthy(system)


@contextlib.contextmanager
def stopped(system: RunningSystem, seconds: float) -> Iterator[None]:
    """The supervisor does not run while the body does, and then until `seconds` are over."""
    began_s = time.monotonic()
    system.kill("supervisor", signal.SIGSTOP)
    try:
        yield
        time.sleep(max(0.0, seconds - (time.monotonic() - began_s)))
    finally:
        os.kill(system.supervisor.pid, signal.SIGCONT)


def test_a_supervisor_that_was_stopped_for_ten_seconds_judges_nobody(
    system: RunningSystem, load: Load
) -> None:
    roles = ("primary", "standby", "batch", "zygote", "cache", "gateway")
    system.wait_whole()
    before = {role: system.process(role) for role in roles}
    epoch, seq = system.admin.status().group.epoch, len(events_of(system))

    def stop_and_go_on() -> int:
        moment_ns = time.monotonic_ns()
        with stopped(system, 10):
            pass
        return moment_ns

    load.under_fault(system, stop_and_go_on, after_tokens=10)
    system.wait_whole()
    time.sleep(2)  # several samples, probes and canaries
    assert {role: system.process(role) for role in roles} == before
    assert system.admin.status().group.epoch == epoch
    bad = {"verdict", "recovery_failed", "fence_not_proven", "start_failed", "gateway_silent"}
    assert [e["kind"] for e in events_of(system)[seq:] if e["kind"] in bad] == []


def test_a_primary_that_died_while_the_supervisor_was_stopped_is_replaced_at_once(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    victim, seq = system.process("primary"), len(events_of(system))

    def die_unseen() -> int:
        with stopped(system, 10):
            return system.kill_process(victim)

    load.under_fault(system, die_unseen, after_tokens=20)
    system.wait_whole(timeout_s=RESTORED_S, not_led_by=victim)
    kinds = [e["kind"] for e in events_of(system)[seq:]]
    assert "failover_completed" in kinds
    assert "recovery_failed" not in kinds
