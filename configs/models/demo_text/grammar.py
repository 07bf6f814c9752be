"""A very small text grammar: `[one|two]` chooses, `{slot}` fills, `a(n)` agrees.

Choices are not even. The first option is the most likely and each later one less so, which keeps
the distribution that a model learns away from ties.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

__all__ = ["article", "fill", "pick", "sample", "seeded"]

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) ([aeiouAEIOU]|hon|hour)?")
_SENTENCE = re.compile(r"(^|[.!?] |\n|\" \"|^\")([a-z])")


def seeded(seed: int) -> random.Random:
    """The generator for one part of the corpus; same seed, same text."""
    return random.Random(seed)  # noqa: S311 - text, not secrets


def pick(rng: random.Random, options: Sequence[str], turn: int = 0) -> str:
    """Choose one option, the early ones more often; `turn` decides which one counts as first."""
    place = min(rng.random(), rng.random(), rng.random())
    return options[(int(place * len(options)) + turn) % len(options)]


def sample(rng: random.Random, options: Sequence[str], count: int, turn: int = 0) -> list[str]:
    """Choose several different options; the early ones, counted from `turn`, tend to come first."""
    keyed = sorted(range(len(options)), key=lambda place: (place + 2) * rng.random())
    return [options[(place + turn) % len(options)] for place in keyed[:count]]


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def fill(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """Expand choices from the inside out, then slots, then repair articles and capitals."""
    text = template
    while "[" in text:
        text = _CHOICE.sub(lambda match: pick(rng, match.group(1).split("|")), text)
    while "{" in text:
        text = text.format_map(slots)
    text = _ARTICLE.sub(lambda m: f"{m[1]}n {m[2]}" if m[2] else f"{m[1]} ", text)
    return _SENTENCE.sub(lambda m: m[1] + m[2].upper(), text)
