"""Verdicts from time-stamped samples. Pure: the caller brings the clock.

HUNG is a judgement, so it needs more than silence: either the process is stopped (state `T`)
although nobody ordered it, or there was work and no step for `hang_after` while the scheduler's
own accounting shows that the process was not waiting for a CPU. A starved engine is BUSY, and BUSY
is never restarted. Samples that come late (the supervisor itself was stalled) void the judgement.

WARNING: the kernel adds to a thread's `run_delay` only when the thread gets its CPU. One that has
waited all the time shows no growth at all, but is runnable and has hardly run: that counts too.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["RUNNING_SHARE", "STARVED_SHARE", "ProgressJudge", "Sample", "Verdict"]

STARVED_SHARE: Final = 0.25
"""Waiting for a CPU for more than this share of the silence: starved, not hung. Steps of 10 ms
beside 40 spinning processes showed 95 % (measured on 2 cores); a deadlock shows about 0."""

RUNNING_SHARE: Final = 0.5
"""Runnable, yet on a CPU for less than this share of the silence: it waits for one right now."""


class Verdict(StrEnum):
    """How an engine does, worst last."""

    HEALTHY = "healthy"
    BUSY = "busy"  # working at its limit or starved of CPU: never a reason to restart it
    DEGRADED = "degraded"  # answers, but wrongly (never promoted) or not over HTTP (promoted last)
    HUNG = "hung"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an engine."""

    at_ns: int  # CLOCK_MONOTONIC
    steps: int  # finished model steps
    has_work: bool  # rows decode or requests wait
    is_stopped: bool  # state T
    on_cpu_ns: int  # ran, all threads, since their start
    run_delay_ns: int  # waited on a run queue, all threads, since their start
    is_runnable: bool  # some thread is in state R


class ProgressJudge:
    """Turns the samples of one instance into a verdict. Feed it in order."""

    def __init__(self, *, hang_after_s: float, interval_s: float) -> None:
        self._hang_after_ns = int(hang_after_s * 1e9)
        self._void_after_ns = int(max(2 * interval_s, 0.05) * 1e9)
        self._last: Sample | None = None
        self._quiet_since: Sample | None = None

    @property
    def quiet_since_ns(self) -> int | None:
        """When the current silence began; None when nothing was seen yet."""
        return self._quiet_since.at_ns if self._quiet_since is not None else None

    def void(self) -> None:
        """Forget everything: what was seen says nothing about the engine."""
        self._last = self._quiet_since = None

    def observe(self, sample: Sample) -> Verdict:
        """The verdict after this sample."""
        last, self._last = self._last, sample
        late = last is not None and sample.at_ns - last.at_ns > self._void_after_ns
        moved = last is None or sample.steps != last.steps
        waiting = sample.has_work or sample.is_stopped
        if late or moved or not waiting or self._quiet_since is None:
            self._quiet_since = sample
            return Verdict.BUSY if sample.has_work and moved else Verdict.HEALTHY
        silent_ns = sample.at_ns - self._quiet_since.at_ns
        if silent_ns < self._hang_after_ns:
            return Verdict.BUSY
        if not sample.is_stopped and _is_starved(self._quiet_since, sample, silent_ns):
            return Verdict.BUSY
        return Verdict.HUNG


def _is_starved(before: Sample, now: Sample, silent_ns: int) -> bool:
    """Whether waiting for a CPU explains the silence."""
    delayed_ns = now.run_delay_ns - before.run_delay_ns
    if delayed_ns > STARVED_SHARE * silent_ns:
        return True
    return now.is_runnable and now.on_cpu_ns - before.on_cpu_ns < RUNNING_SHARE * silent_ns
