"""Parsing of /proc files, with the names that break naive parsers."""

import os
import threading

import pytest

from supervisor.process.errors import ProcParseError
from supervisor.process.stat import (
    PF_DUMPCORE,
    PF_EXITING,
    PF_POSTCOREDUMP,
    SchedStat,
    StatHead,
    is_dead,
    parse_schedstat,
    parse_stat,
    parse_stat_head,
    read_sched,
    read_stat,
    read_threads,
    sched_delta,
)

TAIL = (
    b"S 41 4182 4180 0 -1 4194560 97 0 0 0 5 6 0 0 20 0 12 0 91833021 3133440 384 "
    b"18446744073709551615 94028542369792 94028542389673 140734419650256 0 0 0 0 0 0 0 0 0 17 1 "
    b"0 0 0 0 0 94028542405680 94028542407296 94028721836032 140734419651094 140734419651114 "
    b"140734419651114 140734419652587 0\n"
)

NAMES = (
    b"python",
    b"a b c",
    b"evil) R 1 1 1 0 -1 4 0",
    b"))) ((",
    b"two\nlines",
    b"",
    b"VLLM::EngineCore",
)


@pytest.mark.parametrize("name", NAMES)
def test_stat_fields_are_counted_behind_the_last_parenthesis(name: bytes) -> None:
    stat = parse_stat(b"4182 (" + name + b") " + TAIL)

    assert (stat.pid, stat.comm, stat.state) == (4182, name.decode(), "S")
    assert (stat.ppid, stat.session, stat.flags) == (41, 4180, 4194560)
    assert (stat.num_threads, stat.start_ticks) == (12, 91833021)


@pytest.mark.parametrize("name", NAMES)
def test_the_cheap_parser_agrees_with_the_full_one(name: bytes) -> None:
    assert parse_stat_head(b"4182 (" + name + b") " + TAIL) == StatHead("S", 4194560)


def test_a_name_that_is_not_utf8_is_shown_escaped() -> None:
    assert parse_stat(b"1 (\xff\xfe) " + TAIL).comm == "\\xff\\xfe"


@pytest.mark.parametrize("data", [b"", b"1", b"1 (x", b"1 (x) S 1 2", b"1 (x) S a b c d e f g"])
def test_a_line_that_is_cut_off_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(ProcParseError):
        parse_stat(data)
    with pytest.raises(ProcParseError):
        parse_stat_head(data)


@pytest.mark.parametrize("flag", [PF_EXITING, PF_POSTCOREDUMP, PF_DUMPCORE])
def test_each_exit_flag_alone_means_dead(flag: int) -> None:
    assert is_dead(0x400040 | flag)


def test_the_usual_flags_do_not_mean_dead() -> None:
    assert not is_dead(0x400140)


def test_schedstat_gives_running_and_waiting_time() -> None:
    assert parse_schedstat(b"123 456 7\n") == SchedStat(on_cpu_ns=123, run_delay_ns=456)
    with pytest.raises(ProcParseError):
        parse_schedstat(b"")


def test_sched_delta_does_not_go_back_when_a_thread_ends() -> None:
    before = {1: SchedStat(100, 10), 2: SchedStat(900, 90)}
    after = {1: SchedStat(150, 15), 3: SchedStat(7, 1)}

    delta = sched_delta(before, after)

    assert (delta.on_cpu_ns, delta.run_delay_ns) == (57, 6)


def test_reading_this_process_shows_all_of_its_threads() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        threads = read_threads(os.getpid())
        assert {os.getpid(), thread.native_id} <= threads.keys()
        assert not any(is_dead(stat.flags) for stat in threads.values())
        assert read_sched(os.getpid()).keys() >= {os.getpid(), thread.native_id}
    finally:
        done.set()
        thread.join()


def test_nothing_is_read_of_a_process_that_does_not_exist() -> None:
    nobody = 2**22 + 1  # above the largest pid_max

    assert read_stat(nobody) is None
    assert read_threads(nobody) == {}
    assert read_sched(nobody) == {}
