"""What the `/metrics` page of an HTTP engine says about its progress. Pure.

The native engine has a progress page in shared memory. Any other engine is judged by the token
counters that it publishes anyway: they move with every piece of work, and a `/health` that answers
200 while they stand still proves nothing.

WARNING: counters that an engine raises only when a request ends move as rarely as requests end.
`hang_after` must be longer than the longest request of such an engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["DIALECTS", "Dialect", "EngineCounters", "read_counters"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names under which one family of engines publishes its work."""

    work: frozenset[str]  # changes with every piece of work: tokens read or made
    requests: frozenset[str]  # that run or wait now


DIALECTS: Final = {
    "vllm": Dialect(
        frozenset({"vllm:prompt_tokens_total", "vllm:generation_tokens_total"}),
        frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"}),
    ),
    "sglang": Dialect(
        frozenset(
            {
                "sglang:prompt_tokens_total",
                "sglang:generation_tokens_total",
                "sglang:num_used_tokens",  # moves within a request; the counters may not
            }
        ),
        frozenset({"sglang:num_running_reqs", "sglang:num_queue_reqs"}),
    ),
    "understudy": Dialect(
        frozenset({"understudy_native_tokens_total", "understudy_native_prefill_chunks_total"}),
        frozenset({"understudy_native_active", "understudy_native_queued"}),
    ),
}


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """One look at the page."""

    work: int  # any other value than before is progress, also a lower one
    requests: int


def read_counters(page: str) -> EngineCounters | None:
    """The counters of the first dialect that the page speaks; None when it speaks none.

    All series of a name are added up: an engine may have several models or ranks.
    """
    totals: dict[str, float] = {}
    for name, value in _samples(page):
        totals[name] = totals.get(name, 0.0) + value
    for dialect in DIALECTS.values():
        if totals.keys() & dialect.work and totals.keys() & dialect.requests:
            return EngineCounters(
                work=int(sum(totals.get(name, 0.0) for name in dialect.work)),
                requests=int(sum(totals.get(name, 0.0) for name in dialect.requests)),
            )
    return None


def _samples(page: str) -> Iterator[tuple[str, float]]:
    """Names without labels, and finite values; what is no sample is passed over."""
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        head, brace, rest = line.partition("{")
        fields = rest.rpartition("}")[2].split() if brace else line.split()[1:]
        name = head.strip() if brace else line.split(" ", 1)[0]
        try:
            value = float(fields[0])
        except (IndexError, ValueError):
            continue
        if value == value and abs(value) != float("inf"):  # noqa: PLR0124 - NaN differs from itself
            yield name, value
