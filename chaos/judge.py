"""Judging what clients saw: complete and right, and how long a fault was felt.

What equality proves: every request is deterministic (greedy, or with a seed), so a text equal to
that of an undisturbed run has no token lost, repeated, reordered or recomputed differently.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from chaos.streams import BrokenStreamError, StreamFleet, StreamRecord, StreamRequest

__all__ = [
    "Interruption",
    "Spread",
    "check_streams",
    "interruptions",
    "percentile",
    "reference_texts",
]

_IN_FLIGHT_NS: Final = 50_000_000
"""Tokens that were under way at the fault arrive within this time; a gap that begins later has
another reason."""

_AFTERMATH_NS: Final = 500_000_000
"""Gaps that begin within this time are felt as part of the fault: a new engine starts beside."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """How one stream lived through a fault."""

    stream: str
    next_token_ms: float  # from the fault to the first token behind the gap that it tore
    gap_ms: float  # the longest time without a token, be it by what follows from the fault


@dataclass(frozen=True, slots=True)
class Spread:
    """p50, p99 and worst of a sample, in the unit of the sample."""

    count: int
    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of a sample; zeros for an empty one."""
        if not values:
            return cls(0, 0.0, 0.0, 0.0)
        return cls(len(values), percentile(values, 50), percentile(values, 99), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: always one of the values, never an interpolation."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def reference_texts(
    base_url: str, requests: Sequence[StreamRequest], *, seed: int = 7
) -> dict[str, str]:
    """Texts of an undisturbed run, started in another order and at other moments.

    Raises:
        BrokenStreamError: even without a fault a stream did not come through.
    """
    shuffled = list(requests)
    random.Random(seed).shuffle(shuffled)
    with StreamFleet(base_url, shuffled, spacing_s=0.01) as fleet:
        records = fleet.wait_done()
    texts = {record.request.name: record.text for record in records}
    check_streams(records, texts)
    return texts


def check_streams(records: Sequence[StreamRecord], texts: dict[str, str]) -> None:
    """Every stream complete, and its text the expected one.

    Raises:
        BrokenStreamError: with one sentence for each broken stream.
    """
    problems = [
        f"{record.request.name}: {problem}"
        for record in records
        if (problem := _problem(record, texts[record.request.name])) is not None
    ]
    if problems:
        raise BrokenStreamError(f"{len(problems)} of {len(records)} streams: {'; '.join(problems)}")


def _problem(record: StreamRecord, expected: str) -> str | None:
    if record.error is not None:
        return f"error {record.error}"
    if record.finish_reason != "length":
        return f"finish_reason is {record.finish_reason!r}, not 'length'"
    if not record.has_end_mark:
        return "it ended without [DONE]"
    if record.completion_tokens != record.request.max_tokens:
        return f"{record.completion_tokens} tokens of {record.request.max_tokens}"
    if record.text != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(record.text, expected, strict=False)) if a != b),
            min(len(record.text), len(expected)),
        )
        return (
            f"text differs at character {at} of {len(expected)}: "
            f"{record.text[at : at + 40]!r} instead of {expected[at : at + 40]!r}"
        )
    return None


def interruptions(records: Sequence[StreamRecord], moment_ns: int) -> list[Interruption]:
    """How each stream that was under way at `moment_ns` went on.

    Of the gaps that end after the fault, the longest that begins at it is the one that it tore: a
    chunk that was already under way does not count as the next token.
    """
    found: list[Interruption] = []
    for record in records:
        arrivals = record.arrivals_ns
        if not arrivals or arrivals[0] > moment_ns:
            continue
        gaps = [
            (after - before, before, after)
            for before, after in itertools.pairwise(arrivals)
            if after > moment_ns and before <= moment_ns + _AFTERMATH_NS
        ]
        torn = [gap for gap in gaps if gap[1] <= moment_ns + _IN_FLIGHT_NS]
        if torn:
            resumed_ns = max(torn)[2]
            found.append(
                Interruption(
                    record.request.name, (resumed_ns - moment_ns) / 1e6, max(gaps)[0] / 1e6
                )
            )
    return found
