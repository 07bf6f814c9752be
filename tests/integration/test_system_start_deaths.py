"""Who dies or stops while the weights are still loading: the start goes on, and loads once more.

The loader is held at its first line by an order (`chaos/hooks`), so that the load takes as long as
the test wants.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.client import wait_until
from chaos.runner import hook_environment
from chaos.system import RunningSystem, SystemOptions
from supervisor.process import ProcessId, is_same, signal_process
from tests.harness.rounds import Load

UP_S = 90.0


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file is there no loader begins."""
    order = tmp_path / "hold-cache.loader"
    order.touch()
    return order


@pytest.fixture
def system(
    new_system: Callable[[SystemOptions], RunningSystem], hold: Path
) -> Iterator[RunningSystem]:
    """Its supervisor runs, its loader waits."""
    system = new_system(SystemOptions(extra_environment=hook_environment(hold.parent)))
    try:
        system.spawn_supervisor()
        wait_until(lambda: loaders(system), "a loader that waits", timeout_s=UP_S)
        yield system
    finally:
        hold.unlink(missing_ok=True)
        system.close(check=False)


def loaders(system: RunningSystem) -> list[ProcessId]:
    """Living processes of this system that run `python -m cache.loader`."""
    found = []
    for process in system.own_processes():
        try:
            arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile
        if b"cache.loader" in arguments:
            found.append(process)
    return found


def daemon_of(system: RunningSystem) -> ProcessId:
    """The living cache daemon that the status names; waits for one."""

    def probe() -> ProcessId | None:
        system.require_alive()
        status = system.status()
        pid = status.group.cache[0].pid if status is not None and status.group.cache else None
        alive = (p for p in system.own_processes() if p.pid == pid)
        return next(alive, None)

    return wait_until(probe, "a cache daemon", timeout_s=UP_S)


def assert_all_is_well(system: RunningSystem, hold: Path, old_loaders: list[ProcessId]) -> None:
    """It comes up and has loaded once; nobody waits for a daemon that is gone."""
    hold.unlink()
    system.wait_ready(timeout_s=UP_S)
    assert not any(is_same(loader) for loader in old_loaders), "a loader of the dead lives on"
    assert system.admin.status().group.cache[0].loads == 1


def test_a_cache_daemon_that_dies_while_it_loads_is_followed(
    system: RunningSystem, hold: Path
) -> None:
    daemon, waiting = daemon_of(system), loaders(system)
    system.kill_process(daemon)
    wait_until(lambda: daemon_of(system) != daemon, "another daemon", timeout_s=UP_S)
    wait_until(lambda: set(loaders(system)) - set(waiting), "another loader", timeout_s=UP_S)
    assert_all_is_well(system, hold, waiting)
    victim = system.process("primary")
    Load.of(system).under_fault(system, lambda: system.kill_process(victim), after_tokens=10)
    system.wait_whole(timeout_s=UP_S, not_led_by=victim)
    system.close()


def test_a_cache_daemon_that_stands_still_while_it_loads_is_replaced(
    system: RunningSystem, hold: Path
) -> None:
    daemon, waiting = daemon_of(system), loaders(system)
    signal_process(daemon, signal.SIGSTOP)
    wait_until(lambda: daemon_of(system) != daemon, "another daemon", timeout_s=UP_S)
    wait_until(lambda: set(loaders(system)) - set(waiting), "another loader", timeout_s=UP_S)
    assert_all_is_well(system, hold, waiting)


def test_a_supervisor_that_dies_during_the_load_is_followed_and_the_load_goes_on(
    system: RunningSystem, hold: Path
) -> None:
    daemon, waiting = daemon_of(system), loaders(system)
    system.supervisor.kill()
    system.wait_supervisor(timeout_s=10)
    system.spawn_supervisor()
    assert daemon_of(system) == daemon
    assert loaders(system) == waiting
    hold.unlink()
    system.wait_ready(timeout_s=UP_S)
    assert system.admin.status().group.cache[0].loads == 1
    system.close()


def test_supervisor_and_daemon_that_die_during_the_load_are_followed(
    system: RunningSystem, hold: Path
) -> None:
    daemon, waiting = daemon_of(system), loaders(system)
    system.supervisor.kill()
    system.kill_process(daemon)
    system.wait_supervisor(timeout_s=10)
    system.spawn_supervisor()
    assert_all_is_well(system, hold, waiting)
