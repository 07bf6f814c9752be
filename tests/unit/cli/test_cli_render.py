"""What people read: status, operations, events, logs."""

import io
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from supervisor.cli.logs import newest_log
from supervisor.cli.outlet import Outlet
from supervisor.cli.render import describe_operation, event_line, status_view, when
from supervisor.cli.watching import LineObserver, TerminalObserver, ready_lines
from supervisor.errors import NotFoundError
from supervisor.observe.observer import NullObserver, RunObserver
from tests.unit.cli.fake_admin import OPERATION, STATUS


def shown(status: dict[str, object]) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=120, no_color=True).print(status_view(status))
    return buffer.getvalue()


def test_status_says_who_is_primary_and_whether_there_is_redundancy() -> None:
    text = shown(STATUS)
    assert "demo: supervisor pid 4242, gateway pid 50 ready" in text
    assert "chat: redundant, epoch 3, primary chat-b, standby chat-a" in text
    assert "cache cpu: pid 52 serving, weights 8.0 MiB, KV 80.0 MiB, 2 attached" in text
    row = next(line for line in text.splitlines() if line.startswith(" chat-a"))
    assert row.split() == ["chat-a", "standby", "standby", "healthy", "53", "1", "12.5s"]


@pytest.mark.parametrize(
    "status", [{}, {"groups": None}, {"groups": [{}]}, {"groups": [{"engines": [{}, 3]}]}]
)
def test_status_of_another_release_is_shown_as_far_as_it_goes(status: dict[str, object]) -> None:
    assert "supervisor pid -" in shown(status)


def test_an_engine_without_a_process_is_not_called_healthy() -> None:
    engine = {"name": "x", "role": "none", "state": "evicted", "verdict": "healthy", "pid": None}
    text = shown({"groups": [{"engines": [engine]}]})
    row = next(line for line in text.splitlines() if line.startswith(" x"))
    assert row.split() == ["x", "none", "evicted", "-", "-", "-", "-"]


def test_a_paused_supervisor_says_so() -> None:
    assert "nothing is started, stopped or promoted" in shown({**STATUS, "paused": True})


def test_what_waits_for_the_operator_is_said_with_the_verb_that_ends_it() -> None:
    group = {"name": "chat", "state": "blocked", "blocked": True, "blocked_for_s": 61.0,
             "unkillable": ["chat-a"]}  # fmt: skip
    supervisor = {"pid": 1, "degraded": {"disk": "No space left on device"}}
    text = shown({"supervisor": supervisor, "groups": [group]})
    assert "BLOCKED for 1m 1s: a hung primary is left alone until 'supervisor ack'" in text
    assert "chat-a cannot be killed: see 'supervisor fence chat-a'" in text
    assert "degraded, disk: No space left on device" in text


def test_an_operation_is_one_sentence_with_its_phases() -> None:
    assert describe_operation(OPERATION) == (
        "switchover chat-b: done, chat-a handed over, epoch 4 "
        "(41.0 ms: fence 1.0, promote 30.0, route 10.0)"
    )


def test_a_failed_operation_says_why() -> None:
    failed = {"kind": "evict", "engine": "b", "state": "failed", "error": "it would not die"}
    assert describe_operation(failed) == "evict b: failed, it would not die"


def test_an_event_is_one_line_whatever_it_holds() -> None:
    event = {"seq": 7, "time": 0, "kind": "promoted", "group": "chat", "text": "a\nb"}
    line = event_line({**event, "fields": {"epoch": 4, "ms": 1.5}})
    assert line.endswith("#7  promoted  chat  a b  epoch=4  ms=1.5")
    assert "\n" not in line


@pytest.mark.parametrize("moment", [None, "soon", float("inf"), 1e30])
def test_a_time_that_is_none(moment: object) -> None:
    assert when(moment) == "-"


def test_a_time_in_either_form_is_the_same_moment() -> None:
    assert when(1_800_000_000) == when("2027-01-15T08:00:00+00:00")


# --- logs --------------------------------------------------------------------------------------


def test_the_log_of_a_process_by_name(tmp_path: Path) -> None:
    for name in ("chat-a.log", "chat-a-b.log", "gateway-0.log"):
        (tmp_path / name).write_text("")
    assert newest_log(tmp_path, "chat-a").name == "chat-a.log"
    assert newest_log(tmp_path, "gateway-0").name == "gateway-0.log"


def test_a_process_without_a_log_is_told_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "chat-a.log").write_text("")
    with pytest.raises(NotFoundError, match="there are logs of: chat-a"):
        newest_log(tmp_path, "chat-x")


# --- observers ---------------------------------------------------------------------------------


def test_ready_lines_name_the_address_that_is_in_use() -> None:
    status = {**STATUS, "addresses": {"gateway": "127.0.0.1:41234"}}
    assert ready_lines(status, "127.0.0.1:0", "127.0.0.1:9400") == [
        "ready: chat: primary chat-b, standby chat-a",
        "clients: http://127.0.0.1:41234/v1",
        "admin: http://127.0.0.1:9400",
    ]


def test_loading_prints_few_lines_and_always_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with LineObserver(gateway="g", admin="a") as observer:
        watched: RunObserver = observer
        for done in range(0, 101, 10):
            watched.loading("chat", done << 20, 100 << 20, 5 << 20, (100 - done) / 5)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "loading chat: 0 B of 100.0 MiB (0 %), 5.0 MiB/s, 20 s left",
        "loading chat: 100.0 MiB of 100.0 MiB (100 %), 5.0 MiB/s, 0 s left",
    ]


def test_a_terminal_sees_a_bar_then_events_then_who_serves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TerminalObserver(gateway="127.0.0.1:8000", admin="127.0.0.1:9400") as observer:
        watched: RunObserver = observer
        watched.loading("chat", 50 << 20, 100 << 20, 5 << 20, 10.0)
        watched.event({"seq": 1, "time": 0, "kind": "zygote_ready", "text": "[it] is ready"})
        watched.loading("chat", 100 << 20, 100 << 20, 5 << 20, 0.0)
        watched.ready(STATUS)
    out = capsys.readouterr().out
    for text in ("loading chat", "100.0/100.0 MiB", "zygote_ready  [it] is ready"):
        assert text in out
    assert out.endswith("clients: http://127.0.0.1:8000/v1\nadmin: http://127.0.0.1:9400\n")


def test_nobody_watching_is_fine() -> None:
    watched: RunObserver = NullObserver()
    watched.loading("chat", 1, 2, 0.0, None)
    watched.event({})
    watched.ready({})


def test_an_output_that_nobody_reads_never_blocks_the_caller() -> None:
    stuck = threading.Event()
    outlet = Outlet(queue_jobs=2)
    started = time.monotonic()
    for _ in range(10):
        outlet.put(lambda: _wait(stuck))
    outlet.close(timeout_s=0.05)
    assert time.monotonic() - started < 5
    assert outlet.dropped >= 7
    stuck.set()


def test_an_output_whose_reader_has_gone_does_not_end_the_outlet() -> None:
    done = threading.Event()
    outlet = Outlet()
    outlet.put(lambda: _raise(BrokenPipeError()))
    outlet.put(done.set)
    assert done.wait(5)
    outlet.close()


def _wait(event: threading.Event) -> None:
    event.wait(30)


def _raise(error: Exception) -> None:
    raise error
