"""Writers that were killed: none of their slots is used anew before they have ended."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache.slots import SlotTable
from engines.native.predecessor import FencedWriter, FencedWriters, own_identity

Child = subprocess.Popen[bytes]


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Two processes that wait, as writers of a slot table."""
    made = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    yield made
    for child in made:
        child.kill()
        child.communicate()


def identity(child: Child) -> tuple[int, int]:
    stat = Path(f"/proc/{child.pid}/stat").read_text("utf-8")
    return child.pid, int(stat.rpartition(")")[2].split()[19])


def end(child: Child) -> None:
    """SIGKILL, and wait until it has ended; it is not reaped."""
    pidfd = os.pidfd_open(child.pid)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def table() -> SlotTable:
    memory = memoryview(bytearray(SlotTable.size_bytes(2, 64)))
    SlotTable.format(memory, 2, 64)
    return SlotTable(memory)


def test_a_writer_is_gone_when_its_process_has_ended_not_sooner(children: list[Child]) -> None:
    writer = FencedWriter(*identity(children[0]))
    assert not writer.is_gone()
    children[0].send_signal(signal.SIGSTOP)
    assert not writer.is_gone()
    end(children[0])
    assert writer.is_gone()
    assert writer.is_gone()


def test_a_number_that_belongs_to_another_process_is_a_writer_that_is_gone(
    children: list[Child],
) -> None:
    pid, ticks = identity(children[0])
    assert FencedWriter(pid, ticks - 1).is_gone()
    assert FencedWriter(2**40, ticks).is_gone()
    end(children[0])
    children[0].wait()
    assert FencedWriter(pid, ticks).is_gone()


def test_a_number_that_is_a_thread_s_by_now_is_a_writer_that_is_gone() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(30,))
    thread.start()
    try:
        assert thread.native_id is not None
        assert FencedWriter(thread.native_id, 12345).is_gone()
    finally:
        go_on.set()
        thread.join()


def test_watching_no_more_keeps_no_descriptor(table: SlotTable, children: list[Child]) -> None:
    for epoch, child in enumerate(children, 1):
        table.claim(epoch, identity(child))
    before, held = table.writers, len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        fenced = FencedWriters(table, before, own_identity())
        assert not fenced.are_gone()
        fenced.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == held


def test_what_cannot_be_found_out_counts_as_not_gone(children: list[Child]) -> None:
    writer = FencedWriter(*identity(children[0]))
    with no_descriptor_left():
        assert not writer.is_gone()
    assert not writer.is_gone()
    end(children[0])
    assert writer.is_gone()


def test_a_chain_of_deaths_waits_for_everybody(table: SlotTable, children: list[Child]) -> None:
    first, second = (identity(child) for child in children)
    table.claim(1, first)
    table.claim(2, second)
    before = table.writers
    table.claim(3, own_identity())
    fenced = FencedWriters(table, before, own_identity())
    assert not fenced.are_gone()
    end(children[1])  # the later one is down first: the earlier one may still write
    assert not fenced.are_gone()
    assert table.writers == [own_identity(), first]
    table.resign()  # stepping down does not strike out the other
    assert table.writers == [first]
    before = table.writers
    table.claim(4, own_identity())
    again = FencedWriters(table, before, own_identity())
    assert not again.are_gone()
    end(children[0])
    assert again.are_gone()
    assert table.writers == [own_identity()]


def test_who_claims_again_does_not_wait_for_itself(table: SlotTable) -> None:
    table.claim(1, own_identity())
    assert FencedWriters(table, table.writers, own_identity()).are_gone()
