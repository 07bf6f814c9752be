"""Leftovers are found by identity: marker, memory inode, socket file, port."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from chaos.leftovers import find_leftovers, marked_processes, memory_of, take_inventory
from supervisor.process.identity import MARKER_VARIABLE, Marker, state_id_of

HOLDER = """
import mmap, os, sys
fd = os.memfd_create("understudy-test")
os.truncate(fd, 4096)
page = mmap.mmap(fd, 4096)
if sys.argv[1] == "mapping":
    os.close(fd)
print("ready", flush=True)
sys.stdin.read()
"""


def start_holder(state_dir: Path, how: str) -> subprocess.Popen[bytes]:
    """A process that carries the marker of `state_dir` and holds a memfd."""
    marker = Marker(state_id_of(state_dir), "chat-a-00000001").value()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, how],
        env={**os.environ, MARKER_VARIABLE: marker},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=10)


def test_a_living_process_and_the_memory_it_holds_are_found(tmp_path: Path) -> None:
    process = start_holder(tmp_path, "descriptor")
    try:
        before = take_inventory(tmp_path)
        assert [p.pid for p, _ in before.processes] == [process.pid]
        assert {inode.name for inode in before.memory} == {"understudy-test"}
        found = find_leftovers(before)
        assert any("chat-a-00000001" in sentence for sentence in found)
        assert any("understudy-test" in sentence for sentence in found)
    finally:
        end(process)
    assert find_leftovers(before) == []
    assert marked_processes(tmp_path) == []


def test_memory_held_only_by_a_mapping_is_the_same_memory(tmp_path: Path) -> None:
    by_mapping = start_holder(tmp_path, "mapping")
    by_both = start_holder(tmp_path, "descriptor")
    try:
        assert len(memory_of(by_mapping.pid)) == 1
        assert len(memory_of(by_both.pid)) == 1  # descriptor and mapping name one inode
        assert memory_of(by_mapping.pid) != memory_of(by_both.pid)
    finally:
        end(by_mapping)
        end(by_both)


def test_a_socket_file_and_a_taken_port_are_found(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        socket.socket(socket.AF_UNIX) as control,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        control.bind(str(tmp_path / "run" / "a.sock"))
        before = take_inventory(tmp_path, ports=(listener.getsockname()[1],))
        found = find_leftovers(before)
    assert len(found) == 2
    assert "a.sock" in found[0]
    assert "port" in found[1]
    (tmp_path / "run" / "a.sock").unlink()
    assert find_leftovers(before) == []
