"""Latencies of a record: what clients felt and operators waited for, by kind of fault."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from chaos.guarantees import next_fault_ns, next_token_ms, whole_after_s
from chaos.history import Command, Fault, History, Stream
from chaos.judge import Spread

__all__ = ["LatencyRow", "latency_rows"]


_IN_FLIGHT_NS: Final = 50_000_000
"""What was under way at a fault arrives within this time; a gap that begins later is that of the
new engine, which starts on the same cores. The checkers judge it as well."""


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One line of the table, in milliseconds."""

    what: str
    rounds: int
    spread: Spread
    values: tuple[float, ...]

    @classmethod
    def of(cls, what: str, rounds: int, values: list[float]) -> "LatencyRow":
        """A row from its samples."""
        return cls(what, rounds, Spread.of(values), tuple(round(v, 3) for v in values))


def latency_rows(history: History) -> list[LatencyRow]:
    """For each kind of fault: the next token of every open stream, and wholeness."""
    rows = []
    for label, faults in _by_label(history).items():
        felt = [ms for fault in faults for ms in _felt(history, fault)]
        if felt:
            rows.append(LatencyRow.of(f"{label} -> next token", len(faults), felt))
        whole = [s * 1000 for f in faults if (s := whole_after_s(history, f)) is not None]
        if whole:
            rows.append(LatencyRow.of(f"{label} -> whole again", len(faults), whole))
    rows += _adoption(history)
    rows += _donations(history)
    rows += _phases(history)
    return rows


def _by_label(history: History) -> dict[str, list[Fault]]:
    found: dict[str, list[Fault]] = {}
    for fault in history.all(Fault):
        found.setdefault(fault.label, []).append(fault)
    return found


def _felt(history: History, fault: Fault) -> Iterator[float]:
    for stream in history.all(Stream):
        took_ms = next_token_ms(
            stream, fault.at_ns, next_fault_ns(history, fault), begins_within_ns=_IN_FLIGHT_NS
        )
        if took_ms is not None and not stream.error:
            yield took_ms


def _adoption(history: History) -> Iterator[LatencyRow]:
    """From the start of a new supervisor process until its status names a serving primary."""
    took = []
    commands = [c for c in history.all(Command) if c.label == "start_supervisor"]
    for command in commands:
        served = (
            s.at_ns + s.took_ms * 1e6
            for s in history.samples()
            if s.at_ns > command.at_ns and s.is_up and s.primary is not None
        )
        first_ns = next(served, None)
        if first_ns is not None:
            took.append((first_ns - command.at_ns) / 1e6)
    if took:
        yield LatencyRow.of("start of a supervisor -> it serves", len(took), took)
    adopted = [
        (e.at_ns - s.at_ns) / 1e6
        for s in history.events("supervisor_started")
        for e in list(history.events("started", "supervisor_started"))
        if e.kind == "started" and e.seq > s.seq and _is_next_start(history, s.seq, e.seq)
        and any(c.at_ns < s.at_ns for c in commands)
    ]  # fmt: skip
    if adopted:
        yield LatencyRow.of("of which adoption, at the supervisor", len(adopted), adopted)


def _is_next_start(history: History, began_seq: int, seq: int) -> bool:
    return not any(began_seq < e.seq < seq for e in history.events("supervisor_started"))


def _donations(history: History) -> Iterator[LatencyRow]:
    """From the death of a cache daemon until the next serves the same memory."""
    took, died_ns = [], 0
    for event in history.events("cache_died", "memory_donated"):
        if event.kind == "cache_died":
            died_ns = event.at_ns
        elif died_ns:
            took.append((event.at_ns - died_ns) / 1e6)
            died_ns = 0
    if took:
        yield LatencyRow.of("cache daemon died -> memory served again", len(took), took)


def _phases(history: History) -> Iterator[LatencyRow]:
    """Phases of failovers as the supervisor measured them."""
    by_phase: dict[tuple[str, str], list[float]] = {}
    for event in history.events("failover_completed", "switchover_completed"):
        kind = event.kind.removesuffix("_completed")
        cause = str(event.event.get("cause", "")) if kind == "failover" else ""
        for phase, ms in dict(event.event.get("phases_ms", {})).items():
            by_phase.setdefault((f"{kind} {cause}".strip(), phase), []).append(float(ms))
    for (kind, phase), values in by_phase.items():
        yield LatencyRow.of(f"{kind}: {phase}, at the supervisor", len(values), values)
