"""Proof at start that a row's bits depend on its own stream alone.

An exact resume continues a stream in another slot, beside other neighbours, with another attended
length. Whether that gives the same bits is a property of kernels, thread count and shapes on this
very machine, so the engine measures it before it claims it. Everything runs on private memory,
with the real weights and the shapes of serving.

What is proven, each bit for bit:
    rows        every stream moved to another slot (contents, token and position move along)
    neighbours  half of the streams keep still while the others change, or stand still
    prefill     a chunk in the first and in the last slot: logits and what it wrote
    lengths     each attended length against the full one, at 16 positions

A failure of one of the first three means `exact` is not claimed. A length that fails is not used.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engines.native.kv import KvMemoryView
from engines.native.model import CHUNK_TOKENS, SlotModel, attended_lengths

__all__ = ["SelfCheck", "prove"]

log = logging.getLogger(__name__)

_LAYERS: Final = 2
"""All layers have the same shapes; a difference in the first reaches the logits through the
second. More layers cost time and prove nothing new."""

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
    with _first_layers(model):
        bench = _Bench(model)
        failures = [
            name
            for name, holds in (
                ("rows", bench.rows_may_move),
                ("neighbours", bench.neighbours_do_not_matter),
                ("prefill", bench.prefill_may_move),
            )
            if not holds()
        ]
        full = model.geometry.max_length
        lengths: tuple[int, ...] = (full,)
        if not failures:
            candidates = attended_lengths(full)
            lengths = (*(n for n in candidates[:-1] if bench.length_is_equal(n)), full)
            if len(lengths) < len(candidates):
                log.warning("attended lengths used: %s of %s", lengths, candidates)
    duration_ms = (time.perf_counter() - started) * 1e3
    if failures:
        log.error("streams are not exact on this machine: %s differ", ", ".join(failures))
    return SelfCheck(not failures, lengths, tuple(failures), duration_ms)


@contextmanager
def _first_layers(model: SlotModel) -> Iterator[None]:
    inner = model.inner
    layers = inner.layers
    inner.layers = layers[:_LAYERS]
    try:
        yield
    finally:
        inner.layers = layers


class _Bench:
    """Streams with random pasts in a private memory whose layers share their rows."""

    def __init__(self, model: SlotModel) -> None:
        self._model = model
        self._slots = model.geometry.slots
        self._full = model.geometry.max_length
        self._kv = KvMemoryView.private(model.geometry, chunk=CHUNK_TOKENS, layers_share_rows=True)
        random = torch.Generator().manual_seed(20_260_101)
        self._past = torch.empty_like(self._kv.slots[0]).uniform_(-1, 1, generator=random)
        self._ids = torch.randint(
            model.vocabulary_size, (2, max(self._slots, CHUNK_TOKENS)), generator=random
        ).tolist()

    def _positions(self, below: int) -> list[int]:
        """Spread over `[0, below)`, both ends included."""
        last = max(1, self._slots - 1)
        return [(below - 1) * (last - i) // last for i in range(self._slots)]

    def _run(self, rows: Rows, *, roll: int = 0, attended: int | None = None) -> Logits:
        """One step; with `roll`, stream i sits in slot i + roll. Logits in stream order."""
        self._kv.slots[0].copy_(self._past.roll(roll, dims=1))
        moved = [((s + roll) % self._slots, token, position) for s, token, position in rows]
        logits = self._model.decode(self._kv, moved, attended_tokens=attended or self._full)
        return np.roll(logits, -roll, axis=0)

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
        chunks = ((0, CHUNK_TOKENS), (CHUNK_TOKENS, CHUNK_TOKENS // 2 + 1))
        for start, tokens in chunks:
            if start + tokens > self._full:
                continue
            found = []
            for slot in (0, last):
                self._kv.slots[0][:, slot].copy_(self._past[:, 0])
                ids = self._ids[0][:tokens]
                logits = self._model.prefill(self._kv, slot, ids, start=start)
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
