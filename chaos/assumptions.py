"""What must be true of a record before it can prove anything about the product.

A broken assumption is a fault of the harness or of the machine, never of the product.
"""

import itertools
from typing import Final

from chaos.history import (
    Clock,
    Command,
    End,
    Expectation,
    Fault,
    History,
    Process,
    Reference,
    Stream,
)

__all__ = [
    "clocks_agree",
    "faults_struck_under_load",
    "record_is_complete",
    "reference_is_telling",
    "victims_died",
    "watchers_kept_looking",
]

_MAX_DRIFT_S: Final = 0.1
_MAX_GAP_S: Final = 3.0
"""A status request may wait a second for its answer; more means that the recorder was starved."""
_DEATH_S: Final = 10.0


def record_is_complete(history: History) -> list[str]:
    """It has its end, and ended as planned or because of something that the product did."""
    ends = history.all(End)
    if not ends:
        return ["the record was cut off: the runner died"]
    missed = [e for e in history.all(Expectation) if not e.met_ns]
    missed_commands = [c for c in history.all(Command) if not c.is_as_wanted]
    if ends[-1].error and not missed and not missed_commands:
        return [ends[-1].error]
    return []


def clocks_agree(history: History) -> list[str]:
    """Events and logs are stamped with the wall clock; it must not have jumped."""
    clocks = history.all(Clock)
    if len(clocks) < 2:
        return ["there are no clock readings"]
    first, last = clocks[0], clocks[-1]
    drift_s = (last.unix_s - first.unix_s) - (last.at_ns - first.at_ns) / 1e9
    if abs(drift_s) > _MAX_DRIFT_S:
        return [f"the wall clock moved by {drift_s:.3f} s against the monotonic one"]
    return []


def watchers_kept_looking(history: History) -> list[str]:
    """Where nobody looked, nothing is known."""
    if not history.meta.gaps_are_judged:
        return []
    moments = [clock.at_ns for clock in history.all(Clock)]
    gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(moments)]
    worst_s = max(gaps, default=0.0)
    return [f"nobody looked for {worst_s:.1f} s"] if worst_s > _MAX_GAP_S else []


def reference_is_telling(history: History) -> list[str]:
    """Different requests with different texts, of which every stream is one."""
    texts = {r.request: r.text for r in history.all(Reference)}
    if not texts:
        return ["there is no reference run"]
    found = [f"{name} has no text" for name, text in texts.items() if not text]
    if len(set(texts.values())) * 2 < len(texts):
        found.append("more than half of the texts are the same")
    return found


def faults_struck_under_load(history: History) -> list[str]:
    """A bound on the next token means nothing when nobody waited for one."""
    streams = history.all(Stream)
    return [
        f"{fault.label}: no stream was open"
        for fault in history.all(Fault)
        if "next_token" in fault.bounds_s
        and not any(s.was_open_at(fault.at_ns) and s.arrivals_ns for s in streams)
    ]


def victims_died(history: History) -> list[str]:
    """A kill that nobody died of was no kill. A newborn may die before anybody has seen it."""
    deaths = {(p.pid, p.start_ticks): p.dead_ns for p in history.all(Process)}
    found = []
    for fault in history.all(Fault):
        for target in fault.targets if fault.is_deadly else []:
            dead_ns = deaths.get((target.pid, target.start_ticks))
            if dead_ns is not None and not 0 < dead_ns <= fault.done_ns + _DEATH_S * 1e9:
                found.append(f"{fault.label}: {target.instance} (pid {target.pid}) did not die")
    return found
