"""What the product promises, asked of a record. Each function returns sentences, none is good.

Who was primary is taken from the engines' own logs and from the kernel's view of their processes,
not from the supervisor's belief: a supervisor that is wrong would otherwise judge itself.
"""

import itertools
from dataclasses import dataclass
from typing import Final

from chaos.history import (
    Command,
    Event,
    Expectation,
    Fault,
    History,
    Process,
    Reference,
    Role,
    Stream,
)
from supervisor.core.restart import FIRST_BACKOFF_S
from supervisor.topology.schema import Failover, parse_duration

__all__ = [
    "Reign",
    "answers_were_right",
    "expectations_were_met",
    "fenced_before_promoted",
    "judgement_is_limited",
    "next_fault_ns",
    "next_token_ms",
    "next_token_within_bound",
    "no_two_primaries_at_once",
    "nobody_died_uninvited",
    "one_primary_per_epoch",
    "pause_means_pause",
    "reigns",
    "restarts_back_off",
    "streams_are_exact",
    "whole_after_s",
    "whole_within_bound",
]

_LOG_RESOLUTION_NS: Final = 3_000_000
"""Engine logs carry milliseconds of the wall clock; anchors are read every 100 ms."""

_UNDER_WAY_NS: Final = 500_000_000
"""Tokens that were under way at a fault may arrive a little later than it."""

_NOTICE_S: Final = 5.0
"""A fault that kills nobody must have been noticed by then, or there was nothing to notice."""

_BACKOFF_SLACK_S: Final = 0.35
"""Births are seen by a scan of /proc every 100 ms."""

_SCAN_NS: Final = 350_000_000
"""Births are seen up to 100 ms late, and an order that was under way may still be carried out."""

_DISK_SHORTAGES: Final = {"fill_disk": "free_disk", "read_only_disk": "never"}
"""What takes the disk from every start, and which fault gives it back."""

_STARTED_BY: Final = {
    "cache": frozenset({"supervisor"}),
    "gateway": frozenset({"supervisor"}),
    "zygote": frozenset({"supervisor", "cache"}),
    "chat": frozenset({"supervisor", "cache", "zygote"}),
}
"""Whose descriptors a start needs besides its own."""

_READY: Final = ("engine_ready", "gateway_ready", "zygote_ready", "weights_loaded")
"""The events with which the supervisor says that a start is over, one per kind of process."""

_ADOPTION_NS: Final = 5_000_000_000
"""A new supervisor waits 2 s for an answer (`runtime/adoption.py`), then fences; twice that."""

_UNITS_OF_MODULE: Final = {
    "cache.daemon": "cache-",
    "engines.zygote": "zygote-",
    "engines.native": "chat-",
    "supervisor.gateway": "gateway-",
}

_PERIOD_NS: Final = 600_000_000_000
"""`period` in every topology of a chaos run."""


# ------------------------------------------------------------------ primaries


@dataclass(frozen=True, slots=True)
class Reign:
    """One process as primary of one epoch, by its own word."""

    engine: str
    pid: int
    epoch: int
    from_ns: int
    until_ns: int  # the last moment at which it may have acted


def reigns(history: History) -> list[Reign]:
    """All of them, in the order of their beginning."""
    lives = {p.pid: p for p in history.all(Process)}
    by_pid: dict[int, list[Role]] = {}
    for role in sorted(history.all(Role), key=lambda r: r.at_ns):
        by_pid.setdefault(role.pid, []).append(role)
    found = []
    for pid, roles in by_pid.items():
        life = lives.get(pid)
        last_ns = life.last_alive_ns if life is not None else history.ended_ns
        ends = [role.at_ns for role in roles[1:]] + [last_ns]
        found += [
            Reign(role.engine, pid, role.epoch, role.at_ns, max(role.at_ns, end_ns))
            for role, end_ns in zip(roles, ends, strict=True)
            if role.role == "primary"
        ]
    return sorted(found, key=lambda r: (r.from_ns, r.epoch))


def one_primary_per_epoch(history: History) -> list[str]:
    """No epoch has two primaries; no later one has a lower number; no status goes back."""
    found = []
    owners: dict[int, Reign] = {}
    for reign in reigns(history):
        owner = owners.setdefault(reign.epoch, reign)
        if owner.pid != reign.pid:
            found.append(f"epoch {reign.epoch} had {owner.engine} (pid {owner.pid}) and "
                         f"{reign.engine} (pid {reign.pid})")  # fmt: skip
    for before, after in itertools.pairwise(reigns(history)):
        if after.epoch <= before.epoch and after.pid != before.pid:
            found.append(f"epoch {after.epoch} of {after.engine} began after epoch {before.epoch}")
    samples = [s for s in history.samples() if s.epoch]  # 0: a new supervisor, still adopting
    for earlier, later in itertools.pairwise(samples):
        if later.epoch < earlier.epoch:
            found.append(f"the status went from epoch {earlier.epoch} to {later.epoch}")
        if sum(e.state == "primary" for e in later.engines) > 1:
            found.append("the status named two primaries")
    return found


