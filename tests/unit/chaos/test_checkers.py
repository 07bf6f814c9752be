"""Each checker finds the damage that it is for, in a record that is otherwise good."""

from collections.abc import Callable

import msgspec
import pytest

from chaos.checkers import Outcome, Verdict, judge
from chaos.history import (
    Clock,
    Command,
    End,
    Expectation,
    Fault,
    Held,
    Leftover,
    Process,
    Role,
    Target,
)
from tests.unit.chaos.records import KILL_NS, MS, RecordParts, S, engine_state, event, stream

replace = msgspec.structs.replace


def first_broken(parts: RecordParts) -> Outcome:
    verdict = judge(parts.history())
    assert not verdict.is_passed
    return next(o for o in verdict.outcomes if o.state == "broken")


def test_a_good_record_passes_every_check() -> None:
    verdict = judge(RecordParts().history())
    assert [o for o in verdict.outcomes if o.state != "held"] == []
    assert verdict.is_passed


# ---------------------------------------------------------------- assumptions


def cut_off(parts: RecordParts) -> None:
    parts.others = []


def harness_failed(parts: RecordParts) -> None:
    parts.others = [End(12 * S, "OSError: no such file")]


def clock_jumped(parts: RecordParts) -> None:
    parts.clocks[6:] = [replace(c, unix_s=c.unix_s + 3) for c in parts.clocks[6:]]


def nobody_looked(parts: RecordParts) -> None:
    parts.clocks = [c for c in parts.clocks if not 3 * S < c.at_ns < 9 * S]


def texts_are_equal(parts: RecordParts) -> None:
    parts.references = [replace(r, text="") for r in parts.references]


def no_load(parts: RecordParts) -> None:
    parts.streams = parts.streams[1:]


def victim_lives(parts: RecordParts) -> None:
    parts.processes[0] = replace(parts.processes[0], dead_ns=0)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (cut_off, "the record is complete"),
        (harness_failed, "the record is complete"),
        (clock_jumped, "the clocks agree"),
        (nobody_looked, "the watchers kept looking"),
        (texts_are_equal, "the reference can show a difference"),
        (no_load, "every fault struck under load"),
        (victim_lives, "whoever was killed died"),
    ],
)
def test_a_record_that_proves_nothing_is_not_judged(
    damage: Callable[[RecordParts], None], name: str
) -> None:
    parts = RecordParts()
    damage(parts)
    broken = first_broken(parts)
    assert (broken.kind, broken.name) == ("assumption", name)
    verdict = judge(parts.history())
    assert not verdict.is_judged
    assert verdict.sentence().startswith("not judged")
    assert {o.state for o in verdict.outcomes if o.kind == "guarantee"} == {"skipped"}


# ----------------------------------------------------------------- guarantees


def epoch_has_two_primaries(parts: RecordParts) -> None:
    parts.roles[2] = replace(parts.roles[2], epoch=1)


def epoch_falls_in_the_status(parts: RecordParts) -> None:
    parts.samples[-1] = replace(parts.samples[-1], epoch=1)


def old_primary_lives_on(parts: RecordParts) -> None:
    parts.processes[0] = replace(parts.processes[0], last_alive_ns=KILL_NS + 40 * MS)


def promoted_before_the_fence(parts: RecordParts) -> None:
    parts.events[3] = engine_state(4, KILL_NS + 6 * MS, "chat-b", "standby", "promoting")
    parts.events[5] = engine_state(6, KILL_NS + 9 * MS, "chat-a", "primary", "fencing")


def token_lost(parts: RecordParts) -> None:
    parts.streams[0] = replace(parts.streams[0], texts=["a", "c", "d", ""])


def token_repeated(parts: RecordParts) -> None:
    parts.streams[0] = replace(parts.streams[0], texts=["a", "b", "b", "cd"])


def last_token_lost(parts: RecordParts) -> None:
    parts.streams[0] = replace(parts.streams[0], texts=["a", "b", "c", ""])


def silent_end(parts: RecordParts) -> None:
    parts.streams[0] = replace(parts.streams[0], has_end_mark=False)


def error_event(parts: RecordParts) -> None:
    parts.streams[0] = replace(parts.streams[0], error="no_engine")


def expectation_missed(parts: RecordParts) -> None:
    parts.expectations[0] = replace(parts.expectations[0], met_ns=0, seen="no standby")


def command_refused(parts: RecordParts) -> None:
    parts.commands.append(Command("promote", 9 * S, 9 * S, 412, "no standby", is_as_wanted=False))


