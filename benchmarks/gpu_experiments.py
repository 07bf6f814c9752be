"""Experiments of `benchmarks.h200` about faults of the primary, memory and speed."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.gpu_card import Card
from benchmarks.gpu_situation import (
    RESTORED_S,
    STREAMS_S,
    Situation,
    run_streams,
    texts_of,
    wait_quiet,
)
from benchmarks.gpu_system import Figure, gaps_ms
from benchmarks.report import ROOT
from cache.errors import UnderstudyError
from chaos.judge import check_streams, interruptions
from chaos.streams import StreamFleet
from chaos.system import RunningSystem
from supervisor.process.identity import ProcessId

__all__ = [
    "kill_primary",
    "memory_of_parts",
    "speed_of_library",
    "speed_of_system",
    "stop_and_switch",
    "undisturbed",
]

Fault = Callable[[RunningSystem, int], tuple[str, int]]
"""Does something to a system; its name and its moment in monotonic nanoseconds."""

_SPEED_ROUNDS: Final = 3


def undisturbed(at: Situation) -> list[Figure]:
    """The reference: texts to compare with, and the pace of an ordinary day."""
    began = time.monotonic_ns()
    records = run_streams(at, at.requests)
    at.texts = texts_of(records)
    prompt_tokens = sum(len(r.prompt.split()) for r in at.requests)
    all_began_s = (max(r.arrivals_ns[0] for r in records) - began) / 1e9
    attached = [e["attach_ms"] for e in at.events("engine_ready") if e.get("attach_ms")]
    loads = [c.load_s for c in at.system.admin.status().group.cache if c.load_s is not None]
    return [
        Figure.of("between two tokens, eight long streams", gaps_ms(records, after_s=0.5)),
        Figure.of("prompt tokens per second, while decoding", [prompt_tokens / all_began_s],
                  unit="tokens/s"),
        Figure.of("attach: receive, map, bind all parameters", attached[1:] or attached,
                  target="<= 30 ms"),
        Figure.of("load from a memory file system", loads, unit="s"),
    ]  # fmt: skip


def kill_primary(at: Situation, *, kills: int) -> list[Figure]:
    """SIGKILL, wait until redundant, again; until the streams end."""
    return _under_faults(at, "SIGKILL", "p99 <= 100 ms", limit=kills, faults=_kill)


def stop_and_switch(at: Situation, *, stops: int, switches: int) -> list[Figure]:
    """Some SIGSTOPs, then switchovers, under streams with short prompts and their own reference."""
    short = at.short(8, max_tokens=200 * (stops + switches // 2))
    texts = texts_of(run_streams(at, short))
    at = replace(at, requests=short, texts=texts)

    def fault(system: RunningSystem, number: int) -> tuple[str, int]:
        if number < stops:
            return "SIGSTOP", system.kill("primary", signal.SIGSTOP)[1]
        moment_ns = time.monotonic_ns()
        system.admin.post("/v1/promote", timeout_s=30)
        return "switchover", moment_ns

    return _under_faults(at, "SIGSTOP", "p99 <= 600 ms", limit=stops + switches, faults=fault)


def _kill(system: RunningSystem, _number: int) -> tuple[str, int]:
    return "SIGKILL", system.kill("primary")[1]


def _under_faults(
    at: Situation, name: str, target: str, *, limit: int, faults: Fault
) -> list[Figure]:
    """Faults under one set of streams; the samples are taken from what clients received."""
    system = at.system
    moments: list[tuple[str, int]] = []
    restored: list[float] = []
    pauses = random.Random(2)  # noqa: S311 - the same moments in every run
    attached = len(at.events("engine_ready"))
    with StreamFleet(system.base_url, at.requests) as fleet:
        fleet.wait_tokens(8, timeout_s=120)
        while len(moments) < limit and not fleet.is_done:
            old = system.process("primary")
            kind, moment_ns = faults(system, len(moments))
            _wait_whole(system, old)
            moments.append((kind, moment_ns))
            if kind != "switchover":
                restored.append((time.monotonic_ns() - moment_ns) / 1e6)
            # Far enough from the next fault to tell their gaps apart.
            time.sleep(pauses.uniform(0.6, 0.9) if kind == "switchover" else 0.15)
        records = fleet.wait_done(timeout_s=STREAMS_S)
    check_streams(records, at.texts)
    figures = []
    for one in dict.fromkeys(kind for kind, _ in moments):
        felt = [i for kind, ns in moments if kind == one for i in interruptions(records, ns)]
        aim = target if one == name else "p99 <= 100 ms"
        events = sum(1 for kind, _ in moments if kind == one)
        figures += [
            Figure.of(f"{one} -> next token", [i.next_token_ms for i in felt], target=aim,
                      note=f"{events} events"),
            Figure.of(f"{one}: longest gap", [i.gap_ms for i in felt]),
        ]  # fmt: skip
    figures.append(Figure.of(f"{name} -> redundant again", restored, target="<= 1 s"))
    again = [e["attach_ms"] for e in at.events("engine_ready")[attached:] if e.get("attach_ms")]
    figures.append(Figure.of("attach of those engines", again, target="<= 30 ms"))
    for phase, values in _phases(system, len(moments)).items():
        figures.append(Figure.of(f"of which {phase}, at the supervisor", values))
    return figures


def _wait_whole(system: RunningSystem, old: ProcessId) -> None:
    system.wait_whole(timeout_s=RESTORED_S, not_led_by=old)


def _phases(system: RunningSystem, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for operation in system.admin.history()[-count:]:
        for phase, value in operation.phases_ms.items():
            found.setdefault(f"{operation.kind} {phase}", []).append(value)
    return found


def memory_of_parts(at: Situation) -> list[Figure]:
    """What each engine takes beside the arenas, and what a bare context takes."""
    admin, card, system = at.system.admin, at.card, at.system
    wait_quiet(at)  # every graph is captured by then
    with_batch = card.settled_mib()
    admin.post("/v1/evict/chat-batch", hold=True, timeout_s=20)
    with_standby = card.settled_mib()
    admin.post("/v1/pause")
    system.kill("standby")
    without = card.settled_mib()
    bare = _bare_context_mib(card)
    admin.post("/v1/unpause")
    admin.post("/v1/resume/chat-batch", timeout_s=30)
    system.wait_whole(timeout_s=RESTORED_S)
    cache = admin.status().group.cache[0]
    arenas = (cache.weights_bytes + cache.kv_bytes) / (1 << 20)
    others = without - at.empty_mib - arenas
    return [
        Figure.of("weights and KV arena", [arenas], unit="MiB"),
        Figure.of("parked standby", [with_standby - without], unit="MiB"),
        Figure.of("of which over a bare context", [with_standby - without - bare], unit="MiB",
                  target="<= 1024 MiB"),
        Figure.of("a bare context", [bare], unit="MiB"),
        Figure.of("batch engine, its own KV included", [with_batch - with_standby], unit="MiB"),
        Figure.of("primary and daemon beside the arenas", [others], unit="MiB"),
    ]  # fmt: skip


def _bare_context_mib(card: Card) -> float:
    before = card.settled_mib()
    code = "import torch;torch.zeros(1,device='cuda');print('up',flush=True);input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None  # noqa: S101 - a pipe was asked for
        child.stdout.readline()
        used = card.settled_mib() - before
        child.kill()
    card.settled_mib()
    return used


def speed_of_system(at: Situation, batches: Sequence[int]) -> list[Figure]:
    """Tokens per second through the gateway, all streams together, while all decode.

    A stream must give the same text in every round and at every batch size.
    """
    figures = []
    texts: dict[str, str] = {}
    wait_quiet(at)  # graphs for every length are captured by then
    run_streams(at, at.short(2, max_tokens=16))
    for count in batches:
        short = [replace(r, temperature=0.0) for r in at.short(count, max_tokens=200)]
        speeds = []
        for _ in range(_SPEED_ROUNDS):
            records = run_streams(at, short)
            texts = texts_of(records) | texts
            check_streams(records, texts)
            begun = max(r.arrivals_ns[0] for r in records)
            ended = min(r.arrivals_ns[-1] for r in records)
            tokens = sum(sum(1 for ns in r.arrivals_ns if begun < ns <= ended) for r in records)
            speeds.append(tokens / ((ended - begun) / 1e9))
        figures.append(Figure.of(f"Understudy, batch {count}", speeds, unit="tokens/s"))
    return figures


def speed_of_library(folder: Path, batches: Sequence[int]) -> list[Figure]:
    """The same model through `transformers` generate, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.library_speed", str(folder), *map(str, batches)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    if done.returncode:
        raise UnderstudyError(f"library_speed ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return [
        Figure.of(f"transformers generate, batch {count}", speeds, unit="tokens/s")
        for count, speeds in found.items()
    ]
