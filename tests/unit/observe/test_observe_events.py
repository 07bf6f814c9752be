"""The event log: order, numbering, repair, and what it does when the disk does not work."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.observe.events import MEMORY_EVENTS, EventLog


@pytest.fixture
def make_log(tmp_path: Path) -> Iterator[Callable[..., EventLog]]:
    logs: list[EventLog] = []

    def make(**options: Any) -> EventLog:
        log = EventLog(tmp_path, retry_s=0.02, **options)
        logs.append(log)
        return log

    yield make
    for log in logs:
        log.close()


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]


def wait_for(condition: Callable[[], object], *, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def test_events_are_numbered_without_gaps_and_private(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    log = make_log()
    for number in range(50):
        log.append(
            "engine_started", f"engine {number} started", group="chat", engine="a", pid=number
        )

    assert log.flush(timeout_s=5)
    assert [event["seq"] for event in lines(tmp_path)] == list(range(1, 51))
    assert lines(tmp_path)[7]["pid"] == 7
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_numbers_go_on_after_a_restart(tmp_path: Path, make_log: Callable[..., EventLog]) -> None:
    first = make_log()
    first.append("a", "one")
    first.append("b", "two")
    assert first.close()

    second = make_log()
    assert second.append("c", "three")["seq"] == 3
    assert [event["kind"] for event in second.since(0)] == ["a", "b", "c"]


def test_a_torn_last_line_is_cut_off_and_noted(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    first = make_log()
    first.append("a", "one")
    assert first.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":2,"time":1.0,"ki')

    log = make_log()
    assert log.flush(timeout_s=5)
    assert [(e["seq"], e["kind"]) for e in lines(tmp_path)] == [(1, "a"), (2, "events_repaired")]
    assert "23 bytes" in log.since(1)[0]["text"]


def test_a_file_of_rubbish_is_set_aside_whole(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"\x00" * 4096 + b"rubbish\n")

    log = make_log()
    assert log.flush(timeout_s=5)
    assert (tmp_path / "events.jsonl.corrupt-1").stat().st_size == 4104
    assert lines(tmp_path)[0]["kind"] == "events_repaired"


def test_a_bad_line_in_the_middle_is_skipped_and_kept(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    (tmp_path / "events.jsonl").write_bytes(
        b'{"seq":1,"kind":"a"}\nrubbish\n{"seq":2,"kind":"b"}\n'
    )

    log = make_log()
    assert [event["seq"] for event in log.since(0)] == [1, 2, 3]
    assert "1 lines" in log.since(2)[0]["text"]
    assert log.flush(timeout_s=5)
    assert b"rubbish" in (tmp_path / "events.jsonl").read_bytes()


def test_a_renamed_file_is_followed_by_a_new_one(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    log = make_log()
    log.append("a", "one")
    assert log.flush(timeout_s=5)
    (tmp_path / "events.jsonl").rename(tmp_path / "events.jsonl.1")

    log.append("b", "two")
    assert log.flush(timeout_s=5)
    assert [event["seq"] for event in lines(tmp_path)] == [2]


def test_a_disk_that_fails_is_visible_and_events_follow_later(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    (tmp_path / "events.jsonl").mkdir()  # as good as a read-only disk, also for root
    log = make_log()
    assert log.append("a", "one")["seq"] == 2  # after the note that the file cannot be opened
    wait_for(lambda: log.degraded)

    (tmp_path / "events.jsonl").rmdir()
    wait_for(lambda: not log.degraded)
    assert log.flush(timeout_s=5)
    kinds = [event["kind"] for event in lines(tmp_path)]
    assert [event["seq"] for event in lines(tmp_path)] == list(range(1, len(kinds) + 1))
    assert kinds == ["events_repaired", "a", "events_degraded", "events_recovered"]
    assert log.lost == 0


def test_events_that_were_given_up_leave_one_line_with_their_range(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    log = make_log(pending_events=10)
    wait_for(lambda: log.degraded)
    for number in range(100):
        log.append("a", f"event {number}")
    (tmp_path / "events.jsonl").rmdir()
    wait_for(lambda: not log.degraded)
    assert log.flush(timeout_s=5)

    first, *rest = lines(tmp_path)
    assert first["kind"] == "events_lost"
    assert first["from_seq"] == 1
    assert first["lost"] == first["seq"] == log.lost
    assert [event["seq"] for event in rest] == list(
        range(first["seq"] + 1, first["seq"] + 1 + len(rest))
    )


def test_text_of_users_and_odd_values_never_get_in(
    tmp_path: Path, make_log: Callable[..., EventLog]
) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no")

    log = make_log()
    event = log.append(
        "a", "x" * 5000, prompt="my secret", token_ids=[1, 2], bad=Unprintable(), nan=float("nan"),
        seq=7, path=tmp_path, lone="\udc80",
    )  # fmt: skip
    assert log.flush(timeout_s=5)
    stored = lines(tmp_path)[0]
    assert "secret" not in json.dumps(stored)
    assert stored["token_ids"] == "[withheld]"
    assert (event["seq"], stored["seq_"], stored["path"]) == (1, 7, str(tmp_path))
    assert stored["bad"].startswith("[not recordable")
    assert stored["nan"].startswith("[not recordable")
    assert len(stored["text"]) == 2000


async def test_a_subscriber_gets_old_and_new_events_in_order(
    make_log: Callable[..., EventLog],
) -> None:
    log = make_log()
    log.append("a", "one")
    log.append("b", "two")
    subscription = log.subscribe(after=1)
    log.append("c", "three")
    threading.Thread(target=log.append, args=("d", "from a thread")).start()

    kinds = [(await asyncio.wait_for(anext(subscription), 5))["kind"] for _ in range(3)]
    assert kinds == ["b", "c", "d"]


async def test_a_subscriber_from_now_on_gets_nothing_old_and_ends_with_the_log(
    make_log: Callable[..., EventLog],
) -> None:
    log = make_log()
    log.append("a", "one")
    subscription = log.subscribe()
    waiting = asyncio.ensure_future(anext(subscription))
    await asyncio.sleep(0)
    log.append("b", "two")
    assert (await asyncio.wait_for(waiting, 5))["kind"] == "b"

    log.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(subscription), 5)


async def test_a_slow_subscriber_loses_the_oldest_and_knows_how_many(
    make_log: Callable[..., EventLog],
) -> None:
    log = make_log()
    log.append("a", "first")
    subscription = log.subscribe()
    for number in range(MEMORY_EVENTS + 10):
        log.append("a", str(number))
    event = await anext(subscription)
    assert subscription.skipped == 10
    assert event["seq"] == 12


async def test_a_number_from_a_lost_future_starts_over(make_log: Callable[..., EventLog]) -> None:
    log = make_log()
    log.append("a", "one")
    assert (await anext(log.subscribe(after=900)))["seq"] == 1


def test_appending_takes_microseconds_while_the_disk_hangs(
    make_log: Callable[..., EventLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    release = threading.Event()
    monkeypatch.setattr(log._file, "append", lambda _events: release.wait(10))
    started = time.monotonic()
    for number in range(1000):
        log.append("a", str(number))
    assert time.monotonic() - started < 1.0
    release.set()