def started_while_paused(parts: RecordParts) -> None:
    parts.events[9:] = [
        event(10, "paused", 9 * S),
        engine_state(11, 9 * S, "chat-a", "stopped", "starting"),
        event(12, "unpaused", 9 * S),
    ]


def born_while_paused(parts: RecordParts) -> None:
    parts.events[9:] = [event(10, "paused", 9 * S), event(11, "unpaused", 11 * S)]
    parts.processes.append(Process("chat-c-1", 300, 1, 10 * S, 12 * S, 0))


def ended_while_paused(parts: RecordParts) -> None:
    parts.events[9:] = [event(10, "paused", 9 * S), event(11, "unpaused", 11 * S)]
    parts.processes[2] = replace(parts.processes[2], last_alive_ns=10 * S, dead_ns=10 * S)


def answered_wrongly(parts: RecordParts) -> None:
    parts.faults.append(Fault("malformed", "hostile_clients", 9 * S, 9 * S, problem="got 200"))


def judged_too_often(parts: RecordParts) -> None:
    parts.meta = replace(parts.meta, system={"stable_after": "1s", "intensity": 2})
    parts.events[9:] = [
        event(10 + n, "failover_completed", (9 + n) * S, cause="hung") for n in range(3)
    ]


def text_computed_again(parts: RecordParts) -> None:
    name = 'understudy_gateway_resumed_total{model="chat",source="replay"}'
    parts.metrics[0].values[name] = 1.0


def tasks_grew(parts: RecordParts) -> None:
    before, after = parts.held
    parts.held = [
        replace(before, tasks={"understudy_tasks": 40}),
        replace(after, tasks={"understudy_tasks": 90}),
    ]


def next_token_late(parts: RecordParts) -> None:
    late = [4 * S + 100 * MS, 4 * S + 900 * MS, KILL_NS + 2 * S, KILL_NS + 2 * S + MS]
    parts.streams[0] = stream("greedy-0#1", 4 * S, late)


def never_whole(parts: RecordParts) -> None:
    parts.samples[-1] = replace(parts.samples[-1], is_whole=False)


def standby_died_too(parts: RecordParts) -> None:
    parts.processes[2] = replace(parts.processes[2], last_alive_ns=7 * S, dead_ns=7 * S + MS)


def restarted_too_soon(parts: RecordParts) -> None:
    lives = [(13, 13.2), (13.3, 13.5), (13.6, 13.8), (13.9, 14.0)]
    parts.processes += [
        Process(f"chat-c-{n}", 200 + n, n, int(a * S), int(b * S), int(b * S))
        for n, (a, b) in enumerate(lives)
    ]


def event_missing(parts: RecordParts) -> None:
    del parts.events[8]


def counter_wrong(parts: RecordParts) -> None:
    name = 'understudy_failovers_total{cause="dead",outcome="done"}'
    parts.metrics[0].values[name] = 2.0


def descriptors_grew(parts: RecordParts) -> None:
    parts.held[1] = Held(10 * S, "after", {"gateway-0-1:60": {"socket": 55, "memfd": 0}})


def memory_file_kept(parts: RecordParts) -> None:
    parts.held[1] = Held(10 * S, "after", {"gateway-0-1:60": {"socket": 5, "memfd": 1}})


def stray(parts: RecordParts) -> None:
    parts.held[1] = replace(parts.held[1], strays=["chat-a-00000009 (pid 9)"])


def left_behind(parts: RecordParts) -> None:
    parts.others.insert(0, Leftover("socket x.sock is still there"))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (epoch_has_two_primaries, "one primary per epoch, and epochs only rise"),
        (epoch_falls_in_the_status, "one primary per epoch, and epochs only rise"),
        (old_primary_lives_on, "never two primaries at once"),
        (promoted_before_the_fence, "fenced before promoted"),
        (token_lost, "every stream is complete and exact"),
        (token_repeated, "every stream is complete and exact"),
        (last_token_lost, "every stream is complete and exact"),
        (silent_end, "every stream is complete and exact"),
        (error_event, "every stream is complete and exact"),
        (expectation_missed, "what the scenario expects came"),
        (command_refused, "what the scenario expects came"),
        (started_while_paused, "pause means pause"),
        (born_while_paused, "pause means pause"),
        (ended_while_paused, "pause means pause"),
        (answered_wrongly, "what was asked meanwhile was answered well"),
        (judged_too_often, "failovers by judgement are limited"),
        (next_token_late, "the next token came within its bound"),
        (never_whole, "the system was whole within its bound"),
        (standby_died_too, "nobody died uninvited"),
        (restarted_too_soon, "who dies young is restarted later and later"),
        (event_missing, "events have no gap"),
        (counter_wrong, "metrics equal the events"),
        (text_computed_again, "nothing is computed twice"),
        (tasks_grew, "no task leaks"),
        (descriptors_grew, "no descriptor leaks"),
        (memory_file_kept, "no descriptor leaks"),
        (stray, "no process without an owner"),
        (left_behind, "nothing is left after the stop"),
    ],
)
def test_each_damage_breaks_its_own_guarantee_and_skips_the_rest(
    damage: Callable[[RecordParts], None], name: str
) -> None:
    parts = RecordParts()
    damage(parts)
    broken = first_broken(parts)
    assert (broken.kind, broken.name) == ("guarantee", name), broken.problems
    verdict = judge(parts.history())
    assert verdict.is_judged
    assert verdict.sentence().startswith("FAILED")
    later = verdict.outcomes[verdict.outcomes.index(broken) + 1 :]
    assert {o.state for o in later} <= {"skipped"}


