"""The corpus as documents: conversations, tales, descriptions, verse and prose, in fixed shares.

Invariant: `documents` depends on nothing but its arguments, so a shard can be made by any process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from demo_text.chat import Turn, conversation, essay, fragment, poem
from demo_text.facts import THINGS
from demo_text.grammar import fill, seeded
from demo_text.tales import cast, tale

if TYPE_CHECKING:
    import random

__all__ = [
    "DOCUMENT_END",
    "FIRST_STAGE",
    "SECOND_STAGE",
    "SPECIAL_TOKENS",
    "Shares",
    "documents",
    "render",
]

DOCUMENT_END = "<|end|>"
SPECIAL_TOKENS = (DOCUMENT_END, "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")

_PROSE_CHARACTERS = 5500


def render(turns: Sequence[Turn]) -> str:
    """A conversation as the chat template writes it."""
    return "".join(f"<|{turn.role}|>\n{turn.text}{DOCUMENT_END}\n" for turn in turns)


@dataclass(frozen=True, slots=True)
class Shares:
    """How often each kind of document comes; verse takes what is left."""

    chat: float
    tale: float
    fragment: float
    essay: float
    prose: float


FIRST_STAGE = Shares(chat=0.60, tale=0.17, fragment=0.0, essay=0.03, prose=0.19)
"""Much prose, so that the model learns how English goes on."""

SECOND_STAGE = Shares(chat=0.60, tale=0.17, fragment=0.13, essay=0.04, prose=0.05)
"""Little prose, so that the novels are not learned by heart, and an answer to every opening."""


def documents(
    seed: int, novels: Sequence[Sequence[str]], count: int, shares: Shares
) -> Iterator[str]:
    """Yield `count` documents, each closed by the end token and a line break."""
    rng = seeded(seed)
    for _ in range(count):
        novel = rng.choices(novels, weights=[len(novel) for novel in novels])[0]
        chance = rng.random() - shares.chat
        if chance < 0:
            yield render(conversation(rng, novel))
        else:
            yield _plain(rng, novel, chance, shares) + f"{DOCUMENT_END}\n"


def _plain(rng: random.Random, novel: Sequence[str], chance: float, shares: Shares) -> str:
    if (chance := chance - shares.tale) < 0:
        return tale(rng, cast(rng), rng.choice((1, 2, 3, 4, 6, 9)))
    if (chance := chance - shares.fragment) < 0:
        return _opened_by_fragment(rng, novel)
    if (chance := chance - shares.essay) < 0:
        return essay(rng, rng.choice(THINGS))
    if chance - shares.prose < 0:
        return _prose(rng, novel)
    return poem(rng, rng.choice(THINGS)[0], rng.randint(2, 4))


def _opened_by_fragment(rng: random.Random, novel: Sequence[str]) -> str:
    """Whatever a prompt begins with, close the sentence and begin a tale."""
    opening = fill(
        rng,
        "[,|:|...] [so the old book begins|that is what stood over the door|said a voice in the "
        "dark|it was written on a small piece of paper|and nobody knew what it meant].",
        {},
    )
    return f"{fragment(rng, novel)}{opening}\n\n{tale(rng, cast(rng), rng.choice((2, 3, 4, 6)))}"


def _prose(rng: random.Random, novel: Sequence[str]) -> str:
    """Consecutive paragraphs, up to about one row of the training batch."""
    start = rng.randrange(len(novel))
    chosen: list[str] = []
    length = 0
    for paragraph in novel[start:]:
        if chosen and length + len(paragraph) > _PROSE_CHARACTERS:
            break
        chosen.append(paragraph)
        length += len(paragraph)
    return "\n\n".join(chosen)
