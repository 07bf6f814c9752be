"""Book-keeping: events, metrics, descriptors, processes must add up."""

import itertools
import re
from collections import Counter
from typing import Final

from chaos.history import Event, Fault, Held, History, Leftover, Metrics, Stream

__all__ = [
    "events_have_no_gap",
    "metrics_equal_events",
    "no_descriptor_leaks",
    "no_strays",
    "no_task_leaks",
    "nothing_is_computed_twice",
    "nothing_left_behind",
]

_SLACK: Final = 4
"""Descriptors that a moment may show more: a request under way, a burial, a connection."""

_UNDER_WAY_NS: Final = 100_000_000
"""Text that the engine had sent just before the fault may still have been on its way."""

_SLOT_IS_KEPT_NS: Final = 5_000_000_000
"""Half of what engines keep a slot for whoever resumes it: the deaths of two may add up."""

_TASK_SLACK: Final = 3
"""Tasks that a moment may show more: a scrape, a probe, a client that has just left."""

_LABEL = re.compile(r'(\w+)="([^"]*)"')


def events_have_no_gap(history: History) -> list[str]:
    """Numbers go up by one; a line that stands for lost ones says how many."""
    found, expected = [], 1
    for event in sorted(history.all(Event), key=lambda e: e.seq):
        if event.kind == "events_lost":
            expected = int(event.event["from_seq"])
        if event.seq < expected:
            found.append(f"event {event.seq} is there twice")
        elif event.seq > expected and event.kind != "events_lost":
            found.append(f"events {expected} to {event.seq - 1} are missing")
        expected = event.seq + 1
    return found


def metrics_equal_events(history: History) -> list[str]:
    """Each counter of a supervisor's life says what its events of that life say."""
    found = []
    for metrics in history.all(Metrics):
        events = _events_of_life(history, metrics)
        for name, labels, wanted in _counted(events):
            got = _sum(metrics.values, name, labels)
            if got != wanted:
                shown = ",".join(f"{k}={v}" for k, v in labels.items())
                found.append(f"{name}{{{shown}}} is {got:g}, the events say {wanted}")
        total = _sum(metrics.values, "understudy_events_total", {})
        if total != metrics.last_seq:
            found.append(f"understudy_events_total is {total:g}, the log has {metrics.last_seq}")
    return found


def _events_of_life(history: History, metrics: Metrics) -> list[Event]:
    until = [e for e in history.all(Event) if e.seq <= metrics.last_seq]
    started = [e.seq for e in until if e.kind == "supervisor_started"]
    return [e for e in until if e.seq >= max(started, default=0)]


def _counted(events: list[Event]) -> list[tuple[str, dict[str, str], int]]:
    """What the counters must be: name, labels, value."""
    kinds = Counter(e.kind for e in events)
    starts = Counter(str(e.event.get("how", "")) for e in events if e.kind == "engine_ready")
    deaths = Counter(
        str(e.event["engine"])
        for e in events
        if e.kind == "engine_state"
        and e.event.get("state") == "stopped"
        and e.event.get("was") in ("fencing", "unkillable")
        and e.event.get("pid", 0) is not None  # a start that was refused had no process
    )
    others = Counter(
        (kind, str(e.event["engine"]))
        for e in events
        for kind in ("gateway", "zygote", "cache")
        if e.kind == f"{kind}_died"
    )
    failovers, switchovers = kinds["failover_completed"], kinds["switchover_completed"]
    counted = [
        ("understudy_failovers_total", {"outcome": "done"}, failovers),
        ("understudy_failover_duration_seconds_count", {"phase": "route"}, failovers),
        ("understudy_switchovers_total", {"outcome": "done"}, switchovers),
        ("understudy_switchover_duration_seconds_count", {"phase": "route"}, switchovers),
        ("understudy_evictions_total", {"outcome": "done"}, kinds["evicted"]),
        ("understudy_engine_start_seconds_count", {}, starts.total()),
        ("understudy_canary_failures_total", {}, kinds["canary_failed"]),
        ("understudy_engine_crashes_total", {}, kinds["engine_crashed"]),
        ("understudy_fence_attestations_total", {}, kinds["fence_attested"]),
    ]
    counted += [
        ("understudy_restarts_total", {"kind": "engine", "name": name}, count)
        for name, count in deaths.items()
    ]
    counted += [
        ("understudy_restarts_total", {"kind": kind, "name": name}, count)
        for (kind, name), count in others.items()
    ]
    return counted


