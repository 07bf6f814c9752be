"""Who was born, who died, and why: what the product promises about the lives of its processes.

Lives are taken from the kernel's view of the processes; a death needs a reason in the record: a
fault of ours, a fence that followed one, an order, or a start that could not be finished.
"""

import itertools
from typing import Final

from chaos.history import Command, Event, Fault, History, Process
from supervisor.core.restart import FIRST_BACKOFF_S
from supervisor.topology.schema import Failover, parse_duration

__all__ = ["nobody_died_uninvited", "pause_means_pause", "restarts_back_off"]

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


def restarts_back_off(history: History) -> list[str]:
    """The second young death in a row waits longer than the first, and so on.

    One that had served as primary is started again at once, for the first few times.
    """
    stable_s = float(str(parse_duration(str(history.meta.system.get("stable_after", "1s")))))
    longest_s = Failover().max_backoff
    leaders: dict[str, Process] = {}  # a helper carries the marker of the engine that started it
    for process in sorted(history.all(Process), key=lambda p: p.seen_ns):
        leaders.setdefault(process.instance, process)
    by_name: dict[str, list[Process]] = {}
    for process in leaders.values():
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


def _stop_ns(history: History) -> int:
    stops = [e.at_ns for e in history.events("stopping")]
    stops += [c.at_ns for c in history.all(Command) if c.label == "stop"]
    return min(stops, default=history.ended_ns)
