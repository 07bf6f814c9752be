"""Generated topologies are good ones, and a system that cannot start says why."""

import os
from pathlib import Path

import pytest

from cache.errors import UnderstudyError
from chaos.client import AdminClient
from chaos.system import (
    RunningSystem,
    StartError,
    SystemOptions,
    free_ports,
    is_port_free,
    topology_text,
)
from supervisor.topology import check, load
from tests.unit.chaos.test_leftovers import end, start_holder

SHAPES = [
    SystemOptions(),
    SystemOptions(standby=False, cache_mode="off"),
    SystemOptions(
        batch=True,
        ballast="64MiB",
        workers=2,
        freeze_when="queue > 0",
        evict_after="2s",
        resume_after="5s",
        max_young_deaths=3,
    ),
]


@pytest.mark.parametrize("options", SHAPES)
def test_a_generated_topology_passes_the_check(tmp_path: Path, options: SystemOptions) -> None:
    gateway_port, admin_port = free_ports(2)
    file = tmp_path / "topology.yaml"
    state_dir = tmp_path / "state"
    text = topology_text(
        options, state_dir=state_dir, gateway_port=gateway_port, admin_port=admin_port
    )
    file.write_text(text, "utf-8")
    assert [str(finding) for finding in check(file, {})] == []
    topology = load(file, {})
    assert topology.gateway.listen.port == gateway_port
    roles = [engine.role.value for engine in topology.groups[0].engines]
    assert roles.count("standby") == options.standby
    assert roles.count("batch") == options.batch


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_port_free(port) for port in ports)


def test_a_start_that_fails_shows_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    system = RunningSystem(tmp_path, SystemOptions(slots=0))
    with pytest.raises(StartError) as caught:
        system.start(timeout_s=60)
    assert caught.value.process_exit_code == 2
    assert "slots" in caught.value.output
    assert system.leftovers() == []
    system.close()


def test_a_state_directory_of_another_system_is_refused_and_unharmed(tmp_path: Path) -> None:
    system = RunningSystem(tmp_path)
    other = start_holder(system.state_dir, "descriptor")
    try:
        with pytest.raises(UnderstudyError, match=str(other.pid)):
            system.start()
        system.close(check=False)
        assert other.poll() is None
    finally:
        end(other)


def test_nobody_at_the_socket_is_not_ready(tmp_path: Path) -> None:
    assert AdminClient(tmp_path).is_ready() is False
    assert not os.listdir(tmp_path)  # noqa: PTH208 -- only whether anything is there
