"""Experiments of `benchmarks.h200` about what comes back and how soon: a standby, an engine."""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.gpu_situation import RESTORED_S, STREAMS_S, Situation, run_streams, texts_of
from benchmarks.gpu_system import Figure
from chaos.client import wait_until
from chaos.judge import check_streams, interruptions
from chaos.streams import StreamFleet
from chaos.system import RunningSystem
from supervisor.process.identity import ProcessId

__all__ = ["kill_alone", "kill_standby", "kill_with_zygote", "restarts"]

_STANDBY_TOKENS: Final = 1000
"""Of each stream while standbys are killed: some seven deaths, and a reference of 8 s."""


def kill_standby(at: Situation, *, kills: int) -> list[Figure]:
    """SIGKILL of the standby, again and again, while the primary decodes.

    The same short streams are run again and again: one undisturbed run is the reference of all.
    """
    short = at.short(8, max_tokens=min(_STANDBY_TOKENS, 2 * at.requests[0].max_tokens))
    began = time.monotonic()
    texts = texts_of(run_streams(at, short))
    streams_s = time.monotonic() - began
    restored: list[float] = []
    gaps: list[float] = []
    starts = len(at.events("engine_ready"))
    while len(restored) < kills:
        with StreamFleet(at.system.base_url, short) as fleet:
            began = time.monotonic()
            fleet.wait_tokens(8, timeout_s=60)
            began_ns = time.monotonic_ns()
            while True:
                restored.append(_kill_standby_once(at.system))
                ended_ns = time.monotonic_ns()
                # The next one must be over before the streams are.
                is_late = time.monotonic() - began + 2 * restored[-1] / 1e3 > streams_s
                if len(restored) >= kills or is_late:
                    break
                time.sleep(0.3)
            records = fleet.wait_done(timeout_s=STREAMS_S)
        check_streams(records, texts)
        gaps += [
            (after - before) / 1e6
            for record in records
            for before, after in zip(record.arrivals_ns, record.arrivals_ns[1:], strict=False)
            if began_ns <= before <= ended_ns
        ]
    took = [e["took_s"] * 1e3 for e in at.events("engine_ready")[starts:]]
    attached = [e["attach_ms"] for e in at.events("engine_ready")[starts:] if e.get("attach_ms")]
    return [
        Figure.of("standby gone -> redundant again", restored, target="<= 1 s"),
        Figure.of("of which fork until ready", took),
        Figure.of("attach of those engines", attached, target="<= 30 ms"),
        Figure.of("between two tokens meanwhile", gaps),
    ]


def _kill_standby_once(system: RunningSystem) -> float:
    """Milliseconds until there is another."""
    gone, moment_ns = system.kill("standby")
    wait_until(partial(_has_other_standby, system, gone), "a new standby", timeout_s=RESTORED_S)
    return (time.monotonic_ns() - moment_ns) / 1e6


def _has_other_standby(system: RunningSystem, old: ProcessId) -> bool:
    status = system.status()
    standby = status.group.engine("standby") if status is not None else None
    return (
        status is not None
        and standby is not None
        and standby.pid != old.pid
        and status.group.is_redundant
    )


def kill_alone(system: RunningSystem) -> int:
    """SIGKILL of the only engine; the zygote forks the next."""
    return system.kill("primary")[1]


def kill_with_zygote(system: RunningSystem) -> int:
    """SIGKILL of the only engine and of what could fork it: everything is imported anew."""
    primary = system.process("primary")
    system.kill("zygote")
    return system.kill_process(primary)


def restarts(
    at: Situation, what: str, fault: Callable[[RunningSystem], int], *, rounds: int
) -> list[Figure]:
    """Without a standby: from the death of the only engine to the next token of its streams."""
    short = at.short(8, max_tokens=600)
    texts = texts_of(run_streams(at, short))
    felt: list[float] = []
    for _ in range(rounds):
        with StreamFleet(at.system.base_url, short) as fleet:
            fleet.wait_tokens(30, timeout_s=60)
            old = at.system.process("primary")
            moment_ns = fault(at.system)
            at.system.wait_whole(timeout_s=STREAMS_S, not_led_by=old)
            records = fleet.wait_done(timeout_s=STREAMS_S)
        check_streams(records, texts)
        felt += [one.next_token_ms for one in interruptions(records, moment_ns)]
    return [Figure.of(f"no standby, {what}: SIGKILL -> next token", felt, note=f"{rounds} rounds")]