def no_two_primaries_at_once(history: History) -> list[str]:
    """On one clock: a predecessor was dead, or had said that it gave up, when the next began."""
    found = []
    ordered = reigns(history)
    for index, reign in enumerate(ordered):
        for earlier in ordered[:index]:
            overlap_ns = earlier.until_ns - reign.from_ns
            if earlier.pid != reign.pid and overlap_ns > _LOG_RESOLUTION_NS:
                found.append(
                    f"{earlier.engine} (epoch {earlier.epoch}) was alive and primary "
                    f"{overlap_ns / 1e6:.1f} ms after {reign.engine} (epoch {reign.epoch}) began"
                )
    return found


def fenced_before_promoted(history: History) -> list[str]:
    """By the order of events: nobody is promoted while another may hold the role."""
    unsafe = {"primary", "promoting", "demoting", "fencing", "unkillable"}
    changes = [e.event for e in history.events("engine_state")]
    batch = {str(c.get("engine")) for c in changes if c.get("state") == "batch"}  # no rivals
    states: dict[str, str] = {}
    found = []
    for event in history.events("engine_state", "supervisor_started"):
        if event.kind == "supervisor_started":
            states.clear()  # it rebuilds the truth from the processes
            continue
        engine, state = str(event.event.get("engine")), str(event.event.get("state"))
        if state == "promoting":
            found += [
                f"{engine} was promoted while {other} was {its} (event {event.seq})"
                for other, its in states.items()
                if other not in {engine, *batch} and its in unsafe
            ]
        states[engine] = state
    return found


# -------------------------------------------------------------------- streams


def streams_are_exact(history: History) -> list[str]:
    """No client saw an error, a missing end, or one character that the reference does not have."""
    texts = {r.request: r for r in history.all(Reference)}
    found = []
    for stream in history.all(Stream):
        reference = texts.get(stream.request)
        problem = _stream_problem(history, stream, reference)
        if problem is not None:
            found.append(f"{stream.name}: {problem}")
    return found


def _stream_problem(history: History, stream: Stream, reference: Reference | None) -> str | None:
    if reference is not None and not reference.text.startswith(stream.text):
        return _difference(stream.text, reference.text)
    if stream.left_ns or not stream.ended_ns or _may_break(history, stream):
        return None  # what arrived was right, and nothing more was owed
    if stream.error is not None:
        is_fine = _is_wanted(history, stream.error) or _is_refusal(stream)
        return None if is_fine else f"error {stream.error}"
    if not stream.has_end_mark or stream.finish_reason is None:
        return "it ended silently"
    return _shortfall(stream, reference) if reference is not None else None


def _shortfall(stream: Stream, reference: Reference) -> str | None:
    """What a stream that ended well still lacks."""
    if stream.completion_tokens != reference.tokens:
        return f"{stream.completion_tokens} tokens instead of {reference.tokens}"
    return None if stream.text == reference.text else _difference(stream.text, reference.text)


def _is_refusal(stream: Stream) -> bool:
    """A full queue says so before the first byte: open-loop load may ask for too much."""
    return not stream.texts and "429" in (stream.error or "")


def _is_wanted(history: History, error: str) -> bool:
    """Whether the scenario expects this error for its long request."""
    wanted = [e.label for e in history.all(Expectation) if "streams_end_with" in e.label]
    codes = [label.rpartition("streams_end_with ")[2].split(",")[0] for label in wanted]
    return any(code in error for code in codes)


def _may_break(history: History, stream: Stream) -> bool:
    """Whether its own gateway died, nobody held the port, or the system was stopped."""
    error = (stream.error or "").casefold()
    if ("refused" in error or "connection error" in error) and any(
        from_ns <= stream.started_ns <= until_ns for from_ns, until_ns in closed_spans(history)
    ):
        return True
    breaks = [f for f in history.all(Fault) if f.breaks_streams and stream.name not in f.spared]
    if any(stream.was_open_at(fault.at_ns) for fault in breaks):
        return True
    stops = [c.at_ns for c in history.all(Command) if c.label == "stop"]
    return any(stream.ended_ns >= at_ns for at_ns in stops)


