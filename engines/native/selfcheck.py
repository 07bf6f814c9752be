"""Proof at start that a row's bits depend on its own stream alone.

An exact resume continues a stream in another slot, beside other neighbours, with another attended
length. Whether that gives the same bits is a property of kernels, thread count and shapes on this
very machine, so the engine measures it before it claims it. Everything runs on private memory,
with the real weights and the shapes of serving.

What is proven, each bit for bit:
    rows        every stream moved to another slot (contents, token and position move along)
    neighbours  half of the streams keep still while the others change, or stand still
    prefill     a chunk in the first and in the last slot: logits and what it wrote
    lengths     on the CPU, each attended length against the full one, at 16 positions

A failure of one of the first three means `exact` is not claimed. A length that fails is not used.
"""

import logging
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engines.native.kv import KvMemoryView
from engines.native.model import SlotModel, attended_lengths

__all__ = ["SelfCheck", "prove"]

log = logging.getLogger(__name__)

_SEED: Final = 20_260_101
_LAYERS_OF_A_KIND: Final = 2
"""Layers of a kind have the same shapes; a difference in one reaches the logits through the next.
More layers cost time and prove nothing new."""

Rows = list[tuple[int, int, int]]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was proven."""

    exact: bool
    lengths: tuple[int, ...]  # attended lengths that may be used, ascending
    failures: tuple[str, ...]
    duration_ms: float


def prove(model: SlotModel) -> SelfCheck:
    """Run all checks; call it in the model thread, inside inference mode, before serving."""
    started = time.perf_counter()
    with model.sample_layers(_LAYERS_OF_A_KIND):
        bench = _Bench(model)
        failures = bench.failures()
        if failures and model.has_experts and model.decode_experts == "grouped":
            log.warning("grouped experts: %s differ; computing all of them", ", ".join(failures))
            model.decode_experts = "dense"
            failures = bench.failures()
        full = model.geometry.max_length
        lengths: tuple[int, ...] = (full,)
        if not failures and not model.device.is_cuda:  # there a row reads its own past alone
            candidates = attended_lengths(full)
            lengths = (*(n for n in candidates[:-1] if bench.length_is_equal(n)), full)
            if len(lengths) < len(candidates):
                log.warning("attended lengths used: %s of %s", lengths, candidates)
    del bench
    model.device.release_unused()
    duration_ms = (time.perf_counter() - started) * 1e3
    if failures:
        log.error("streams are not exact on this machine: %s differ", ", ".join(failures))
    return SelfCheck(not failures, lengths, tuple(failures), duration_ms)


class _Bench:
    """Streams with random pasts in a private memory whose layers share their rows."""

    def __init__(self, model: SlotModel) -> None:
        self._model = model
        self._slots = model.geometry.slots
        self._full = model.geometry.max_length
        self._chunk = model.chunk_tokens
        device = model.device
        self._kv = KvMemoryView.private(model.geometry, device=device, layers_share_rows=True)
        random = torch.Generator().manual_seed(_SEED)
        self._ids = torch.randint(
            model.vocabulary_size, (2, max(self._slots, self._chunk)), generator=random
        ).tolist()
        # A GPU makes numbers faster than it is worth keeping them, and memory is short there.
        self._random = torch.Generator(device.torch_device) if device.is_cuda else None
        self._past = None
        if self._random is None:
            self._past = torch.empty_like(self._kv.slots[0]).uniform_(-1, 1, generator=random)

    def failures(self) -> list[str]:
        """Names of the checks that do not hold."""
        checks = (
            ("rows", self.rows_may_move),
            ("neighbours", self.neighbours_do_not_matter),
            ("prefill", self.prefill_may_move),
        )
        return [name for name, holds in checks if not holds()]

    def _put(self, stream: int, slot: int) -> None:
        """Give a slot the past of a stream."""
        memory = self._kv.slots[0][:, slot]
        if self._past is not None:
            memory.copy_(self._past[:, stream])
        else:
            assert self._random is not None  # noqa: S101 - one of the two is there
            memory.uniform_(-1, 1, generator=self._random.manual_seed(_SEED + stream))

    def _positions(self, below: int) -> list[int]:
        """Spread over `[0, below)`, both ends included."""
        last = max(1, self._slots - 1)
        return [(below - 1) * (last - i) // last for i in range(self._slots)]

    def _run(self, rows: Rows, *, roll: int = 0, attended: int | None = None) -> Logits:
        """One step; with `roll`, stream i sits in slot i + roll. Logits in stream order."""
        for stream in range(self._slots):
            self._put(stream, (stream + roll) % self._slots)
        moved = [((s + roll) % self._slots, token, position) for s, token, position in rows]
        logits = self._model.decode(self._kv, moved, attended_tokens=attended or self._full)
        return np.roll(logits.array(), -roll, axis=0)

    def _streams(self, below: int) -> Rows:
        return list(zip(range(self._slots), self._ids[0], self._positions(below), strict=False))

    def rows_may_move(self) -> bool:
        """The same streams, each in other slots."""
        streams = self._streams(self._full)
        home = self._run(streams)
        rolls = {1, self._slots // 2, self._slots - 1} - {0, self._slots}
        return all(np.array_equal(home, self._run(streams, roll=roll)) for roll in rolls)

    def neighbours_do_not_matter(self) -> bool:
        """Even streams keep still while the odd ones have other tokens and ages, or none."""
        streams = self._streams(self._full)
        home = self._run(streams)[::2]
        ages = self._positions(self._full)[::-1]
        others = [
            (slot, self._ids[1][slot], ages[slot]) if slot % 2 else (slot, token, position)
            for slot, token, position in streams
        ]
        return np.array_equal(home, self._run(others)[::2]) and np.array_equal(
            home, self._run(streams[::2])[::2]
        )

    def prefill_may_move(self) -> bool:
        """A full and a padded chunk in the first and in the last slot."""
        last = self._slots - 1
        chunks = ((0, self._chunk), (self._chunk, self._chunk // 2 + 1))
        for start, tokens in chunks:
            if start + tokens > self._full:
                continue
            found = []
            for slot in (0, last):
                self._put(0, slot)
                ids = self._ids[0][:tokens]
                logits = self._model.prefill(self._kv, slot, ids, start=start).array()
                found.append((logits, self._kv.slots[0][:, slot].clone()))
            (first, wrote_first), (second, wrote_second) = found
            if not np.array_equal(first, second) or not torch.equal(wrote_first, wrote_second):
                return False
        return True

    def length_is_equal(self, attended: int) -> bool:
        """Attending to `attended` tokens gives the same bits as attending to all."""
        streams = self._streams(attended)
        short = self._run(streams, attended=attended)
        return np.array_equal(short, self._run(streams))
