"""State files that are gone, torn, foreign or from the future, beside living processes: the truth
is what the processes say, and what cannot be read is kept aside.
"""

import json
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.client import wait_until
from chaos.system import RunningSystem, SystemOptions
from supervisor.process.identity import ProcessId
from tests.harness.rounds import Load

ROLES = ("primary", "standby", "batch", "zygote", "cache", "gateway")


@pytest.fixture(scope="module")
def system_options() -> SystemOptions:
    return SystemOptions(batch=True)


def truncate(state: Path, events: Path) -> None:
    state.write_bytes(b"")
    events.write_bytes(b"")


def tear(state: Path, events: Path) -> None:
    state.write_bytes(state.read_bytes()[:-30])
    events.write_bytes(events.read_bytes()[:-30])


def fill_with_rubbish(state: Path, events: Path) -> None:
    state.write_bytes(b"\x00\xff rubbish \x80" * 100)
    events.write_bytes(b"\x00\xff rubbish \x80" * 100)


def come_from_the_future(state: Path, _events: Path) -> None:
    state.write_text(json.dumps({"version": 99, "epochs": "a map of maps by then"}))


def come_from_another_boot(state: Path, _events: Path) -> None:
    found = json.loads(state.read_text())
    found["boot_id"] = "00000000-0000-0000-0000-000000000000"
    for process in found["processes"]:
        process["pid"], process["start_ticks"] = 1, 1
    state.write_text(json.dumps(found))


def vanish(state: Path, events: Path) -> None:
    state.unlink()
    events.unlink()


DAMAGES: tuple[tuple[Callable[[Path, Path], None], str], ...] = (
    (truncate, "state.json.corrupt-1"),
    (tear, "state.json.corrupt-2"),
    (fill_with_rubbish, "state.json.corrupt-3"),
    (come_from_the_future, "state.json.future-1"),
    (come_from_another_boot, ""),
    (vanish, ""),
)


def everybody(system: RunningSystem) -> dict[str, ProcessId]:
    return {role: system.process(role) for role in ROLES}


def replace_supervisor(
    system: RunningSystem, damage: Callable[[Path, Path], None] | None = None
) -> int:
    """SIGKILL it, damage the files, start the next one; the moment of the kill."""
    _, moment_ns = system.kill("supervisor")
    system.wait_supervisor(timeout_s=10)
    if damage is not None:
        damage(system.state_dir / "state.json", system.state_dir / "events.jsonl")
    system.spawn_supervisor()
    return moment_ns


def test_every_damage_is_survived_by_processes_streams_and_epoch(
    system: RunningSystem, load: Load
) -> None:
    for damage, _ in DAMAGES:
        before, group = everybody(system), system.wait_whole().group

        def hurt(damage: Callable[[Path, Path], None] = damage) -> int:
            return replace_supervisor(system, damage)

        load.under_fault(system, hurt, after_tokens=20)
        system.wait_ready(timeout_s=60)
        after = system.admin.status().group
        assert everybody(system) == before, damage.__name__
        assert (after.epoch, after.primary) == (group.epoch, group.primary), damage.__name__
    kept = {path.name for path in system.state_dir.iterdir()}
    assert {name for _, name in DAMAGES if name} <= kept
    assert any(name.startswith("events.jsonl.corrupt") for name in kept)


def test_the_files_are_whole_again_and_the_pair_fails_over(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    epoch = system.admin.status().group.epoch
    load.under_fault(system, lambda: system.kill("primary")[1], after_tokens=20)
    system.wait_whole()
    state = json.loads((system.state_dir / "state.json").read_text())
    assert state["version"] == 1
    assert state["epochs"]["chat"] > epoch + 1, "the ceiling is reserved ahead"
    lines = (system.state_dir / "events.jsonl").read_bytes().splitlines()
    seqs = [json.loads(line)["seq"] for line in lines]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_restarts_of_the_supervisor_do_not_use_epochs_up(system: RunningSystem) -> None:
    epoch = system.wait_whole().group.epoch
    for _ in range(3):
        replace_supervisor(system)
        system.wait_ready(timeout_s=60)
    assert system.admin.status().group.epoch == epoch


def test_a_primary_that_died_with_the_journal_is_followed_by_a_higher_epoch(
    system: RunningSystem, load: Load
) -> None:
    before = system.wait_whole().group
    primary = system.process("primary")

    def all_at_once() -> int:
        system.kill("supervisor")
        system.wait_supervisor(timeout_s=10)
        moment_ns = system.kill_process(primary)
        truncate(system.state_dir / "state.json", system.state_dir / "events.jsonl")
        system.spawn_supervisor()
        return moment_ns

    load.under_fault(system, all_at_once, after_tokens=20)
    system.wait_ready(timeout_s=60)
    assert system.admin.status().group.epoch == before.epoch + 1


def degraded(system: RunningSystem) -> dict[str, str]:
    status = system.admin.get("/v1/status")
    assert isinstance(status, dict)
    found: dict[str, str] = status["supervisor"]["degraded"]
    return found


def test_a_stranger_on_the_admin_port_keeps_no_supervisor_from_its_processes(
    system: RunningSystem, load: Load
) -> None:
    system.wait_whole()
    before = everybody(system)
    system.kill("supervisor")
    system.wait_supervisor(timeout_s=10)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", system.admin_port))
        stranger.listen()
        system.spawn_supervisor()
        system.wait_ready(timeout_s=60)
        assert everybody(system) == before
        assert "Address already in use" in degraded(system)["address"]
        victim = before["primary"]
        load.under_fault(system, lambda: system.kill_process(victim), after_tokens=20)
        system.wait_whole(not_led_by=victim)
    wait_until(lambda: not degraded(system), "the port to be ours again", timeout_s=15)
    with urllib.request.urlopen(f"http://127.0.0.1:{system.admin_port}/livez", timeout=5) as answer:
        assert answer.status == 200
