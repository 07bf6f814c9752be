"""Sampling: a pure function of (logits, parameters, seed, number of tokens so far).

Invariants
    1. No hidden state and no generator: token n of a stream draws the number `draw(seed, n)`,
       whichever engine computes it and whatever ran before. An exact resume rests on this.
    2. The order of every sum is fixed: float64, by token id, or by falling logit (ties by token
       id) once top-k or top-p cut something off.
    3. Greedy takes the lowest token id on ties.
"""

from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["GREEDY_BELOW", "draw", "sample"]

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: dividing by them only adds infinities."""


def draw(seed: int, count: int) -> float:
    """The number in [0, 1) that decides output token `count` (from 0) of a stream."""
    key = seed.to_bytes(8, "little") + count.to_bytes(8, "little")
    bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11
    return bits * 2.0**-53


def sample(
    logits: npt.NDArray[np.floating[Any]],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    count: int,
) -> int:
    """Output token `count` of a stream. Order of the cuts: temperature, top-k, top-p."""
    if temperature < GREEDY_BELOW:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    scaled /= temperature
    scaled -= scaled.max()
    order: npt.NDArray[np.intp] | None = None
    if 0 < top_k < scaled.shape[0] or top_p < 1.0:
        # By the logits themselves: scaled ones may be equal where these are not.
        order = np.argsort(-logits, kind="stable")
        if top_k > 0:
            order = order[:top_k]
        scaled = scaled[order]
    cumulative = np.cumsum(np.exp(scaled, out=scaled))
    if top_p < 1.0:
        kept = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1
        cumulative = cumulative[:kept]
    at = int(np.searchsorted(cumulative, draw(seed, count) * cumulative[-1], side="right"))
    at = min(at, cumulative.shape[0] - 1)
    return at if order is None else int(order[at])
