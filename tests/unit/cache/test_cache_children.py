"""A child never keeps its asker: not by hanging, not by its own children, not by its output."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache import children, cudaworker, gpumemory
from cache.children import ChildLeftError, ask_child
from cache.errors import DeadlineExceededError, ProtocolError

PIPE_KEEPER = """
import subprocess, sys, time
keeper = subprocess.Popen(["sleep", "60"])
open({pid_file!r}, "w").write(str(keeper.pid))
{then}
"""


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Path]:
    """Where a child writes the pid of a grandchild that keeps its pipe open."""
    file = tmp_path / "pid"
    yield file
    os.kill(int(file.read_text()), signal.SIGKILL)


def keeping(pid_file: Path, then: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PIPE_KEEPER.format(pid_file=str(pid_file), then=then))


def test_a_worker_whose_grandchild_keeps_the_pipe_is_given_up_in_time(
    keeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudaworker, "ARGV", keeping(keeper, "time.sleep(60)"))
    monkeypatch.setattr(cudaworker, "_ZERO_TIMEOUT_S", 1.0)
    before, started_s = open_fds(), time.monotonic()
    with pytest.raises(DeadlineExceededError):
        cudaworker.zero_in_child("cuda:0", [], [])
    assert time.monotonic() - started_s < 5
    assert open_fds() == before


def test_a_look_at_the_card_whose_grandchild_keeps_the_pipe_is_given_up_in_time(
    keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {keeper}\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpumemory, "_TIMEOUT_S", 0.5)
    before, started_s = open_fds(), time.monotonic()
    assert "unknown" in gpumemory.describe_use("GPU-1").text
    assert time.monotonic() - started_s < 5
    assert open_fds() == before


def test_an_answer_counts_though_a_grandchild_keeps_the_pipe(keeper: Path) -> None:
    argv = keeping(keeper, "print('done')")
    ended = ask_child(argv, what="a test", timeout_s=30, max_output_bytes=100)
    assert ended == children.Ended(0, b"done\n")


def test_more_than_a_pipe_holds_goes_both_ways() -> None:
    data = b"x" * 3_000_000
    copy = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    ended = ask_child(
        (sys.executable, "-c", copy), what="a copy", timeout_s=30, max_output_bytes=len(data),
        data=data,
    )  # fmt: skip
    assert ended is not None
    assert ended.output == data


def test_endless_output_ends_with_the_bound() -> None:
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        ask_child(("yes",), what="a test", timeout_s=30, max_output_bytes=1000)


def test_a_child_that_reads_nothing_is_no_error() -> None:
    ended = ask_child(
        ("true",), what="a test", timeout_s=30, max_output_bytes=10, data=b"x" * 1_000_000
    )
    assert ended == children.Ended(0, b"")


def test_a_stop_ends_the_child_at_once() -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    started_s = time.monotonic()
    assert ask_child(("sleep", "60"), what="a test", timeout_s=60, max_output_bytes=1, stop=stop,
                     niceness=19) is None  # fmt: skip
    assert time.monotonic() - started_s < 5


def test_a_child_that_does_not_end_is_left_behind_and_buried_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No signal ends a process inside a sick driver; here the signal is taken away instead."""
    argv, before = ("sleep", "60"), open_fds()
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(subprocess.Popen, "kill", lambda _child: None)
        patched.setattr(children, "END_S", 0.1)
        with pytest.raises(DeadlineExceededError):
            ask_child(argv, what="a sick card", timeout_s=0.1, max_output_bytes=1)
    assert "does not end when it is killed" in caplog.text
    assert open_fds() == before
    ((_, left),) = children._left
    with pytest.raises(ChildLeftError, match=f"pid {left.pid} was killed and has not ended"):
        ask_child(("true",), what="a sick card", timeout_s=5, max_output_bytes=1, alone=True)
    assert ask_child(("true",), what="something else", timeout_s=5, max_output_bytes=1, alone=True)
    left.kill()
    left.wait(10)
    assert ask_child(("true",), what="a sick card", timeout_s=5, max_output_bytes=1, alone=True)
    assert not children._left