# ------------------------------------------------------------ what is no fault


def passes(parts: RecordParts) -> Verdict:
    verdict = judge(parts.history())
    assert verdict.is_passed, verdict.sentence()
    return verdict


def test_a_stream_whose_end_was_not_seen_may_have_gone_on() -> None:
    parts = RecordParts()
    parts.streams[1] = replace(parts.streams[1], ended_ns=0, texts=["a", "b"], has_end_mark=False)
    passes(parts)


def test_a_client_that_left_is_owed_nothing_more() -> None:
    parts = RecordParts()
    parts.streams[1] = replace(
        parts.streams[1], left_ns=8 * S + 35 * MS, texts=["ab"], has_end_mark=False
    )
    passes(parts)


def test_a_stream_breaks_with_its_gateway_but_may_not_lie() -> None:
    parts = RecordParts()
    parts.faults[0] = replace(parts.faults[0], breaks_streams=True)
    parts.streams[0] = replace(parts.streams[0], error="ClientPayloadError", has_end_mark=False)
    passes(parts)
    parts.streams[0] = replace(parts.streams[0], texts=["a", "x", "", ""])
    assert first_broken(parts).name == "every stream is complete and exact"


def test_a_new_supervisor_that_does_not_know_the_epoch_yet_is_not_a_step_back() -> None:
    parts = RecordParts()
    parts.samples.append(replace(parts.samples[-1], at_ns=9 * S, epoch=0, primary=None))
    parts.samples.append(replace(parts.samples[-2], at_ns=9 * S + MS))
    passes(parts)


def test_a_planned_handover_ends_a_reign_at_the_old_ones_word() -> None:
    parts = RecordParts()
    parts.roles += [
        Role(9 * S, "chat-b", 101, "standby", 3),
        Role(9 * S + 2 * MS, "chat-a", 102, "primary", 3),
    ]
    passes(parts)


def test_a_helper_process_of_an_engine_is_no_life_of_its_own() -> None:
    """Compilers and the like carry the marker of the engine that started them."""
    parts = RecordParts()
    parts.processes += [
        Process("chat-a-00000001", 210, 2000, 2 * S, 2 * S + 20 * MS, 2 * S + 20 * MS),
        Process("chat-a-00000001", 211, 2001, 3 * S, 3 * S + 20 * MS, 3 * S + 20 * MS),
    ]
    passes(parts)


def test_lost_events_are_no_gap_when_a_line_says_so() -> None:
    parts = RecordParts()
    parts.events[9:] = [event(14, "events_lost", 11 * S, from_seq=10, lost=5)]
    passes(parts)


def test_an_eviction_is_no_uninvited_death() -> None:
    parts = RecordParts()
    parts.processes.append(Process("chat-batch-1", 105, 9, S, 9 * S, 9 * S + MS))
    parts.samples[0].pids["batch"] = 105
    assert first_broken(parts).name == "nobody died uninvited"
    parts.commands.append(Command("evict chat-batch", 9 * S, 9 * S + 5 * MS, 200, "evicted"))
    passes(parts)


def test_one_that_was_started_while_starts_were_broken_died_by_order() -> None:
    parts = RecordParts()
    standby_died_too(parts)
    assert first_broken(parts).name == "nobody died uninvited"
    order = Fault("break", "break_starts", 5 * S + MS, 5 * S + MS, is_deadly=False,
                  params={"module": "engines.native"})  # fmt: skip
    parts.faults.append(order)
    passes(parts)
    mended = Fault("mend", "mend_starts", 5 * S + 2 * MS, 5 * S + 2 * MS, is_deadly=False)
    parts.faults.append(mended)
    assert first_broken(parts).name == "nobody died uninvited"


