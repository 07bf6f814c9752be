"""One round of a fault under streams, and the figures of many rounds.

A round is always the same sentence: the group is redundant, streams run, something happens in
the middle, every text must be the one of an undisturbed run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from chaos.judge import Interruption, Spread, check_streams, interruptions, reference_texts
from chaos.streams import StreamFleet, StreamRequest, Transport, make_requests
from chaos.system import RunningSystem

STREAMS = 16
STREAM_TOKENS = 240
SPLIT_PAIRS_TOP_K = 5
"""Odd: of the last pair of twins (`near_ties`) one is kept, and rounding says which."""


def make_load(streams: int = STREAMS, tokens: int = STREAM_TOKENS) -> list[StreamRequest]:
    """Half greedy, half at temperature 1, of which every second one cuts off the unlikely."""
    return [
        replace(request, top_k=SPLIT_PAIRS_TOP_K) if index % 4 == 3 else request
        for index, request in enumerate(make_requests(streams, max_tokens=tokens))
    ]


@dataclass(slots=True)
class Load:
    """Requests with the texts that they must give."""

    requests: list[StreamRequest]
    texts: dict[str, str]

    @classmethod
    def of(
        cls, system: RunningSystem, *, streams: int = STREAMS, tokens: int = STREAM_TOKENS
    ) -> "Load":
        """The reference run: no fault, another order of arrival."""
        requests = make_load(streams, tokens)
        return cls(requests, reference_texts(system.base_url, requests))

    def under_fault(
        self,
        system: RunningSystem,
        fault: Callable[[], int],
        *,
        after_tokens: int,
        transport: Transport = "sse",
    ) -> list[Interruption]:
        """Run the streams, let `fault` (which returns its moment) happen, and check every text."""
        with StreamFleet(system.base_url, self.requests, transport=transport) as fleet:
            fleet.wait_tokens(after_tokens)
            moment_ns = fault()
            records = fleet.wait_done()
        check_streams(records, self.texts)
        felt = interruptions(records, moment_ns)
        assert felt, "no stream was under way at the fault, so this round proves nothing"
        return felt


@dataclass(slots=True)
class Figures:
    """What the rounds of one module measured; printed and written at its end."""

    name: str
    rounds: list[list[Interruption]] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, felt: Sequence[Interruption], phases_ms: Mapping[str, float]) -> None:
        """Take one round: what clients felt, and the phases that the supervisor measured."""
        self.rounds.append(list(felt))
        for phase, duration_ms in phases_ms.items():
            self.phases_ms.setdefault(phase, []).append(duration_ms)

    def summary(self) -> dict[str, object]:
        """Spread over all streams of all rounds, in milliseconds."""
        felt = [one for round_ in self.rounds for one in round_]
        return {
            "name": self.name,
            "rounds": len(self.rounds),
            "next_token_ms": asdict(Spread.of([one.next_token_ms for one in felt])),
            "gap_ms": asdict(Spread.of([one.gap_ms for one in felt])),
            "phases_ms": {name: asdict(Spread.of(ms)) for name, ms in self.phases_ms.items()},
        }

    def write(self, directory: Path) -> str:
        """Write the JSON file; the lines to print."""
        rounds = [[asdict(one) for one in round_] for round_ in self.rounds]
        whole = json.dumps({**self.summary(), "samples": rounds}, indent=1)
        (directory / f"{self.name}.json").write_text(whole, "utf-8")
        felt = [one for round_ in self.rounds for one in round_]
        spreads = {
            "next token": Spread.of([one.next_token_ms for one in felt]),
            "gap": Spread.of([one.gap_ms for one in felt]),
            **{name: Spread.of(ms) for name, ms in self.phases_ms.items()},
        }
        return "\n".join(
            f"{self.name}: {name:12} p50 {s.p50:7.1f} ms, p99 {s.p99:7.1f}, worst {s.worst:7.1f}"
            for name, s in spreads.items()
        )
