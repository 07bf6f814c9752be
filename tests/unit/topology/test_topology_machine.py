"""The real machine: what it answers about ports, memory and processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.process.identity import Marker, read_process_id, state_id_of
from supervisor.topology.machine import LocalMachine, is_alive
from supervisor.topology.schema import ListenAddress

LISTENER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> ListenAddress:
    return ListenAddress(host="127.0.0.1", port=server.getsockname()[1])


def test_memory_is_plausible() -> None:
    memory = LocalMachine().memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_a_free_port_is_free_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_of(server)
    assert LocalMachine().port_state(address) is None
    assert LocalMachine().port_state(address) is None


def test_a_port_with_a_listener_is_taken(listener: socket.socket) -> None:
    state = LocalMachine().port_state(address_of(listener))
    assert state is not None
    assert state.is_taken


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    state = LocalMachine().port_state(ListenAddress(host="192.0.2.1", port=9))
    assert state is not None
    assert not state.is_taken


def test_a_strangers_port_is_not_ours(tmp_path: Path, listener: socket.socket) -> None:
    assert not LocalMachine().held_by_us(tmp_path, address_of(listener))


def test_the_port_of_the_supervisor_in_the_lock_is_ours(
    tmp_path: Path, listener: socket.socket
) -> None:
    ticks = read_process_id(os.getpid()).start_ticks
    (tmp_path / "lock").write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks}))
    assert LocalMachine().running_pid(tmp_path) == os.getpid()
    assert LocalMachine().held_by_us(tmp_path, address_of(listener))


def test_a_lock_of_an_earlier_owner_of_the_pid_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1}))
    assert LocalMachine().running_pid(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": "x"}', '{"pid": -1}'])
def test_a_lock_that_is_no_lock_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    assert LocalMachine().running_pid(tmp_path) is None


def test_the_port_of_a_worker_that_outlived_its_supervisor_is_ours(tmp_path: Path) -> None:
    marker = Marker(state_id_of(tmp_path), "gateway-0-0badcafe")
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        env={"UNDERSTUDY_INSTANCE": marker.value()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        address = ListenAddress(host="127.0.0.1", port=int(worker.stdout.readline()))
        try:
            assert LocalMachine().held_by_us(tmp_path, address)
            assert not LocalMachine().held_by_us(tmp_path / "other", address)
            assert LocalMachine().is_in_use(tmp_path)
            assert not LocalMachine().is_in_use(tmp_path / "other")
        finally:
            worker.kill()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()  # end of file: it has ended, or is about to
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)
    assert is_alive(os.getpid())


BUSY_LISTENER = """
import os, socket
low = [os.dup(0) for _ in range(200)]
server = socket.create_server(("127.0.0.1", 0))
for fd in low:
    os.close(fd)
print(server.getsockname()[1], flush=True)
while True:
    for fd in [os.dup(0) for _ in range(200)]:
        os.close(fd)
"""


def test_a_worker_that_opens_and_closes_all_the_time_is_found_every_time(tmp_path: Path) -> None:
    """A descriptor that vanished while it was read hid the whole process."""
    marker = Marker(state_id_of(tmp_path), "gateway-0-0badcafe")
    with subprocess.Popen(
        [sys.executable, "-c", BUSY_LISTENER],
        env={"UNDERSTUDY_INSTANCE": marker.value()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        address = ListenAddress(host="127.0.0.1", port=int(worker.stdout.readline()))
        try:
            assert all(LocalMachine().held_by_us(tmp_path, address) for _ in range(10))
        finally:
            worker.kill()
