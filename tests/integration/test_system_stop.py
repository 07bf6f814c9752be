"""Stops and starts that fail: a clear reason, and nothing of the system is left behind."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.client import AdminClient, wait_until
from chaos.leftovers import marked_processes
from chaos.streams import StreamFleet, make_requests
from chaos.system import DEMO_MODEL, RunningSystem, StartError, SystemOptions

NewSystem = Callable[[SystemOptions], RunningSystem]


def start_fails(system: RunningSystem) -> StartError:
    """Start, expect the supervisor to end by itself, and nothing to be left of it."""
    try:
        with pytest.raises(StartError) as caught:
            system.start(timeout_s=90)
        assert caught.value.process_exit_code > 0, "ended by a signal, or as if all were well"
        assert "Traceback" not in caught.value.output
        assert system.leftovers() == []
    finally:
        system.close(check=False)
    return caught.value


def model_copy(directory: Path) -> Path:
    copy = directory / "model"
    shutil.copytree(DEMO_MODEL, copy)
    return copy


def test_stop_under_load_ends_every_process_and_every_stream(new_system: NewSystem) -> None:
    with new_system(SystemOptions(batch=True)) as system:
        with StreamFleet(system.base_url, make_requests(8, max_tokens=1800)) as fleet:
            fleet.wait_tokens(3)
            system.take_inventory()
            assert system.stop() == 0
            records = fleet.wait_done(timeout_s=20)
        assert system.leftovers() == []
        assert all(record.ended_ns for record in records)


def test_ctrl_c_stops_everything(new_system: NewSystem) -> None:
    with new_system(SystemOptions()) as system:
        system.take_inventory()
        system.supervisor.send_signal(signal.SIGINT)
        assert system.wait_supervisor() in (0, 130)
        assert system.leftovers() == []


def test_ctrl_c_during_the_start_stops_what_had_started(new_system: NewSystem) -> None:
    system = new_system(SystemOptions())
    try:
        supervisor = system.spawn_supervisor()
        wait_until(lambda: bool(marked_processes(system.state_dir)), "a first child", timeout_s=60)
        system.take_inventory()
        supervisor.send_signal(signal.SIGINT)
        system.wait_supervisor()
        assert system.leftovers() == []
    finally:
        system.close(check=False)


def test_a_state_directory_starts_again_after_a_stop(new_system: NewSystem) -> None:
    system = new_system(SystemOptions(standby=False))
    with system:
        first_epoch = system.admin.status().group.epoch
        assert system.stop() == 0
        system.start()
        assert system.admin.status().group.epoch >= first_epoch


def test_a_second_supervisor_names_the_first_and_harms_nothing(new_system: NewSystem) -> None:
    with new_system(SystemOptions(standby=False)) as system:
        first = system.supervisor
        second = system.spawn_supervisor()
        assert second.wait(timeout=30) == 4
        assert str(first.pid) in system.output_path.read_text()
        assert system.admin.status().supervisor.pid == first.pid
        system.stop()
        assert first.wait(timeout=30) == 0


def test_a_config_that_is_not_json_is_named(new_system: NewSystem, tmp_path: Path) -> None:
    model = model_copy(tmp_path)
    (model / "config.json").write_text("{", "utf-8")
    error = start_fails(new_system(SystemOptions(model=model)))
    assert "config.json" in error.output


def test_a_truncated_checkpoint_is_named(new_system: NewSystem, tmp_path: Path) -> None:
    model = model_copy(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    error = start_fails(new_system(SystemOptions(model=model)))
    assert "model.safetensors" in error.output


def test_a_checkpoint_of_other_shapes_is_refused_in_words(
    new_system: NewSystem, tmp_path: Path
) -> None:
    model = model_copy(tmp_path)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["intermediate_size"] += 64
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    error = start_fails(new_system(SystemOptions(model=model)))
    assert "shape" in error.output or "mlp" in error.output


def test_a_tokenizer_that_the_library_cannot_read_is_named(
    new_system: NewSystem, tmp_path: Path
) -> None:
    """Known only to those who import the library: the zygote, then engines that start cold."""
    model = model_copy(tmp_path)
    (model / "tokenizer.json").write_text("{}", "utf-8")
    error = start_fails(new_system(SystemOptions(model=model, standby=False, max_young_deaths=1)))
    assert f"cannot read the tokenizer of {model}" in error.output.splitlines()[-1]


def test_weights_that_are_no_numbers_are_named_when_everything_else_runs(
    new_system: NewSystem, tmp_path: Path
) -> None:
    model = model_copy(tmp_path)
    weights = model / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-2_000_000:] = b"\xff" * 2_000_000
    weights.write_bytes(raw)
    error = start_fails(new_system(SystemOptions(model=model, standby=False, max_young_deaths=2)))
    assert "the canary's logits are not finite" in error.output.splitlines()[-1]


def test_a_taken_admin_port_is_named(new_system: NewSystem) -> None:
    system = new_system(SystemOptions(standby=False))
    with socket.create_server(("127.0.0.1", system.admin_port)):
        with pytest.raises(StartError) as caught:
            system.start(timeout_s=90)
        assert str(system.admin_port) in caught.value.output
        assert "Traceback" not in caught.value.output
    system.close(check=False)
    assert marked_processes(system.state_dir) == []


def test_a_taken_port_is_named(new_system: NewSystem) -> None:
    system = new_system(SystemOptions(standby=False))
    with socket.create_server(("127.0.0.1", system.gateway_port)):
        started = time.monotonic()
        with pytest.raises(StartError) as caught:
            system.start(timeout_s=90)
        assert str(system.gateway_port) in caught.value.output
        assert "Traceback" not in caught.value.output
        assert time.monotonic() - started < 30, "the port is known to be taken before the load"
    system.close(check=False)
    assert marked_processes(system.state_dir) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # noqa: S607


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


def test_a_full_disk_is_told_and_leaves_nothing(
    new_system: NewSystem, small_disk: Path, tmp_path: Path
) -> None:
    """Whether it refuses to start or serves without its journal: never a silent half."""
    system = new_system(SystemOptions(standby=False))
    text = system.topology.read_text("utf-8").replace(
        str(system.state_dir), str(small_disk / "state")
    )
    system.topology.write_text(text, "utf-8")
    system.state_dir = small_disk / "state"
    system.admin = AdminClient(system.state_dir)
    fill(small_disk / "filler")
    error = start_fails(system)
    assert "No space left" in error.output or "disk" in error.output
