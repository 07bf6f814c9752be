"""The journal: old or new state after a crash, and nothing is ever written over."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.observe.journal import Journal, JournalState, ProcessRecord

STATE = JournalState(
    boot_id="b",
    name="demo",
    epochs={"chat": 7},
    processes=[ProcessRecord("engine", "chat-a", "chat", "chat-a-00000001", 12, 34)],
    canaries={"chat": [5, 6]},
    paused=True,
    roles={"chat-a": "primary"},
)


@pytest.fixture
def make_journal(tmp_path: Path) -> Iterator[Callable[[], Journal]]:
    journals: list[Journal] = []

    def make() -> Journal:
        journals.append(Journal(tmp_path, retry_s=0.02))
        return journals[-1]

    yield make
    for journal in journals:
        journal.close()


def wait_for(condition: Callable[[], object], *, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def test_what_was_saved_is_loaded(tmp_path: Path, make_journal: Callable[[], Journal]) -> None:
    journal = make_journal()
    assert journal.load() == JournalState()
    assert not journal.saved
    journal.save(STATE)
    assert journal.flush(timeout_s=5)

    assert journal.saved == STATE
    assert make_journal().load() == STATE
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


def test_the_newest_of_many_states_is_on_disk(make_journal: Callable[[], Journal]) -> None:
    journal = make_journal()
    for epoch in range(500):
        journal.save(JournalState(epochs={"chat": epoch}))
    assert journal.flush(timeout_s=10)
    assert make_journal().load().epochs == {"chat": 499}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "corrupt"),
        (b'{"version":1,"epochs":{"chat', "corrupt"),
        (b'{"version":1,"epochs":{"chat":"x"}}', "corrupt"),
        (b"\x00" * 100, "corrupt"),
        (b"[" * 100_000, "corrupt"),
        (b'{"epochs":{}}', "corrupt"),
        (b'{"version":2,"news":true}', "future"),
    ],
)
def test_a_file_that_cannot_be_used_is_set_aside(
    tmp_path: Path, make_journal: Callable[[], Journal], content: bytes, why: str
) -> None:
    (tmp_path / "state.json").write_bytes(content)
    journal = make_journal()
    assert journal.load() == JournalState()
    assert f"state.json.{why}-1" in journal.note

    journal.save(STATE)
    assert journal.flush(timeout_s=5)
    assert (tmp_path / f"state.json.{why}-1").read_bytes() == content


def test_a_failing_disk_is_visible_and_the_newest_state_follows_later(
    tmp_path: Path, make_journal: Callable[[], Journal]
) -> None:
    blocker = tmp_path / ".state.json.tmp"
    blocker.mkdir()
    journal = make_journal()
    journal.save(JournalState(epochs={"chat": 1}))
    assert not journal.flush(timeout_s=5)
    assert journal.degraded
    journal.save(STATE)

    blocker.rmdir()
    wait_for(lambda: not journal.degraded)
    assert make_journal().load() == STATE


def test_a_failing_sync_leaves_the_old_state(
    make_journal: Callable[[], Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = make_journal()
    journal.save(STATE)
    assert journal.flush(timeout_s=5)

    def broken(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        journal.save(JournalState(name="next"))
        assert not journal.flush(timeout_s=5)
        assert "Input/output error" in journal.degraded
        assert journal.saved == STATE
        assert Journal(journal.path.parent).load() == STATE
    wait_for(lambda: not journal.degraded)
    assert make_journal().load().name == "next"


WRITER = """
import sys
from pathlib import Path
from supervisor.observe.events import EventLog
from supervisor.observe.journal import Journal, JournalState, ProcessRecord
journal, events = Journal(Path(sys.argv[1])), EventLog(Path(sys.argv[1]))
start = journal.load().epochs.get("chat", 0)
records = [ProcessRecord("engine", "a" * 40, "chat", f"a-{n:08x}", n, n) for n in range(200)]
print(start, journal.note, flush=True)
for epoch in range(start + 1, start + 100_000):
    journal.save(JournalState(epochs={"chat": epoch}, processes=records))
    events.append("saved", "a state was saved", epoch=epoch)
    journal.flush(timeout_s=5)
"""


def test_killed_while_writing_50_times_the_state_always_loads(tmp_path: Path) -> None:
    last = 0
    for round_number in range(50):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            start, _, note = writer.stdout.readline().strip().partition(" ")
            assert note == ""
            assert int(start) >= last, "an epoch went back"
            last = int(start)
            time.sleep(0.002 * (round_number % 9))  # another moment of the write each time
            writer.send_signal(signal.SIGKILL)
    journal = Journal(tmp_path)
    assert journal.load().epochs["chat"] >= last > 0
    assert journal.note == ""
    numbers = [json.loads(line)["seq"] for line in complete_lines(tmp_path / "events.jsonl")]
    assert numbers == list(range(1, len(numbers) + 1))


def complete_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
from supervisor.observe.events import EventLog
from supervisor.observe.journal import Journal, JournalState
state_dir = Path(sys.argv[1])
if sys.argv[2] == "rlimit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
journal, events = Journal(state_dir, retry_s=0.02), EventLog(state_dir, retry_s=0.02)
journal.save(JournalState(name="small"))
assert journal.flush(timeout_s=5)
for number in range(2000):
    events.append("filler", "x" * 100)
assert not events.flush(timeout_s=5)
assert events.degraded, "a full disk must be visible"
journal.save(JournalState(roles={str(n): "standby" for n in range(20_000)}))
assert not journal.flush(timeout_s=5)
assert journal.degraded
assert Journal(state_dir).load().name == "small", "the old state must survive a full disk"
print("full", flush=True)
sys.stdin.readline()
if sys.argv[2] == "rlimit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
deadline = time.monotonic() + 10
while events.degraded or journal.degraded:
    assert time.monotonic() < deadline
    time.sleep(0.01)
assert events.close() and journal.close()
"""


def fill(state_dir: Path, kind: str, *, make_room: Callable[[], None]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FULL_DISK, str(state_dir), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "full\n"
        make_room()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(30) == 0
    assert len(Journal(state_dir).load().roles) == 20_000
    events = [json.loads(line) for line in complete_lines(state_dir / "events.jsonl")]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert sum(event["kind"] == "filler" for event in events) == 2000


def test_a_full_disk_costs_no_event_and_no_state(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < 1 << 20:
        pytest.skip("this process itself runs under a file size limit")
    fill(tmp_path, "rlimit", make_room=lambda: None)


def test_a_full_tmpfs_costs_no_event_and_no_state(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o"]
    try:
        subprocess.run(
            [*mount, "size=64k", "tmpfs", str(tmp_path)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small tmpfs here: {error}")
    try:
        remount = [*mount, "remount,size=16m", "tmpfs", str(tmp_path)]
        fill(tmp_path, "tmpfs", make_room=lambda: _run(remount))
    finally:
        _run(["umount", "-l", str(tmp_path)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
