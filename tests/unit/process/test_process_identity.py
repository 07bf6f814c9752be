"""Identity and marker, without signalling anybody."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.process.errors import ProcessGoneError
from supervisor.process.identity import (
    MARKER_WIDTH,
    BootId,
    Marker,
    ProcessId,
    is_same,
    open_pidfd,
    own_boot_id,
    parse_marker,
    read_process_id,
    signal_process,
    state_id_of,
)

NOBODY = ProcessId(2**22 + 1, 1, own_boot_id())


def test_this_process_is_itself() -> None:
    me = read_process_id(os.getpid())

    assert me.pid == os.getpid()
    assert is_same(me)
    assert str(me) == f"pid {me.pid} (started {me.start_ticks})"


def test_another_start_time_or_boot_is_another_process() -> None:
    me = read_process_id(os.getpid())

    assert not is_same(replace(me, start_ticks=me.start_ticks + 1))
    assert not is_same(replace(me, boot_id=BootId("another")))


def test_a_signal_is_refused_when_the_pid_has_a_new_owner() -> None:
    """SIGKILL, to this very pid: the test survives only if it is refused."""
    me = read_process_id(os.getpid())

    assert not signal_process(replace(me, start_ticks=me.start_ticks - 1), signal.SIGKILL)
    assert not signal_process(replace(me, boot_id=BootId("another")), signal.SIGKILL)


def test_a_refused_pidfd_is_closed_again() -> None:
    me = read_process_id(os.getpid())
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(10):
        with pytest.raises(ProcessGoneError):
            open_pidfd(replace(me, start_ticks=1))

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_never_was_is_gone() -> None:
    assert not is_same(NOBODY)
    assert not signal_process(NOBODY, signal.SIGKILL)
    with pytest.raises(ProcessGoneError):
        read_process_id(NOBODY.pid)
    with pytest.raises(ProcessGoneError):
        open_pidfd(NOBODY)


def test_the_marker_has_a_fixed_width_and_survives_the_way_there_and_back() -> None:
    marker = Marker("0badcafe", "chat-a-3f9c21ab")

    assert len(marker.value()) == MARKER_WIDTH
    environ = f"PATH=/bin\0UNDERSTUDY_INSTANCE={marker.value()}\0HOME=/\0".encode()
    assert parse_marker(environ) == marker


@pytest.mark.parametrize(
    "environ",
    [
        b"",
        b"PATH=/bin\0",
        b"NOT_UNDERSTUDY_INSTANCE=a:b\0",
        b"UNDERSTUDY_INSTANCE=\0",
        b"UNDERSTUDY_INSTANCE=nocolon\0",
        b"UNDERSTUDY_INSTANCE=:x\0",
        b"UNDERSTUDY_INSTANCE=x:   \0",
    ],
)
def test_what_is_not_a_marker_is_none(environ: bytes) -> None:
    assert parse_marker(environ) is None


def test_the_state_id_is_that_of_the_resolved_directory(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)

    assert state_id_of(link) == state_id_of(tmp_path)
    assert state_id_of(tmp_path / "other") != state_id_of(tmp_path)
    assert len(state_id_of(tmp_path)) == 8
    assert int(state_id_of(tmp_path), 16) >= 0