def closed_spans(history: History) -> list[tuple[int, int]]:
    """When no process held the listening socket: from a death until somebody has bound it again.

    It survives as long as the supervisor or one worker lives; when the last of them is killed,
    clients are refused until the next supervisor serves.
    """
    holders = [p for p in history.all(Process) if p.instance.startswith("gateway")]
    holders += [p for p in history.all(Process) if p.instance.startswith("supervisor")]
    bound = [s for s in history.samples() if s.pids.get("gateway") is not None]
    since = {p.pid: p.seen_ns for p in holders if p.instance.startswith("gateway")}
    for sample in reversed(bound):  # a new supervisor holds it once it names a worker
        since[sample.pids.get("supervisor") or 0] = sample.at_ns
    spans = []
    for dead in holders:
        others = [p for p in holders if p is not dead]
        others = [p for p in others if since.get(p.pid, p.dead_ns) < dead.dead_ns]
        if dead.dead_ns and all(0 < p.dead_ns <= dead.dead_ns for p in others):
            again = (s.at_ns for s in bound if s.at_ns > dead.dead_ns)
            spans.append((dead.last_alive_ns, next(again, history.ended_ns)))
    return spans


def _difference(text: str, wanted: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b),
              min(len(text), len(wanted)))  # fmt: skip
    return (
        f"text differs at character {at} of {len(wanted)}: "
        f"{text[at : at + 30]!r} instead of {wanted[at : at + 30]!r}"
    )


def next_token_ms(stream: Stream, at_ns: int, next_fault_ns: int | None = None) -> float | None:
    """From a fault to the first token behind the longest gap around it; None: nothing was due.

    A stream that has got nothing yet may be waiting for a slot, fault or no fault: not counted. A
    pause that began behind this fault and was struck by the next one is the next one's.
    """
    arrivals = stream.arrivals_ns
    if not stream.was_open_at(at_ns) or not arrivals or arrivals[0] > at_ns:
        return None
    gaps = [
        (after - before, after)
        for before, after in itertools.pairwise(arrivals)
        if after > at_ns
        and before <= at_ns + _UNDER_WAY_NS
        and not (next_fault_ns is not None and at_ns < before <= next_fault_ns < after)
    ]
    return (max(gaps)[1] - at_ns) / 1e6 if gaps else None


def _starved(history: History, from_ns: int, until_ns: int) -> str:
    """What the machine had to do with it."""
    share = history.cpu_wait_share(from_ns, until_ns)
    return "" if share is None else f" (some process waited for a CPU {share:.0%} of that time)"


def next_fault_ns(history: History, fault: Fault) -> int | None:
    """When the next fault struck; None behind the last."""
    return min((f.at_ns for f in history.all(Fault) if f.at_ns > fault.at_ns), default=None)


def next_token_within_bound(history: History) -> list[str]:
    """Each stream that was open went on soon enough."""
    found = []
    for fault in history.all(Fault):
        bound_s = fault.bounds_s.get("next_token")
        if bound_s is None:
            continue
        for stream in history.all(Stream):
            took_ms = next_token_ms(stream, fault.at_ns, next_fault_ns(history, fault))
            if took_ms is not None and took_ms > bound_s * 1000:
                until_ns = fault.at_ns + int(took_ms * 1e6)
                found.append(f"{fault.label}: {stream.name} waited {took_ms:.0f} ms"
                             f"{_starved(history, fault.at_ns, until_ns)}")  # fmt: skip
    return found


# ----------------------------------------------------------------- the system


def expectations_were_met(history: History) -> list[str]:
    """What the scenario waited for came in time; commands were answered as wanted."""
    found = [
        f"{e.label}: not within {e.within_s:g} s: {e.seen}"
        for e in history.all(Expectation)
        if not e.met_ns
    ]
    found += [f"{c.label}: {c.status} {c.text}" for c in history.all(Command) if not c.is_as_wanted]
    return found