def test_one_that_was_starting_when_its_supervisor_died_may_be_started_anew() -> None:
    parts = RecordParts()
    parts.events[8:] = [
        event(9, "supervisor_started", 6 * S + 500 * MS),
        event(10, "stopping", 11 * S),
    ]
    parts.metrics.clear()
    standby_died_too(parts)
    passes(parts)
    parts.events.insert(8, event(9, "engine_ready", 6 * S + 100 * MS, engine="chat-a"))
    parts.events[9:] = [
        event(10, "supervisor_started", 6 * S + 500 * MS),
        event(11, "stopping", 11 * S),
    ]
    assert first_broken(parts).name == "nobody died uninvited"


@pytest.mark.parametrize(
    ("instance", "kind"),
    [("gateway-0-1", "gateway_ready"), ("zygote-chat-1", "zygote_ready"),
     ("cache-chat-1", "weights_loaded")],
)  # fmt: skip
def test_what_was_ready_is_not_excused_by_a_new_supervisor(instance: str, kind: str) -> None:
    parts = RecordParts()
    parts.processes.append(Process(instance, 60, 9, S, 7 * S, 7 * S + MS))
    parts.samples[0].pids["other"] = 60
    parts.events[8:] = [
        event(9, "supervisor_started", 6 * S + 500 * MS),
        event(10, "stopping", 11 * S),
    ]
    parts.metrics.clear()
    passes(parts)  # it was starting all the time
    parts.events[8:] = [
        event(9, kind, 6 * S, engine=instance.rpartition("-")[0]),
        event(10, "supervisor_started", 6 * S + 500 * MS),
        event(11, "stopping", 11 * S),
    ]
    assert first_broken(parts).name == "nobody died uninvited"


def descriptors(kind: str, at_ns: int, *hit: Target) -> Fault:
    return Fault(kind, kind, at_ns, at_ns, list(hit), is_deadly=False)


def test_one_whose_start_lacked_something_may_die_of_it() -> None:
    parts = RecordParts()
    standby_died_too(parts)
    parts.events[8] = event(9, "nothing", 6 * S)
    parts.metrics.clear()
    cache = Target("cache", 70, 1, "cache-chat-1")
    limited = descriptors("limit_descriptors", 5 * S + MS, cache)
    given_back = descriptors("unlimit_descriptors", 6 * S + MS, cache)
    parts.faults += [limited, given_back]
    passes(parts)
    parts.faults[-1] = replace(given_back, at_ns=5 * S + 2 * MS)
    assert first_broken(parts).name == "nobody died uninvited"


def test_the_shortage_of_somebody_else_excuses_no_death() -> None:
    parts = RecordParts()
    standby_died_too(parts)
    parts.events[8] = event(9, "nothing", 6 * S)
    parts.metrics.clear()
    gateway = Target("gateway", 60, 1, "gateway-0-1")
    parts.faults.append(descriptors("limit_descriptors", 5 * S + MS, gateway))
    assert first_broken(parts).name == "nobody died uninvited"
    parts.faults[-1] = descriptors("limit_descriptors", 5 * S + MS, Target("zygote", 70, 1))
    passes(parts)
    parts.processes.append(Process("zygote-chat-1", 70, 1, S, 5 * S + 2 * MS, 5 * S + 2 * MS))
    assert first_broken(parts).name == "nobody died uninvited"  # the next one lacks nothing


def test_a_missed_expectation_is_the_products_fault_though_the_run_ended_there() -> None:
    parts = RecordParts()
    parts.expectations = [Expectation("whole yes", KILL_NS, 0, 60.0, "no standby")]
    parts.others = [End(12 * S, "UnderstudyError: expected whole")]
    assert first_broken(parts).name == "what the scenario expects came"


def test_times_of_the_wall_clock_convert_through_the_nearest_anchor() -> None:
    parts = RecordParts()
    parts.clocks = [Clock(1 * S, 1000.0), Clock(2 * S, 1001.0), Clock(3 * S, 1002.0005)]
    history = parts.history()
    assert history.monotonic_ns(1001.5) == 2 * S + 500 * MS
    assert history.monotonic_ns(1002.001) == 3 * S + 500_000
    assert history.monotonic_ns(999.5) == S - 500 * MS


