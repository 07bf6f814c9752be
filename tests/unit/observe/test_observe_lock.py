"""One supervisor per state directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.errors import AlreadyRunningError, ConfigurationError
from supervisor.observe.lock import StateLock, read_holder

HOLDER = """
import sys
from pathlib import Path
from supervisor.observe.lock import StateLock
with StateLock(Path(sys.argv[1]), "first"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_second_supervisor_is_told_who_the_first_is(tmp_path: Path) -> None:
    state_dir = tmp_path / "deep" / "state"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunningError, match=rf"supervisor 'first', pid {holder.pid}"):
            StateLock(state_dir, "second").acquire()
        found = read_holder(state_dir)
        assert found is not None
        assert (found.pid, found.name) == (holder.pid, "first")
        holder.kill()
    assert read_holder(state_dir) is None
    with StateLock(state_dir, "second"):
        found = read_holder(state_dir)
        assert found is not None
        assert found.pid == os.getpid()


def test_the_directory_becomes_private(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o755)
    with StateLock(state_dir):
        assert state_dir.stat().st_mode & 0o777 == 0o700
        assert (state_dir / "lock").stat().st_mode & 0o777 == 0o600


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = StateLock(tmp_path).acquire()
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        close_fds=False,
    ) as child:
        # Popen may return before the kernel has closed what is close-on-exec.
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        lock.release()
        with StateLock(tmp_path):
            assert child.poll() is None


def test_a_state_dir_that_is_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        StateLock(tmp_path / "state").acquire()


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = StateLock(tmp_path).acquire()
    assert lock.acquire() is lock
    lock.release()
    lock.release()
