"""The writer thread: nobody waits for a disk, and trouble is visible while it lasts."""

import threading
import time

import pytest

from supervisor.observe import diskwriter
from supervisor.observe.diskwriter import DiskWriter


class Disk:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.release = threading.Event()
        self.release.set()
        self.writes = 0
        self.told: list[str] = []

    def write(self) -> None:
        self.writes += 1
        self.release.wait(10)
        if self.error is not None:
            raise self.error


def test_a_hanging_disk_is_visible_and_closing_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diskwriter, "_HANGS_AFTER_S", 0.05)
    disk = Disk()
    disk.release.clear()
    writer = DiskWriter("test", disk.write)
    assert writer.degraded == ""
    writer.poke()
    deadline = time.monotonic() + 5
    while "has not answered" not in writer.degraded:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not writer.flush(timeout_s=0.05)
    started = time.monotonic()
    assert not writer.close(timeout_s=0.1)
    assert time.monotonic() - started < 2
    disk.release.set()


def test_trouble_is_told_once_and_so_is_its_end() -> None:
    disk = Disk()
    disk.error = OSError(28, "No space left on device")
    writer = DiskWriter("test", disk.write, retry_s=0.01, on_change=disk.told.append)
    for _ in range(5):
        writer.poke()
        assert not writer.flush(timeout_s=5)
    assert writer.degraded == "No space left on device"
    disk.error = None
    deadline = time.monotonic() + 5
    while writer.degraded:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert writer.flush(timeout_s=5)
    assert writer.close(timeout_s=5)
    assert disk.told == ["No space left on device", ""]


def test_retries_are_spaced_however_often_it_is_poked() -> None:
    disk = Disk()
    disk.error = OSError(5, "Input/output error")
    writer = DiskWriter("test", disk.write, retry_s=0.2)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        writer.poke()
        time.sleep(0.001)
    assert disk.writes <= 4
    writer.close(timeout_s=5)


def test_closing_does_pending_work_and_tries_failed_work_once_more() -> None:
    disk = Disk()
    writer = DiskWriter("test", disk.write)
    writer.poke()
    assert writer.close(timeout_s=5)
    assert disk.writes == 1
    assert DiskWriter("idle", disk.write).close(timeout_s=5)

    disk.error = OSError(5, "Input/output error")
    failing = DiskWriter("test", disk.write, retry_s=60)
    failing.poke()
    assert not failing.flush(timeout_s=5)
    disk.error = None
    assert failing.close(timeout_s=5)


def test_a_bug_in_the_work_does_not_end_the_thread() -> None:
    disk = Disk()
    disk.error = KeyError("a bug")
    writer = DiskWriter("test", disk.write, retry_s=0.01)
    writer.poke()
    assert not writer.flush(timeout_s=5)
    assert "KeyError" in writer.degraded
    disk.error = None
    writer.poke()
    deadline = time.monotonic() + 5
    while not writer.flush(timeout_s=1):
        assert time.monotonic() < deadline
    writer.close(timeout_s=5)
