"""What a running process does about an order that lies in its folder."""

import contextlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machinefaults import dumped_ranges
from chaos.runner import hook_environment
from tests.harness.lines import read_line

WAIT_S = 10.0


@contextlib.contextmanager
def running(orders: Path, source: str) -> Iterator[subprocess.Popen[str]]:
    """A process that obeys; it ends with its input, or at the latest with the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, **hook_environment(orders)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def ask(process: subprocess.Popen[str], line: str = "go") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return read_line(process.stdout, timeout_s=WAIT_S)


def test_the_wall_clock_of_a_running_process_and_of_its_forks_jumps(tmp_path: Path) -> None:
    file = tmp_path / "wall-clock"
    file.write_bytes(struct.pack("d", 0.0))
    source = (
        "import os, sys, time\n"
        "for line in sys.stdin:\n"
        "    if os.fork() == 0:\n"
        "        print(time.time(), time.time_ns() / 1e9, time.monotonic(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    with running(tmp_path, source) as process:
        for offset_s in (0.0, 3600.0, -7200.0):
            with file.open("r+b") as opened:
                opened.write(struct.pack("d", offset_s))
            wall_s, wall_ns_s, monotonic_s = map(float, ask(process).split())
            assert wall_s == pytest.approx(time.time() + offset_s, abs=WAIT_S)
            assert wall_ns_s == pytest.approx(wall_s, abs=1.0)
            assert monotonic_s == pytest.approx(time.monotonic(), abs=WAIT_S)


def test_fsync_fails_while_the_order_is_there(tmp_path: Path) -> None:
    source = (
        "import os, sys\n"
        f"fd = os.open({str(tmp_path / 'data')!r}, os.O_CREAT | os.O_RDWR)\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        os.fsync(fd), os.fdatasync(fd)\n"
        "        print('well', flush=True)\n"
        "    except OSError as error:\n"
        "        print(error.strerror, flush=True)\n"
    )
    with running(tmp_path, source) as process:
        assert ask(process) == "well"
        (tmp_path / "no-fsync").touch()
        assert ask(process) == "Input/output error"
        (tmp_path / "no-fsync").unlink()
        assert ask(process) == "well"


def test_the_areas_of_a_core_file_are_read(tmp_path: Path) -> None:
    head = b"\x7fELF".ljust(32, b"\0") + struct.pack("<Q", 64)
    head = (head.ljust(54, b"\0") + struct.pack("<HH", 56, 2)).ljust(64, b"\0")
    load = struct.pack("<IIQQQQQQ", 1, 4, 4096, 0x7000, 0, 8192, 8192, 4096)
    note = struct.pack("<IIQQQQQQ", 4, 4, 200, 0, 0, 99, 99, 4)
    (tmp_path / "core").write_bytes(head + note + load)
    assert dumped_ranges(tmp_path / "core") == [(0x7000, 8192)]