def _sum(values: dict[str, float], name: str, labels: dict[str, str]) -> float:
    total = 0.0
    for sample, value in values.items():
        family, _, rest = sample.partition("{")
        if family == name and labels.items() <= dict(_LABEL.findall(rest)).items():
            total += value
    return total


def nothing_is_computed_twice(history: History) -> list[str]:
    """A stream that had got text goes on from its slot; only one that had none may begin anew.

    One that nobody went on with in time has lost its slot, and is no fault either.
    """
    replayed = max(
        (_sum(m.values, "understudy_gateway_resumed_total", {"source": "replay"})
         for m in history.all(Metrics)), default=0.0,
    )  # fmt: skip
    excused = sum(
        _may_begin_anew(stream, fault.at_ns)
        for fault in history.all(Fault)
        for stream in history.all(Stream)
    )
    if replayed > excused:
        return [f"{replayed:g} streams were computed again, {excused} had a reason"]
    return []


def _may_begin_anew(stream: Stream, at_ns: int) -> bool:
    """Whether the fault found it without text, or let it wait for longer than a slot is kept."""
    if not stream.was_open_at(at_ns):
        return False
    until_ns = at_ns + _UNDER_WAY_NS
    arrivals = stream.arrivals_ns
    if not arrivals or arrivals[0] > at_ns - _UNDER_WAY_NS:
        return True
    waits = (b - a for a, b in itertools.pairwise(arrivals) if a <= until_ns and b > at_ns)
    return max(waits, default=0) > _SLOT_IS_KEPT_NS


def no_descriptor_leaks(history: History) -> list[str]:
    """Between two quiet moments a process has not gained descriptors, and no memory file at all."""
    found = []
    first: dict[str, dict[str, int]] = {}
    for held in history.all(Held):
        for process, kinds in held.processes.items():
            before = first.setdefault(process, kinds)
            gained = sum(kinds.values()) - sum(before.values())
            memory = kinds.get("memfd", 0) - before.get("memfd", 0)
            if gained > _SLACK or memory > 0:
                grown = {k: f"{before.get(k, 0)} -> {n}" for k, n in kinds.items()
                         if n > before.get(k, 0)}  # fmt: skip
                found.append(f"{process} holds more at {held.label!r}: {grown}")
    return found


def no_task_leaks(history: History) -> list[str]:
    """Between two quiet moments supervisor and gateways have not gained asyncio tasks.

    Counted from the first quiet moment of each life: a new process begins anew.
    """
    found = []
    first: dict[tuple[str, str], float] = {}
    for held in history.all(Held):
        lives = {name.rpartition("-")[0]: name for name in held.processes}
        for metric, count in held.tasks.items():
            owner = dict(_LABEL.findall(metric)).get("worker", "supervisor")
            before = first.setdefault((metric, lives.get(owner, "")), count)
            if count - before > _TASK_SLACK:
                found.append(f"{metric} at {held.label!r}: {before:g} -> {count:g}")
    return found


def no_strays(history: History) -> list[str]:
    """In a quiet moment every process of the system is one that the status names."""
    found = itertools.chain.from_iterable(
        (f"{stray} at {held.label!r}" for stray in held.strays) for held in history.all(Held)
    )
    return list(found)


def nothing_left_behind(history: History) -> list[str]:
    """After the stop no process, socket, memory or port is left."""
    return [leftover.text for leftover in history.all(Leftover)]
