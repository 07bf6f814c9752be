"""What the product promises, asked of a record. Each function returns sentences, none is good.

Who was primary is taken from the engines' own logs and from the kernel's view of their processes,
not from the supervisor's belief: a supervisor that is wrong would otherwise judge itself. Who was
born and who died, and why, is asked in `chaos.lives`.
"""

import itertools
from dataclasses import dataclass
from typing import Final

from chaos.history import (
    Command,
    Expectation,
    Fault,
    History,
    Process,
    Reference,
    Role,
    Stream,
)

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
    "one_primary_per_epoch",
    "reigns",
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


def next_token_ms(
    stream: Stream,
    at_ns: int,
    next_fault_ns: int | None = None,
    *,
    begins_within_ns: int = _UNDER_WAY_NS,
) -> float | None:
    """From a fault to the first token behind the longest gap that begins at it; None: nothing due.

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
        and before <= at_ns + begins_within_ns
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
