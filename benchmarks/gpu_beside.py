"""Experiments of `benchmarks.h200` about the batch engine: giving way, and how it is felt."""

import time
from dataclasses import replace
from typing import Final

from benchmarks.gpu_card import MemoryWatch, settled_ms
from benchmarks.gpu_situation import RESTORED_S, Situation, run_streams, texts_of, wait_quiet
from benchmarks.gpu_system import Figure, gaps_ms, timed_ms
from chaos.client import wait_until
from chaos.judge import Spread
from chaos.streams import BrokenStreamError, StreamFleet, StreamRecord
from chaos.system import RunningSystem

__all__ = ["batch_ladder", "beside_others"]

_REFERENCE_TOKENS: Final = 240
"""Of batch streams that are cut short by an eviction: more than they get until then."""
_PACE_ROUNDS: Final = 2


def batch_ladder(at: Situation, *, rounds: int) -> list[Figure]:
    """Freeze, thaw, evict, resume under a batch engine that computes."""
    admin, card = at.system.admin, at.card
    freeze, evict, back, share, ready = [], [], [], [], []
    work = at.short(8, max_tokens=3500, model="chat:batch")
    texts = texts_of(run_streams(at, [replace(r, max_tokens=_REFERENCE_TOKENS) for r in work]))
    for _ in range(rounds):
        with StreamFleet(at.system.base_url, work) as fleet:
            fleet.wait_tokens(4)
            freeze.append(timed_ms(lambda: admin.post("/v1/freeze/chat-batch", timeout_s=20)))
            admin.post("/v1/thaw/chat-batch", timeout_s=20)
            before_mib = card.settled_mib(still_s=0.3)
            with MemoryWatch(card) as watch:
                began = time.monotonic()
                admin.post("/v1/evict/chat-batch", hold=True, timeout_s=20)
                evict.append((time.monotonic() - began) * 1e3)
                card.settled_mib(still_s=0.8)
            back.append(settled_ms(watch.samples, began))
            share.append(before_mib - watch.samples[-1][1])
        _check_beginnings(fleet.records, texts)
        ready.append(timed_ms(lambda: _resume_batch(at.system)))
    return [
        Figure.of("freeze", freeze, target="<= 20 ms"),
        Figure.of("evict, order to answer", evict),
        Figure.of("evict -> all of its memory is free", back, target="<= 200 ms"),
        Figure.of("memory that came free", share, unit="MiB"),
        Figure.of("resume -> serves again", ready, target="<= 1 s"),
    ]


def _check_beginnings(records: list[StreamRecord], texts: dict[str, str]) -> None:
    """What arrived until the eviction must be what the reference says, as far as both go."""
    for record in records:
        expected = texts[record.request.name]
        length = min(len(record.text), len(expected))
        if not length or record.text[:length] != expected[:length]:
            raise BrokenStreamError(
                f"{record.request.name}: {record.text[:length]!r} instead of {expected[:length]!r}"
            )


def _resume_batch(system: RunningSystem) -> None:
    system.admin.post("/v1/resume/chat-batch", timeout_s=30)
    wait_until(lambda: _batch_serves(system), "the batch engine", timeout_s=30)


def _batch_serves(system: RunningSystem) -> bool:
    engine = system.admin.status().group.engine("batch")
    return engine is not None and engine.state == "batch"


def beside_others(at: Situation) -> list[Figure]:
    """The pace of short streams: with a parked standby, beside batch work, frozen, evicted, alone.

    All of it twice, so that a drift of the machine shows.
    """
    admin, short = at.system.admin, at.short(8, max_tokens=300)
    gaps: dict[str, list[list[float]]] = {}
    texts: dict[str, str] = {}

    def pace(what: str) -> None:
        records = run_streams(at, short, texts)
        texts.update(texts_of(records))
        gaps.setdefault(what, []).append(gaps_ms(records))

    work = at.short(8, max_tokens=3500, model="chat:batch")
    for _ in range(_PACE_ROUNDS):
        is_quiet = wait_quiet(at)
        pace("standby parked, batch idle" if is_quiet else "standby and batch not at rest")
        with StreamFleet(at.system.base_url, work) as fleet:
            fleet.wait_tokens(4)
            pace("batch saturating")
            admin.post("/v1/freeze/chat-batch", timeout_s=20)
            pace("batch frozen")
            admin.post("/v1/evict/chat-batch", hold=True, timeout_s=20)
        at.card.settled_mib()
        pace("batch evicted")
        admin.post("/v1/pause")
        at.system.kill("standby")
        at.card.settled_mib()
        pace("alone")
        admin.post("/v1/unpause")
        at.system.wait_whole(timeout_s=RESTORED_S)
        _resume_batch(at.system)
    return [_pace_figure(what, rounds) for what, rounds in gaps.items()]


def _pace_figure(what: str, rounds: list[list[float]]) -> Figure:
    halves = " then ".join(f"{s.p50:.2f}/{s.p99:.2f}" for s in map(Spread.of, rounds))
    every = [gap for one in rounds for gap in one]
    return Figure.of(f"between two tokens, {what}", every, note=f"p50/p99 {halves}")