def pause_means_pause(history: History) -> list[str]:
    """Between `paused` and `unpaused` nothing is started, stopped or promoted.

    By the supervisor's own events, and by what the kernel shows: nobody is born, and nobody dies
    who was not hit.
    """
    found = []
    spans: list[tuple[int, int]] = []
    began: Event | None = None
    for event in history.events("paused", "unpaused", "engine_state", "promoted"):
        if event.kind == "paused":
            began = event
        elif event.kind == "unpaused":
            spans += [(began.at_ns, event.at_ns)] if began is not None else []
            began = None
        elif began is not None and event.event.get("state") in (
            None, "starting", "promoting", "fencing",
        ):  # fmt: skip
            found.append(f"event {event.seq} while paused: {event.event.get('text')}")
    spans += [(began.at_ns, _stop_ns(history))] if began is not None else []
    for from_ns, until_ns in spans:
        found += _births_and_deaths(history, from_ns + _SCAN_NS, until_ns - _SCAN_NS)
    return found


def _births_and_deaths(history: History, from_ns: int, until_ns: int) -> list[str]:
    hit = {t.pid for f in history.all(Fault) for t in f.targets}
    found = []
    for process in history.all(Process):
        if process.instance.startswith("supervisor"):
            continue  # a new one may come and adopt; it starts nothing
        if from_ns < process.seen_ns < until_ns:
            found.append(f"{process.instance} (pid {process.pid}) was started while paused")
        if from_ns < process.dead_ns < until_ns and process.pid not in hit:
            found.append(f"{process.instance} (pid {process.pid}) was ended while paused")
    return found


def judgement_is_limited(history: History) -> list[str]:
    """Failovers of primaries that live happen at most `intensity` times in a period."""
    limit = int(history.meta.system.get("intensity", 0) or 0)
    judged = [e.at_ns for e in history.events("failover_completed")
              if e.event.get("cause") in ("hung", "wrong")]  # fmt: skip
    forgiven = [c.at_ns for c in history.all(Command) if c.label.split()[0] == "ack"]
    found = []
    for start, end in itertools.pairwise([0, *forgiven, history.ended_ns + 1]):
        within = [at_ns for at_ns in judged if start <= at_ns < end]
        busiest = max((sum(a <= b < a + _PERIOD_NS for b in within) for a in within), default=0)
        if limit and busiest > limit:
            found.append(f"{busiest} failovers by judgement in a period, {limit} are allowed")
    return found


def answers_were_right(history: History) -> list[str]:
    """What was asked in the middle of a fault was answered as it must be."""
    return [f"{f.label}: {f.problem}" for f in history.all(Fault) if f.problem]


def whole_after_s(history: History, fault: Fault) -> float | None:
    """From a fault until nothing was missing any more; None: never within the record."""
    victims = {t.pid for t in fault.targets} if fault.is_deadly else set()
    samples = [s for s in history.samples() if s.at_ns >= fault.at_ns]
    if fault.is_deadly:
        healed = (s for s in samples if s.is_up and s.is_whole and not s.names(victims))
        first = next(healed, None)
        return (first.at_ns - fault.at_ns) / 1e9 if first is not None else None
    noticed = [s for s in samples if s.at_ns <= fault.done_ns + _NOTICE_S * 1e9 and not s.is_whole]
    if not noticed:
        return 0.0
    later = (s for s in samples if s.at_ns > noticed[0].at_ns and s.is_whole)
    first = next(later, None)
    return (first.at_ns - fault.at_ns) / 1e9 if first is not None else None


def whole_within_bound(history: History) -> list[str]:
    """Everything that the topology names was at work again soon enough."""
    found = []
    for fault in history.all(Fault):
        bound_s = fault.bounds_s.get("whole")
        if bound_s is None:
            continue
        took_s = whole_after_s(history, fault)
        if took_s is None or took_s > bound_s:
            took = "never" if took_s is None else f"after {took_s:.1f} s"
            until_ns = fault.at_ns + int((took_s or bound_s) * 1e9)
            took += _starved(history, fault.at_ns, until_ns)
            found.append(f"{fault.label}: whole again {took}, the bound is {bound_s:g} s")
    return found


def nobody_died_uninvited(history: History) -> list[str]:
    """Every death was a fault of ours, a fence that followed one, or an order."""
    stop_ns = _stop_ns(history)
    named = {pid for s in history.samples() for pid in s.pids.values()}
    named |= {e.pid for s in history.samples() for e in s.engines}
    hit = {t.pid for f in history.all(Fault) for t in f.targets}
    ordered = {"evict", "restart", "failover", "fence"}
    orders_ns = [c.at_ns for c in history.all(Command) if c.label.split()[0] in ordered]
    orders_ns += [e.at_ns for e in history.events("evicted")]
    found = []
    for process in history.all(Process):
        is_ours = process.pid in named and process.pid not in hit
        if not is_ours or not process.dead_ns or process.dead_ns >= stop_ns:
            continue
        if _was_born_broken(history, process) or _was_unfinished(history, process):
            continue
        if not any(abs(process.dead_ns - at_ns) < 5e9 for at_ns in orders_ns):
            found.append(f"{process.instance} (pid {process.pid}) died and nobody had hit it")
    return found


