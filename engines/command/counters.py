"""What the `/metrics` page of a server says about its progress. Pure.

The native engine has a progress page in shared memory. Any other engine is judged by the token
counters that it publishes anyway: they move with every piece of work, and a `/health` that answers
200 while they stand still proves nothing.

WARNING: counters move as rarely as the server moves them: some only when the prompt of a request
has been read, or when it has ended. `hang_after` must be longer than that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["DIALECTS", "Dialect", "EngineCounters", "read_counters"]

_MOST_REQUESTS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names under which one family of engines publishes its work."""

    work: frozenset[str]  # changes with every piece of work: tokens read or made, memory filled
    running: frozenset[str]  # requests that are worked on
    waiting: frozenset[str]  # requests that are not yet


DIALECTS: Final = {
    "vllm": Dialect(
        frozenset(
            {
                "vllm:prompt_tokens_total",
                "vllm:generation_tokens_total",
                "vllm:kv_cache_usage_perc",  # moves while a long prompt is read in chunks
                "vllm:gpu_cache_usage_perc",  # the same, in older releases
            }
        ),
        frozenset({"vllm:num_requests_running"}),
        frozenset({"vllm:num_requests_waiting"}),
    ),
    "sglang": Dialect(
        frozenset(
            {
                "sglang:prompt_tokens_total",
                "sglang:generation_tokens_total",
                "sglang:num_used_tokens",  # moves within a request; the counters may not
            }
        ),
        frozenset({"sglang:num_running_reqs"}),
        frozenset({"sglang:num_queue_reqs"}),
    ),
    "llamacpp": Dialect(
        frozenset(
            {
                "llamacpp:prompt_tokens_total",
                "llamacpp:tokens_predicted_total",
                "llamacpp:n_decode_total",  # moves within a request; the other two may not
            }
        ),
        frozenset({"llamacpp:requests_processing"}),
        frozenset({"llamacpp:requests_deferred"}),
    ),
    "understudy": Dialect(
        frozenset({"understudy_native_tokens_total", "understudy_native_prefill_chunks_total"}),
        frozenset({"understudy_native_active"}),
        frozenset({"understudy_native_queued"}),
    ),
}


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """One look at the page."""

    work: float  # any other value than before is progress, also a lower one
    requests: int  # running and waiting
    waiting: int = 0


def read_counters(page: str) -> EngineCounters | None:
    """The counters of the first dialect that the page speaks; None when it speaks none.

    All series of a name are added up: an engine may have several models or ranks.
    """
    totals: dict[str, float] = {}
    for name, value in _samples(page):
        totals[name] = totals.get(name, 0.0) + value
    for dialect in DIALECTS.values():
        if totals.keys() & dialect.work and totals.keys() & (dialect.running | dialect.waiting):
            waiting = _count(totals, dialect.waiting)
            return EngineCounters(
                work=_sum(totals, dialect.work),
                requests=_count(totals, dialect.running) + waiting,
                waiting=waiting,
            )
    return None


def _sum(totals: dict[str, float], names: frozenset[str]) -> float:
    return sum(totals.get(name, 0.0) for name in sorted(names))


def _count(totals: dict[str, float], names: frozenset[str]) -> int:
    """A number of requests that fits into the page, whatever the server says."""
    return int(min(max(_sum(totals, names), 0.0), _MOST_REQUESTS))


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
