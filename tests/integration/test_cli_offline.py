"""The command line as a person meets it: real processes, exit codes, one line per error.

No supervisor is started here; where one must answer, a stand-in serves its socket.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.process.identity import read_process_id, state_id_of
from supervisor.topology.machine import is_alive
from tests.harness.lines import read_line
from tests.unit.cli.fake_admin import OPERATION, FakeAdmin, fake_admin
from tests.unit.topology.site import Site, build_site

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """
import os, sys, threading
from pathlib import Path
from tests.unit.cli.fake_admin import STATUS, Answer, fake_admin
stops = sys.argv[2] == "stops"
with fake_admin(Path(sys.argv[1])) as admin:
    admin.on("GET /v1/status", {**STATUS, "supervisor": {"pid": os.getpid()}})
    admin.on("POST /v1/stop", {"operation": {"kind": "stop", "state": "done"}})
    print("ready", flush=True)
    while not (stops and any(asked[0] == "POST /v1/stop" for asked in admin.asked)):
        threading.Event().wait(0.01)
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return build_site(tmp_path)


@pytest.fixture
def admin(site: Site) -> Iterator[FakeAdmin]:
    """A stand-in for the supervisor of the site's topology."""
    site.write_correct({"127.0.0.1:9400": "127.0.0.1:0", "127.0.0.1:8000": "127.0.0.1:0"})
    site.state_dir.mkdir(mode=0o700)
    with fake_admin(site.state_dir / "admin.sock") as server:
        yield server


def environment(site: Site) -> dict[str, str]:
    return {**os.environ, "UNDERSTUDY_REGISTRY": str(site.folder / "registry"), "COLUMNS": "120"}