def _was_born_broken(history: History, process: Process) -> bool:
    """Whether it was started while an order said that its kind ends at its first line."""
    orders = [f for f in history.all(Fault) if f.kind in ("break_starts", "mend_starts")]
    in_force: set[str] = set()
    for order in sorted(orders, key=lambda f: f.at_ns):
        if order.at_ns > process.seen_ns:
            break
        if order.kind == "mend_starts":
            in_force.clear()
        else:
            in_force.add(_UNITS_OF_MODULE.get(str(order.params.get("module")), ""))
    return any(unit and process.instance.startswith(unit) for unit in in_force)


def _was_unfinished(history: History, process: Process) -> bool:
    """Whether it was still starting, and its start lacked something, or its supervisor died.

    The next supervisor cannot ask it yet, and it serves nobody: that it starts anew costs less
    than to wait for it.
    """
    name = process.instance.rpartition("-")[0]
    is_ready = any(
        e.event.get("engine") == name and process.seen_ns <= e.at_ns <= process.dead_ns
        for e in history.events(*_READY)
    )
    follows = any(
        process.seen_ns < e.at_ns <= process.dead_ns <= e.at_ns + _ADOPTION_NS
        for e in history.events("supervisor_started")
    )
    was_short = any(
        _was_short(history, process, at_ns) for at_ns in (process.seen_ns, process.dead_ns)
    )
    return (follows or was_short) and not is_ready


def _was_short(history: History, process: Process, at_ns: int) -> bool:
    """Whether a fault had taken away what this start needs, and had not given it back.

    A disk is everybody's; descriptors are those of one process, and end with it.
    """
    needed = _STARTED_BY.get(process.instance.partition("-")[0], frozenset())
    ended = {p.pid for p in history.all(Process) if 0 < p.dead_ns < at_ns}
    short: dict[tuple[str, int], bool] = {}
    for fault in sorted(history.all(Fault), key=lambda f: f.at_ns):
        if fault.at_ns > at_ns:
            break
        if fault.kind in _DISK_SHORTAGES:
            short[_DISK_SHORTAGES[fault.kind], 0] = True
        elif fault.kind == "limit_descriptors":
            for target in fault.targets:
                is_needed = target.pid == process.pid or target.role in needed
                short["unlimit_descriptors", target.pid] = is_needed and target.pid not in ended
        else:
            for pid in [0, *(t.pid for t in fault.targets)]:
                short.pop((fault.kind, pid), None)
    return any(short.values())


def _stop_ns(history: History) -> int:
    stops = [e.at_ns for e in history.events("stopping")]
    stops += [c.at_ns for c in history.all(Command) if c.label == "stop"]
    return min(stops, default=history.ended_ns)


def restarts_back_off(history: History) -> list[str]:
    """The second young death in a row waits longer than the first, and so on.

    One that had served as primary is started again at once, for the first few times.
    """
    stable_s = float(str(parse_duration(str(history.meta.system.get("stable_after", "1s")))))
    longest_s = Failover().max_backoff
    by_name: dict[str, list[Process]] = {}
    for process in sorted(history.all(Process), key=lambda p: p.seen_ns):
        by_name.setdefault(process.instance.rpartition("-")[0], []).append(process)
    found = []
    for name, lives in by_name.items():
        if not name.startswith("chat"):
            continue
        young = 0
        for before, after in itertools.pairwise(lives):
            lived_s = (before.dead_ns - before.seen_ns) / 1e9
            is_young = before.dead_ns and lived_s < stable_s - _BACKOFF_SLACK_S
            if is_young and _has_served(history, before):
                continue
            young = young + 1 if is_young else 0
            wanted_s = min(longest_s, FIRST_BACKOFF_S * 2 ** (young - 1)) if young else 0.0
            waited_s = (after.seen_ns - before.dead_ns) / 1e9
            if waited_s < wanted_s - _BACKOFF_SLACK_S:
                found.append(f"{name} came back after {waited_s:.2f} s, {wanted_s:.2f} s were due")
    return found


def _has_served(history: History, process: Process) -> bool:
    """Whether it was promoted in its life."""
    name = process.instance.rpartition("-")[0]
    return any(
        e.event.get("engine") == name and process.seen_ns <= e.at_ns <= process.dead_ns
        for e in history.events("promoted")
    )