def test_a_clock_that_jumps_on_purpose_is_followed_through_its_jump() -> None:
    parts = RecordParts()
    parts.clocks = [
        Clock(1 * S, 1000.0), Clock(2 * S, 1001.0),
        Clock(2 * S + MS, 1001.001, -5000.0), Clock(3 * S, 1002.0, -5000.0),
        Clock(3 * S + MS, 1002.001), Clock(4 * S, 1003.0),
    ]  # fmt: skip
    history = parts.history()
    assert history.monotonic_ns(1000.5) == 1 * S + 500 * MS
    assert history.monotonic_ns(-3998.5) == 2 * S + 500 * MS
    assert history.monotonic_ns(1002.5) == 3 * S + 500 * MS


def test_a_late_token_is_told_with_what_the_machine_had_to_do_with_it() -> None:
    parts = RecordParts()
    next_token_late(parts)
    parts.clocks = [replace(c, cpu_wait_ns=c.at_ns // 4) for c in parts.clocks]
    assert "waited for a CPU 25% of that time" in first_broken(parts).problems[0]


def test_a_stream_at_another_worker_must_not_break() -> None:
    parts = RecordParts()
    parts.faults.append(Fault("SIGKILL gateway", "signal", 8 * S + 15 * MS, 9 * S,
                              breaks_streams=True, is_deadly=False))  # fmt: skip
    parts.streams[1] = replace(parts.streams[1], texts=["ab"], error="reset", has_end_mark=False)
    passes(parts)
    parts.faults[-1] = replace(parts.faults[-1], spared=["greedy-0#2"])
    assert first_broken(parts).name == "every stream is complete and exact"


def test_a_stream_that_had_no_text_yet_may_be_computed_anew() -> None:
    parts = RecordParts()
    text_computed_again(parts)
    assert first_broken(parts).name == "nothing is computed twice"
    parts.streams.append(
        stream("greedy-0#3", KILL_NS - MS, [KILL_NS + n * MS for n in range(1, 5)])
    )
    passes(parts)


def test_tasks_are_counted_from_the_first_quiet_moment_of_their_own_worker() -> None:
    """With two workers: the one that died begins anew, the other does not."""
    parts = RecordParts()
    first, second = (f'understudy_gateway_tasks{{worker="gateway-{n}"}}' for n in (0, 1))
    before, after = parts.held
    old: dict[str, dict[str, int]] = {"gateway-0-1:60": {}, "gateway-1-1:61": {}}
    new: dict[str, dict[str, int]] = {"gateway-0-2:62": {}, "gateway-1-1:61": {}}
    parts.held = [
        replace(before, processes=old, tasks={first: 4.0, second: 4.0}),
        replace(after, processes=new, tasks={first: 9.0, second: 5.0}),
    ]
    passes(parts)
    parts.held[1] = replace(parts.held[1], tasks={first: 4.0, second: 9.0})
    assert first_broken(parts).problems == (f"{second} at 'after': 4 -> 9",)
    parts.held[1] = replace(parts.held[1], processes={"gateway-1-2:63": {}, "gateway-0-1:60": {}})
    passes(parts)


def test_a_port_that_nobody_holds_refuses_until_the_next_supervisor_serves() -> None:
    parts = RecordParts()
    dead_ns = KILL_NS + 500 * MS
    parts.samples[0].pids["gateway"] = 60
    parts.samples[-1].pids.update(gateway=61, supervisor=51)
    parts.processes += [
        Process("gateway-0-1", 60, 1, S, dead_ns, dead_ns),
        Process("supervisor-50", 50, 1, S, dead_ns - MS, dead_ns - MS),
        Process("gateway-0-2", 61, 2, 7 * S - 100 * MS, 12 * S, 0),
        Process("supervisor-51", 51, 2, 6 * S, 12 * S, 0),
    ]
    hit = [Target("gateway", 60, 1), Target("supervisor", 50, 1)]
    parts.faults.append(Fault("both", "signal", dead_ns - 2 * MS, dead_ns, hit))
    refused = replace(
        stream("greedy-0#3", KILL_NS + S, [KILL_NS + S + MS]),
        error="ClientConnectorError: Connect call refused",
        texts=[],
        has_end_mark=False,
    )
    parts.streams.append(refused)
    passes(parts)
    parts.streams[-1] = replace(refused, started_ns=9 * S, ended_ns=9 * S + MS)
    assert first_broken(parts).name == "every stream is complete and exact"


def test_a_full_queue_may_refuse_before_the_first_byte_and_not_after_it() -> None:
    parts = RecordParts()
    parts.streams.append(
        replace(stream("greedy-0#3", 9 * S, [9 * S + MS]), texts=[], error="HTTP 429: queue_full")
    )
    passes(parts)
    parts.streams[-1] = replace(parts.streams[-1], texts=["a"])
    assert first_broken(parts).name == "every stream is complete and exact"
