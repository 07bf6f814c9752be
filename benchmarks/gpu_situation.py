"""A running system under an experiment of `benchmarks.h200`: streams through it, its quiet."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.gpu_card import Card
from benchmarks.gpu_system import requests_for
from chaos.judge import check_streams
from chaos.streams import StreamFleet, StreamRecord, StreamRequest
from chaos.system import RunningSystem

__all__ = ["RESTORED_S", "STREAMS_S", "Situation", "run_streams", "texts_of", "wait_quiet"]

RESTORED_S: Final = 60.0
STREAMS_S: Final = 300.0
_CAPTURES_BEGIN_S: Final = 5.5
"""A little longer than `_CAPTURE_DELAY_S` of `engines.native.scheduler`."""
_QUIET_TIMEOUT_S: Final = 15.0
_LOOK_S: Final = 1.0
_IDLE_SHARE: Final = 0.25
"""Of one core. Health checks and canaries take a few hundredths, a capture all of it."""


@dataclass(slots=True)
class Situation:
    """A running system, and what is known about it."""

    system: RunningSystem
    card: Card
    requests: list[StreamRequest]
    config: dict[str, Any]
    folder: Path
    empty_mib: float  # used on the card before the system was started
    texts: dict[str, str] = field(default_factory=dict)

    def short(self, count: int, *, max_tokens: int, model: str = "chat") -> list[StreamRequest]:
        """Streams with prompts of 128 tokens."""
        vocabulary = self.config["vocab_size"]
        return requests_for(
            [128] * count, max_tokens=max_tokens, vocabulary=vocabulary, model=model
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, oldest first."""
        path = self.system.state_dir / "events.jsonl"
        lines = path.read_text("utf-8").splitlines()
        return [e for e in map(json.loads, lines) if e.get("kind") == kind]


def run_streams(
    at: Situation, requests: Sequence[StreamRequest], texts: dict[str, str] | None = None
) -> list[StreamRecord]:
    """Run to the end; every stream must be complete and, with `texts` given, say what they say."""
    with StreamFleet(at.system.base_url, requests) as fleet:
        records = fleet.wait_done(timeout_s=STREAMS_S)
    check_streams(records, texts or texts_of(records))
    return records


def texts_of(records: Sequence[StreamRecord]) -> dict[str, str]:
    """What a run said, as a reference for others."""
    return {record.request.name: record.text for record in records}


def wait_quiet(at: Situation) -> bool:
    """Wait until idle engines have nothing left to prepare; False when time ran out before.

    An engine captures its graphs when it has been idle for some seconds behind its start or change
    of role, which keeps the card busy. It does not say when it is through; but then it neither
    computes nor takes memory any more, and both can be seen from outside.
    """
    time.sleep(_CAPTURES_BEGIN_S)
    deadline = time.monotonic() + _QUIET_TIMEOUT_S
    while time.monotonic() < deadline:
        before, before_mib = _cpu_seconds(at.system), at.card.used_mib()
        time.sleep(_LOOK_S)
        after, after_mib = _cpu_seconds(at.system), at.card.used_mib()
        is_idle = all(after[pid] - before.get(pid, 0.0) < _IDLE_SHARE * _LOOK_S for pid in after)
        if is_idle and abs(after_mib - before_mib) <= 1.0:
            return True
    sys.stdout.write(f"engines are still busy after {_CAPTURES_BEGIN_S + _QUIET_TIMEOUT_S} s\n")
    return False


def _cpu_seconds(system: RunningSystem) -> dict[int, float]:
    """What each engine has computed so far, on the host."""
    found = {}
    for engine in system.admin.status().group.engines:
        if engine.pid:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was just replaced
                times = psutil.Process(engine.pid).cpu_times()
                found[engine.pid] = times.user + times.system
    return found