def supervisor(site: Site, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", *map(str, arguments)],
        cwd=ROOT,
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


# --- version, help, usage ----------------------------------------------------------------------


def test_version_is_quick_and_brings_neither_torch_nor_the_control_plane(site: Site) -> None:
    assert supervisor(site, "version").stdout == "understudy 0.1.0\n"
    code = textwrap.dedent(
        """
        import sys
        from supervisor.cli.app import run_command_line
        assert run_command_line(["version"]) == 0
        heavy = {"torch", "aiohttp", "uvloop", "asyncio"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    best_s = min(_duration_of_version(site) for _ in range(3))
    assert best_s < 1.0, "0.15 s where it was written; this bound holds on a busy machine"


def _duration_of_version(site: Site) -> float:
    started = time.monotonic()
    supervisor(site, "version")
    return time.monotonic() - started


def test_no_arguments_print_the_help(site: Site) -> None:
    done = supervisor(site)
    assert done.returncode == 0
    assert "Exit codes: 0 ok, 1 failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chekc"], "No such command 'chekc'. Did you mean 'check'?"),
        (["check"], "Missing argument 'FILE'"),
        (["status", "--wach"], "No such option: --wach"),
        (["evict"], "Missing argument 'NAME'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    site: Site, arguments: list[str], text: str
) -> None:
    done = supervisor(site, *arguments)
    assert done.returncode == 2
    assert error_of(done).startswith("error: usage: ")
    assert text.split("'", maxsplit=1)[0].rstrip(":. ") in error_of(done)


# --- check and plan ----------------------------------------------------------------------------


def test_check_of_a_correct_file(site: Site) -> None:
    path = site.write_correct({"127.0.0.1:9400": "127.0.0.1:0", "127.0.0.1:8000": "127.0.0.1:0"})
    done = supervisor(site, "check", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}: ok\n", "")


def test_check_prints_every_error_with_its_line_and_exits_with_2(site: Site) -> None:
    path = site.write_correct({"slots: 4": "slot: 4", "role: standby": "role: stanby"})
    done = supervisor(site, "check", path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == f"{path}:10: groups[0].kv.slot: unknown key; write slots"
    assert lines[1].startswith(f"{path}:13: groups[0].engines[1].role: 'stanby' is not one of")
    assert lines[-1] == f"error: configuration: {path} has 2 errors"


def test_check_for_programs(site: Site) -> None:
    done = supervisor(site, "check", site.write_correct({"slots: 4": "slot: 4"}), "-o", "json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"]) == (2, False)
    assert answer["findings"][0]["line"] == 10
    assert answer["findings"][0]["severity"] == "error"


def test_check_of_a_missing_file(site: Site) -> None:
    done = supervisor(site, "check", "/no/such/file.yaml")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("/no/such/file.yaml: cannot be read")


def test_plan_names_processes_sockets_and_memory_and_touches_nothing(site: Site) -> None:
    path = site.write_correct()
    before = sorted(site.folder.rglob("*"))
    plan = json.loads(supervisor(site, "plan", path, "-o", "json").stdout)
    assert [process["name"] for process in plan["processes"]] == [
        "demo",
        "gateway-0",
        "cache-chat",
        "loader-chat",
        "zygote-chat",
        "chat-a",
        "chat-b",
        "chat-batch",
    ]
    memory = plan["groups"][0]["memory"]
    # 16 float32 of weights, aligned to 256; 2 x 3 layers x 1 head x 4 x 4 bytes for each token
    assert (memory["weights_bytes"], memory["kv_bytes"]) == (256, 96 * 4 * 256)
    assert memory["private_kv_bytes"] == {"chat-batch": 96 * 2 * 256}
    text = supervisor(site, "plan", path).stdout
    assert f"{site.state_dir}/run/chat-a-<8 hex>.sock" in text
    assert sorted(site.folder.rglob("*")) == before


def test_plan_of_a_wrong_file_says_what_is_wrong(site: Site) -> None:
    done = supervisor(site, "plan", site.write_correct({"slots: 4": "slot: 4"}))
    assert done.returncode == 2
    assert "10: groups[0].kv.slot: unknown key" in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[-1].startswith("error: topology: ")


def test_run_refuses_a_wrong_file_before_anything_is_made(site: Site) -> None:
    done = supervisor(site, "run", site.write_correct({"slots: 4": "slot: 4"}))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("has 1 error") or "one error" in done.stderr
    assert not site.state_dir.exists()
    assert not (site.folder / "registry").exists()


# --- verbs without a supervisor ----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["promote"], ["stop"], ["events"], ["history"], ["pause"], ["evict", "x"]],
)
def test_without_a_supervisor_verbs_exit_with_3(site: Site, arguments: list[str]) -> None:
    done = supervisor(site, *arguments)
    assert done.returncode == 3
    assert error_of(done) == (
        "error: not_reachable: no supervisor of this user is running; "
        "start one with 'supervisor run FILE', or name its topology with -f FILE"
    )


def test_a_named_supervisor_that_does_not_run_exits_with_3(site: Site) -> None:
    done = supervisor(site, "status", "-f", site.write_correct())
    assert done.returncode == 3
    socket = site.state_dir / "admin.sock"
    assert error_of(done).startswith(f"error: not_reachable: no supervisor answers at {socket}")


def test_a_named_file_that_is_wrong_exits_with_2(site: Site) -> None:
    done = supervisor(site, "status", "-f", site.write_correct({"slots: 4": "slots: 0"}))
    assert done.returncode == 2
    assert "slots: 0 is too small" in done.stderr


# --- verbs with a stand-in ---------------------------------------------------------------------


def test_status_for_people_and_for_programs(site: Site, admin: FakeAdmin) -> None:
    text = supervisor(site, "status", "-f", site.file).stdout
    assert "primary chat-b, standby chat-a" in text
    answer = json.loads(supervisor(site, "status", "-f", site.file, "-o", "json").stdout)
    assert answer["groups"][0]["epoch"] == 3


def test_promote_prints_what_was_done(site: Site, admin: FakeAdmin) -> None:
    admin.on("POST /v1/promote", {"operation": OPERATION})
    done = supervisor(site, "promote", "--to", "chat-b", "-f", site.file)
    assert done.returncode == 0
    assert done.stdout.startswith("switchover chat-b: done, chat-a handed over, epoch 4 (41.0 ms")
    assert admin.asked[-1][2] == {"to": "chat-b"}


def test_a_dry_run_says_so_to_the_supervisor(site: Site, admin: FakeAdmin) -> None:
    admin.on("POST /v1/promote?dry_run=true", {"operation": {**OPERATION, "state": "planned"}})
    done = supervisor(site, "promote", "--dry-run", "-f", site.file)
    assert "switchover chat-b: planned" in done.stdout


def test_a_failed_operation_exits_with_1(site: Site, admin: FakeAdmin) -> None:
    failed = {**OPERATION, "kind": "evict", "state": "failed", "error": "it would not die"}
    admin.on("POST /v1/evict/chat-batch", {"operation": failed})
    done = supervisor(site, "evict", "chat-batch", "--hold", "-f", site.file)
    assert (done.returncode, "it would not die" in done.stdout) == (1, True)
    assert admin.asked[-1][2] == {"hold": True}


def test_a_refused_precondition_exits_with_4(site: Site, admin: FakeAdmin) -> None:
    problem = {"status": 412, "code": "precondition", "detail": "no standby", "hint": "wait"}
    admin.on("POST /v1/promote", problem, status=412)
    done = supervisor(site, "promote", "-f", site.file)
    assert (done.returncode, error_of(done)) == (4, "error: precondition: no standby; wait")


def test_failover_asks_for_force(site: Site, admin: FakeAdmin) -> None:
    done = supervisor(site, "failover", "-f", site.file)
    assert done.returncode == 4
    assert "write --force" in error_of(done)
    assert admin.asked == []


def test_history_and_events(site: Site, admin: FakeAdmin) -> None:
    admin.on("GET /v1/history", {"history": [OPERATION]})
    event = {"seq": 1, "time": 1.0, "kind": "promoted", "engine": "chat-b", "text": "x"}
    admin.on("GET /v1/events?since=0&limit=2000", {"events": [event]})
    assert "switchover chat-b: done" in supervisor(site, "history", "-f", site.file).stdout
    assert "#1  promoted  chat-b  x" in supervisor(site, "events", "-f", site.file).stdout
    line = supervisor(site, "events", "-f", site.file, "-o", "json").stdout
    assert json.loads(line) == event


def test_a_reader_that_leaves_is_no_error_of_ours(site: Site, admin: FakeAdmin) -> None:
    admin.on("GET /v1/history", {"history": [OPERATION] * 5000})
    with subprocess.Popen(
        [sys.executable, "-m", "supervisor", "history", "-f", str(site.file)],
        cwd=ROOT,
        env=environment(site),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 1


def test_logs_read_the_files_of_the_state_directory(site: Site) -> None:
    site.write_correct()
    (site.state_dir / "logs").mkdir(parents=True)
    (site.state_dir / "logs" / "chat-a.log").write_text("one\ntwo\nthree\n")
    done = supervisor(site, "logs", "chat-a", "-n", "2", "--file", site.file)
    assert done.stdout == "two\nthree\n"
    missing = supervisor(site, "logs", "chat-x", "--file", site.file)
    assert missing.returncode == 4
    assert "there are logs of: chat-a" in error_of(missing)


def test_logs_follow_what_is_added(site: Site) -> None:
    site.write_correct()
    (site.state_dir / "logs").mkdir(parents=True)
    path = site.state_dir / "logs" / "chat-a.log"
    path.write_text("one\n")
    command = [sys.executable, "-m", "supervisor", "logs", "chat-a", "-f", "--file", str(site.file)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(site), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            assert read_line(process.stdout, timeout_s=20) == "one"
            with path.open("a") as stream:
                stream.write("two\n")
            assert read_line(process.stdout, timeout_s=20) == "two"
            path.write_text("new\n")  # cut by log rotation, and shorter than before
            assert read_line(process.stdout, timeout_s=20) == "new"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


# --- finding the supervisor, and stopping it ---------------------------------------------------


@pytest.fixture
def stand_in(site: Site) -> Iterator[subprocess.Popen[str]]:
    """A process that answers as a supervisor and ends when it is told to stop."""
    yield from _stand_in(site, "stops")


@pytest.fixture
def stubborn(site: Site) -> Iterator[subprocess.Popen[str]]:
    """One that says yes and goes on."""
    yield from _stand_in(site, "stays")


def _stand_in(site: Site, mode: str) -> Iterator[subprocess.Popen[str]]:
    path = site.write_correct()
    site.state_dir.mkdir(mode=0o700)
    with subprocess.Popen(
        [sys.executable, "-c", STAND_IN, str(site.state_dir / "admin.sock"), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        folder = site.folder / "registry"
        folder.mkdir(mode=0o700)
        entry = {
            "name": "demo",
            "pid": process.pid,
            "start_ticks": read_process_id(process.pid).start_ticks,
            "file": str(path),
            "state_dir": str(site.state_dir),
            "socket": str(site.state_dir / "admin.sock"),
        }
        (folder / "demo.json").write_text(json.dumps(entry))
        yield process
        process.kill()


def test_the_only_running_supervisor_needs_no_name(
    site: Site, stand_in: subprocess.Popen[str]
) -> None:
    assert f"supervisor pid {stand_in.pid}" in supervisor(site, "status").stdout


def test_with_two_running_supervisors_one_must_be_named(
    site: Site, stand_in: subprocess.Popen[str]
) -> None:
    folder = site.folder / "registry"
    other = {**json.loads((folder / "demo.json").read_text()), "name": "other"}
    other |= {"pid": os.getpid(), "start_ticks": read_process_id(os.getpid()).start_ticks}
    (folder / "other.json").write_text(json.dumps({**other, "file": "/other.yaml"}))
    done = supervisor(site, "status")
    assert done.returncode == 4
    assert "2 supervisors are running: demo" in error_of(done)
    assert supervisor(site, "status", "-f", site.file).returncode == 0


def test_stop_waits_until_the_process_is_gone(site: Site, stand_in: subprocess.Popen[str]) -> None:
    done = supervisor(site, "stop", site.file)
    assert done.stdout.startswith("demo: stopped in ")
    assert not is_alive(stand_in.pid)


def test_stop_says_what_remains_when_time_is_up(
    site: Site, stubborn: subprocess.Popen[str]
) -> None:
    done = supervisor(site, "stop", "--timeout", "0.5")
    assert done.returncode == 1
    text = f"error: still_running: the supervisor (pid {stubborn.pid}) still runs when time is up"
    assert error_of(done).startswith(text)


def test_a_crashed_supervisor_is_named_with_the_way_back(
    site: Site, stand_in: subprocess.Popen[str]
) -> None:
    stand_in.kill()
    stand_in.wait(10)
    done = supervisor(site, "status")
    assert done.returncode == 3
    assert "the supervisor 'demo' ended without being stopped" in error_of(done)
    assert f"supervisor run {site.file}" in error_of(done)


def test_stop_of_a_crashed_supervisor_names_the_processes_it_left(site: Site) -> None:
    site.write_correct()
    site.state_dir.mkdir()
    marker = f"{state_id_of(site.state_dir)}:chat-a-0badcafe"
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        env={"UNDERSTUDY_INSTANCE": marker},
        stdin=subprocess.PIPE,
    ) as engine:
        done = supervisor(site, "stop", "-f", site.file)
        engine.kill()
    assert done.returncode == 3
    assert f"pid {engine.pid} (chat-a-0badcafe) remain" in error_of(done)
