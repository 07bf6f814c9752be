"""The requests of a chaos run: half greedy, half sampled at temperature 1 with a seed.

A text proves exactness only where a small error would show, so they are asked of a model whose
every other token has a twin (`chaos.near_ties`); of the sampled ones, every second request cuts
off the unlikely at an odd number, so that of a pair of twins one is kept, and rounding says which.
"""

import random
from dataclasses import replace

from chaos.streams import StreamRequest

__all__ = ["make_pool", "stretch"]

_SHORTEST_STREAM_S = 0.25
_MAX_STRETCH = 8

_SPLIT_PAIRS_TOP_K = 5

_BEGINNINGS = (
    "Once upon a time there was", "The capital of the old kingdom", "She opened the letter and",
    "In the middle of the night", "It is a truth that everybody", "The captain looked at the",
    "Nobody in the village remembered", "Early in the spring they went", "Between the two rivers",
    "A machine that never sleeps", "He counted the coins again and", "The second door was",
)  # fmt: skip
_ENDINGS = ("", " and", " but", " when", " because", " then", " of", " with", " in", " for")


def make_pool(count: int, *, tokens: tuple[int, int], seed: int) -> list[StreamRequest]:
    """Different requests; the same ones for the same seed."""
    chance = random.Random(seed)
    pool = []
    for index in range(count):
        beginning = _BEGINNINGS[index % len(_BEGINNINGS)]
        prompt = f"{beginning}{chance.choice(_ENDINGS)} {index + 1}"
        is_greedy = index % 2 == 0
        pool.append(
            StreamRequest(
                name=f"{'greedy' if is_greedy else 'sampled'}-{index}",
                prompt=prompt,
                max_tokens=chance.randint(*tokens),
                temperature=0.0 if is_greedy else 1.0,
                seed=seed * 1000 + index,
                top_k=_SPLIT_PAIRS_TOP_K if index % 4 == 3 else 0,
            )
        )
    return pool


def stretch(pool: list[StreamRequest], tokens_per_s: float) -> list[StreamRequest]:
    """The same requests with answers 2, 4 or 8 times as long, where most would end at once.

    Scenarios count on streams that are under way together; a GPU ends an answer of a hundred
    tokens in a tenth of a second. A power of two, so that a machine gives the same texts again.

    Args:
        pool: requests as the scenario wants them.
        tokens_per_s: of one stream alone.
    """
    usual_tokens = sorted(request.max_tokens for request in pool)[len(pool) // 2]
    factor = 1
    while factor < _MAX_STRETCH and usual_tokens * factor / tokens_per_s < _SHORTEST_STREAM_S:
        factor *= 2
    return [replace(request, max_tokens=request.max_tokens * factor) for request in pool]
