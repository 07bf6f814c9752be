"""The report of a record: figures by fault, one page without anything from elsewhere."""

import json
import re
from pathlib import Path

import msgspec

from chaos.checkers import judge
from chaos.figures import latency_rows
from chaos.guarantees import next_token_ms, reigns, whole_after_s
from chaos.history import FILE_NAME, Command, Entry, History, Recorder
from chaos.report import write_report
from tests.unit.chaos.records import KILL_NS, MS, RecordParts, S, event, stream


def test_a_record_is_written_and_read_as_it_was(tmp_path: Path) -> None:
    parts = RecordParts()
    with Recorder(tmp_path / FILE_NAME) as recorder:
        entries: list[Entry] = [parts.meta, *parts.clocks, *parts.streams, *parts.events]
        for entry in entries:
            recorder.add(entry)
    history = History.load(tmp_path)
    assert history.meta == parts.meta
    assert history.all(type(parts.streams[0])) == parts.streams
    assert [e.seq for e in history.events("engine_state")] == [2, 3, 4, 5, 6, 7]


def test_the_next_token_is_the_one_behind_the_longest_gap() -> None:
    arrivals = [KILL_NS - 20 * MS, KILL_NS + 2 * MS, KILL_NS + 90 * MS, KILL_NS + 95 * MS]
    assert next_token_ms(stream("x", 4 * S, arrivals), KILL_NS) == 90.0


def test_a_stream_that_waits_for_a_slot_says_nothing_about_the_fault() -> None:
    arrivals = [KILL_NS + n * MS for n in (70, 80, 90, 95)]
    assert next_token_ms(stream("x", 4 * S, arrivals), KILL_NS) is None


def test_a_pause_that_the_next_fault_made_is_not_this_ones() -> None:
    arrivals = [KILL_NS + n * MS for n in (-20, 30, 60, 900)]
    assert next_token_ms(stream("x", 4 * S, arrivals), KILL_NS) == 900.0
    assert next_token_ms(stream("x", 4 * S, arrivals), KILL_NS, KILL_NS + 100 * MS) == 30.0


def test_a_stream_that_had_ended_felt_nothing() -> None:
    arrivals = [4 * S + n * MS for n in (1, 2, 3, 4)]
    assert next_token_ms(stream("x", 4 * S, arrivals), KILL_NS) is None


def test_wholeness_does_not_count_while_the_victim_is_still_spoken_of() -> None:
    history = RecordParts().history()
    fault = RecordParts().faults[0]
    assert whole_after_s(history, fault) == 2.0


def test_reigns_follow_the_engines_own_words() -> None:
    found = [(r.engine, r.epoch) for r in reigns(RecordParts().history())]
    assert found == [("chat-a", 1), ("chat-b", 2)]


def test_latencies_name_the_fault_and_the_phases() -> None:
    parts = RecordParts()
    parts.commands.append(Command("start_supervisor", 6 * S, 6 * S + MS, 200, "pid 9"))
    parts.events[8:] = [
        event(9, "cache_died", 8 * S),
        event(10, "memory_donated", 8 * S + 300 * MS),
        event(11, "stopping", 11 * S),
    ]
    rows = {row.what: row.spread for row in latency_rows(parts.history())}
    assert rows["SIGKILL primary -> next token"].worst == 50.0
    assert rows["SIGKILL primary -> whole again"].worst == 2000.0
    assert rows["failover dead: detect, at the supervisor"].worst == 6.0
    assert rows["cache daemon died -> memory served again"].worst == 300.0
    assert rows["start of a supervisor -> it serves"].worst == 1001.0


def test_the_page_stands_alone_and_says_what_was_wrong(tmp_path: Path) -> None:
    parts = RecordParts()
    parts.streams[0] = msgspec.structs.replace(parts.streams[0], error="<b>no engine</b>")
    history = parts.history()
    page = write_report(tmp_path, history, judge(history)).read_text("utf-8")
    assert not re.search(r"<(script|link|img)|https?://", page)
    assert "FAILED: every stream is complete and exact" in page
    assert "<b>no engine" not in page
    assert "SIGKILL primary" in page
    summary = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert summary["judged"]
    assert not summary["passed"]
    assert summary["latency_ms"][0]["spread"]["count"] == 1


def test_a_pause_that_begins_later_is_not_the_one_that_the_fault_tore() -> None:
    arrivals = [KILL_NS - 5 * MS, KILL_NS + 30 * MS, KILL_NS + 160 * MS, KILL_NS + 300 * MS]
    one = stream("x", 4 * S, arrivals)
    assert next_token_ms(one, KILL_NS) == 300.0, "a checker judges every pause near it"
    assert next_token_ms(one, KILL_NS, begins_within_ns=20 * MS) == 30.0
