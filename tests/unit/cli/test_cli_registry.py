"""The run registry: finds what runs, ignores what is stale, trusts nobody else's files."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.cli.registry import Entry, crashed, folders, register, running, unregister
from supervisor.errors import PreconditionError
from supervisor.process.identity import read_process_id


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"UNDERSTUDY_REGISTRY": str(tmp_path / "registry")}


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return Entry(
        name="demo",
        pid=os.getpid(),
        start_ticks=read_process_id(os.getpid()).start_ticks,
        file=str(tmp_path / "demo.yaml"),
        state_dir=str(tmp_path / "state"),
        socket=str(tmp_path / "state" / "admin.sock"),
    )


def test_what_is_registered_is_found_until_it_is_removed(
    environ: dict[str, str], entry: Entry
) -> None:
    assert running(environ) == []
    path = register(entry, environ)
    assert running(environ) == [entry]
    assert path.parent.stat().st_mode & 0o777 == 0o700
    unregister(path)
    unregister(path)
    assert running(environ) == []


def test_an_entry_of_a_dead_process_is_stale(environ: dict[str, str], entry: Entry) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        ticks = read_process_id(child.pid).start_ticks
        child.wait(10)
    dead = replace(entry, pid=child.pid, start_ticks=ticks)
    register(dead, environ)
    assert running(environ) == []
    assert crashed(environ) == [dead]
    register(entry, environ)
    assert running(environ) == [entry]
    assert crashed(environ) == [], "the next supervisor of the state directory takes its place"


def test_a_pid_with_another_start_time_is_another_process(
    environ: dict[str, str], entry: Entry
) -> None:
    register(replace(entry, start_ticks=entry.start_ticks + 1), environ)
    assert running(environ) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": 1, "pid": "x"}', "\xff"])
def test_a_file_that_is_no_entry_is_ignored(
    environ: dict[str, str], entry: Entry, content: str
) -> None:
    folder = register(entry, environ).parent
    (folder / "other.json").write_text(content, encoding="latin-1")
    assert running(environ) == [entry]


def test_a_folder_that_others_may_write_is_not_read(environ: dict[str, str], entry: Entry) -> None:
    folder = register(entry, environ).parent
    folder.chmod(0o777)
    assert running(environ) == []
    with pytest.raises(PreconditionError, match="not a folder of yours alone"):
        register(entry, environ)


def test_a_folder_that_cannot_be_made(tmp_path: Path, entry: Entry) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreconditionError, match="cannot be written"):
        register(entry, {"UNDERSTUDY_REGISTRY": str(tmp_path / "file" / "x")})


def test_the_login_session_comes_first_and_the_temporary_folder_is_always_read() -> None:
    found = folders({"XDG_RUNTIME_DIR": "/run/user/7"})
    shared = Path(f"/tmp/understudy-{os.geteuid()}")  # noqa: S108 -- the name that is documented
    assert found == [Path("/run/user/7/understudy"), shared]


def test_an_entry_is_plain_json(environ: dict[str, str], entry: Entry) -> None:
    value = json.loads(register(entry, environ).read_text())
    assert {"name", "pid", "start_ticks", "file", "state_dir", "socket"} <= set(value)
