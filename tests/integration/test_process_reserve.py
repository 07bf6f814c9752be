"""Without a free descriptor a death is still seen and a fence still proven."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.process import (
    RESERVE,
    DescriptorReserve,
    ExitEvidence,
    ExitWatcher,
    Marker,
    ProcessHandle,
    fence,
    spare,
    spawn,
)

PROGRAM = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"  # noqa: E501


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Every number below the limit is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(e.name) for e in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def reserve() -> Iterator[DescriptorReserve]:
    RESERVE.open()
    yield RESERVE
    RESERVE.close()


def victim(tmp_path: Path) -> ProcessHandle:
    child = spawn(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": os.environ["PATH"]},
        log_path=tmp_path / "log",
        marker=Marker("0123abcd", "victim-1"),
        cwd=tmp_path,
    )
    return ProcessHandle.of_child(child)


async def test_a_death_is_seen_and_the_whole_tree_is_fenced_without_a_free_descriptor(
    tmp_path: Path, reserve: DescriptorReserve
) -> None:
    handle = victim(tmp_path)
    watcher = ExitWatcher()
    seen: asyncio.Future[ExitEvidence] = asyncio.get_running_loop().create_future()
    watcher.watch(handle.process, seen.set_result)
    async with asyncio.timeout(10):
        while not (tmp_path / "log").read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            os.close(os.open(os.devnull, os.O_RDONLY))
        handle.send_signal(signal.SIGKILL)
        async with asyncio.timeout(5):
            await seen
        evidence = await fence(handle.tree, timeout_s=5)
        assert len(evidence.members) == 2
    assert await handle.wait_reaped(timeout_s=10) == -signal.SIGKILL
    handle.close()
    watcher.close()
    assert reserve.fill()


def test_thousands_of_looks_do_not_use_the_reserve_up(reserve: DescriptorReserve) -> None:
    with no_descriptors():
        for _ in range(2000):
            os.close(spare(lambda: os.open("/proc/self/stat", os.O_RDONLY)))


def test_what_is_held_uses_it_up_and_then_it_is_an_error(reserve: DescriptorReserve) -> None:
    held: list[int] = []

    def hold_many() -> None:
        for _ in range(100):
            held.append(spare(lambda: os.open(os.devnull, os.O_RDONLY)))  # noqa: PERF401

    with no_descriptors(), pytest.raises(OSError, match="Too many open files") as caught:
        hold_many()
    assert caught.value.errno == errno.EMFILE
    assert 10 < len(held) <= 24
    for fd in held:
        os.close(fd)


def test_without_a_reserve_everything_is_as_before() -> None:
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        spare(lambda: os.open(os.devnull, os.O_RDONLY))


def test_room_is_what_can_be_opened_beside_the_reserve(reserve: DescriptorReserve) -> None:
    assert reserve.has_room(12)
    with no_descriptors():
        assert not reserve.has_room(1)
        assert not reserve.is_short
    assert reserve.has_room(12)
