"""A record of a run that went well, to be damaged by tests in one place each."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from chaos.history import (
    Clock,
    Command,
    End,
    EngineSample,
    Entry,
    Event,
    Expectation,
    Fault,
    Held,
    History,
    Meta,
    Metrics,
    Process,
    Reference,
    Role,
    Sample,
    Stream,
    Target,
)

MS = 1_000_000
S = 1_000_000_000

A = Target("primary", 100, 1000, "chat-a-00000001")
KILL_NS = 5 * S


def event(seq: int, kind: str, at_ns: int, **fields: Any) -> Event:
    return Event(at_ns, {"seq": seq, "kind": kind, "text": kind, **fields})


def engine_state(seq: int, at_ns: int, engine: str, was: str, state: str) -> Event:
    return event(seq, "engine_state", at_ns, engine=engine, was=was, state=state)


def stream(name: str, started_ns: int, arrivals_ns: list[int], text: str = "abcd") -> Stream:
    texts = list(text)
    return Stream(
        name=name,
        request="greedy-0",
        transport="sse",
        started_ns=started_ns,
        ended_ns=arrivals_ns[-1] + MS,
        arrivals_ns=arrivals_ns,
        texts=texts,
        finish_reason="length",
        completion_tokens=4,
        has_end_mark=True,
    )


def sample(at_ns: int, *, epoch: int, primary: str | None, pid: int, whole: bool = True) -> Sample:
    engines = [EngineSample("chat-a", "primary" if primary == "chat-a" else "standby", pid=pid)]
    return Sample(
        at_ns=at_ns,
        took_ms=1.0,
        is_up=True,
        state="redundant" if whole else "single",
        epoch=epoch,
        primary=primary,
        is_whole=whole,
        engines=engines,
        pids={"primary": 101 if primary == "chat-b" else 100, "supervisor": 50},
    )


@dataclass
class RecordParts:
    """The entries by kind; change one list and build."""

    meta: Meta = field(
        default_factory=lambda: Meta(
            "one-kill", "One kill", 1, S, 1000.0, {}, {"stable_after": "1s"}
        )
    )
    clocks: list[Clock] = field(
        default_factory=lambda: [Clock(n * S, 1000.0 + n) for n in range(1, 13)]
    )
    references: list[Reference] = field(
        default_factory=lambda: [
            Reference("greedy-0", "p", 0.0, 4, "abcd"),
            Reference("sampled-1", "q", 1.0, 4, "wxyz"),
        ]
    )
    streams: list[Stream] = field(
        default_factory=lambda: [
            stream("greedy-0#1", 4 * S, [4 * S + 100 * MS, 4 * S + 900 * MS,
                                         KILL_NS + 50 * MS, KILL_NS + 60 * MS]),
            stream("greedy-0#2", 8 * S, [8 * S + n * MS for n in (10, 20, 30, 40)]),
        ]
    )  # fmt: skip
    faults: list[Fault] = field(
        default_factory=lambda: [
            Fault("SIGKILL primary", "signal", KILL_NS, KILL_NS + MS, [A],
                  bounds_s={"next_token": 1.0, "whole": 4.0})
        ]
    )  # fmt: skip
    commands: list[Command] = field(default_factory=list)
    expectations: list[Expectation] = field(
        default_factory=lambda: [Expectation("whole yes", KILL_NS + 2 * MS, 8 * S, 60.0)]
    )
    samples: list[Sample] = field(
        default_factory=lambda: [
            sample(4 * S, epoch=1, primary="chat-a", pid=100),
            sample(KILL_NS + 10 * MS, epoch=1, primary="chat-a", pid=100),
            sample(KILL_NS + 100 * MS, epoch=2, primary="chat-b", pid=0, whole=False),
            sample(7 * S, epoch=2, primary="chat-b", pid=102),
        ]
    )
    processes: list[Process] = field(
        default_factory=lambda: [
            Process("chat-a-00000001", 100, 1000, S, KILL_NS - MS, KILL_NS + 4 * MS),
            Process("chat-b-00000001", 101, 1001, S, 12 * S, 0),
            Process("chat-a-00000002", 102, 1002, 6 * S, 12 * S, 0),
        ]
    )
    roles: list[Role] = field(
        default_factory=lambda: [
            Role(2 * S, "chat-a", 100, "primary", 1),
            Role(2 * S + MS, "chat-b", 101, "standby", 1),
            Role(KILL_NS + 20 * MS, "chat-b", 101, "primary", 2),
        ]
    )
    events: list[Event] = field(
        default_factory=lambda: [
            event(1, "supervisor_started", S),
            engine_state(2, 2 * S, "chat-a", "ready", "promoting"),
            engine_state(3, 2 * S, "chat-a", "promoting", "primary"),
            engine_state(4, KILL_NS + 6 * MS, "chat-a", "primary", "fencing"),
            engine_state(5, KILL_NS + 8 * MS, "chat-a", "fencing", "stopped"),
            engine_state(6, KILL_NS + 9 * MS, "chat-b", "standby", "promoting"),
            engine_state(7, KILL_NS + 20 * MS, "chat-b", "promoting", "primary"),
            event(8, "failover_completed", KILL_NS + 21 * MS, cause="dead",
                  phases_ms={"detect": 6.0, "total": 21.0}),
            event(9, "engine_ready", 6 * S, engine="chat-a"),
            event(10, "stopping", 11 * S),
        ]
    )  # fmt: skip
    metrics: list[Metrics] = field(
        default_factory=lambda: [
            Metrics(
                10 * S,
                50,
                9,
                {
                    'understudy_failovers_total{cause="dead",outcome="done"}': 1.0,
                    'understudy_failover_duration_seconds_count{phase="route"}': 1.0,
                    'understudy_restarts_total{kind="engine",name="chat-a"}': 1.0,
                    'understudy_engine_start_seconds_count{how="zygote"}': 1.0,
                    "understudy_events_total": 9.0,
                },
            )
        ]
    )
    held: list[Held] = field(
        default_factory=lambda: [
            Held(3 * S, "before", {"gateway-0-1:60": {"socket": 5, "memfd": 0}}),
            Held(10 * S, "after", {"gateway-0-1:60": {"socket": 6, "memfd": 0}}),
        ]
    )
    others: list[Entry] = field(default_factory=lambda: [End(12 * S)])

    def history(self) -> History:
        entries: list[Entry] = [
            self.meta, *self.clocks, *self.references, *self.streams, *self.faults,
            *self.commands, *self.expectations, *self.samples, *self.processes, *self.roles,
            *self.events, *self.metrics, *self.held, *self.others,
        ]  # fmt: skip
        encoded = [msgspec.json.encode(entry) for entry in entries]
        return History([msgspec.json.decode(line, type=Entry) for line in encoded])
