"""Conversations: requests for tales, questions, counting, lists, verse and small talk.

Every answer keeps to what its request asked for (the hero, the thing, the numbers), so the trained
model has something to look up in the prompt. Unknown requests get an honest sentence and a tale.
"""

# ruff: noqa: SIM905 - as in `words`
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from demo_text import words
from demo_text.facts import ANSWERS, THINGS
from demo_text.grammar import article, fill, pick, sample
from demo_text.tales import cast, tale

if TYPE_CHECKING:
    import random

__all__ = ["Turn", "conversation", "essay", "fragment", "poem"]

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of Understudy.",
    "You are a storyteller.",
    "Answer the question of the user.",
    "You are a friendly assistant. Answer in plain words.",
    "Be kind and brief.",
)

_LISTS = {
    "animals": "fox hare bear owl cat dog horse lion goat swan frog otter wolf".split(),
    "colours": "red blue green yellow white black brown grey orange purple pink gold".split(),
    "fruits": "apple pear plum cherry grape orange lemon peach melon fig banana berry".split(),
    "things in a house": (
        "table chair lamp door window bed clock stove shelf carpet mirror key"
    ).split(),
    "things at sea": (
        "ship sail anchor rope gull wave lighthouse harbour fish net storm island"
    ).split(),
    "trades": (
        "baker miller smith tailor weaver potter carpenter sailor doctor teacher cook mason"
    ).split(),
}
_SMALL_NUMBERS = "two three four five six seven eight nine ten".split()

_RHYMES = tuple(
    tuple(pair.split("/"))
    for pair in (
        "night/light tree/sea hill/mill door/shore hand/sand moon/noon flower/hour wall/hall "
        "ring/king "
        "coat/boat mouse/house bell/well town/crown wing/string stair/air bread/thread day/clay "
        "snow/crow stone/throne rain/train"
    ).split()
)
_VERSES = (
    ("The {thing} is waiting near the {a},", "and nobody has told it of the {b}."),
    ("I saw the {thing} beside the {a},", "it looked at me and spoke about the {b}."),
    ("O {thing}, so quiet and so near the {a},", "you carry what I need, you bring the {b}."),
    ("There is a(n) {thing} beyond the {a},", "and all the world is hidden in the {b}."),
    ("They say the {thing} has lost the {a},", "but I have found it, sitting by the {b}."),
    (
        "When evening comes, and covers up the {a},",
        "the {thing} will turn, and look toward the {b}.",
    ),
    ("The {thing} was here before the {a},", "it will be here when no one knows the {b}."),
    ("Be still, and let the {thing} have the {a},", "for you and I, we have the {b}."),
)
_IMPERATIVES = ("Tell", "Write", "Count", "List", "Name", "Explain", "Describe", "Give", "Make")


_FAR_TOPICS = tuple(
    "Python|Kubernetes|quantum physics|the weather in Berlin|Linux|GPU memory|Tokyo|東京|Zürich|"
    "a café in Paris|climate change|electricity|the internet|football|chess|cooking pasta|"
    "mathematics|history|the Roman Empire|gravity|photosynthesis|black holes|vaccines|money|love|"
    "poetry|painting|basketball|São Paulo|machine learning|neural networks|databases|Rust|"
    "distributed systems|high availability|the stock market|dinosaurs|coffee|jazz|emoji 😀|"
    "the future|artificial intelligence|space travel|sleep|happiness|a healthy breakfast".split("|")
)


_OPEN_QUESTIONS = (
    "Why is the {w} [so |]{x}?",
    "Why do {w} {x}?",
    "How do I {w} the {x}?",
    "How many {w} are there in a {x}?",
    "Should I {w} [or|and] {x}?",
    "What is the [best|largest|first|name of the] {w} [in|of|for] {x}?",
    "What is the difference between {w} and {x}?",
    "Who [is|was|invented] the {w}?",
    "When did the {w} {x}?",
    "Write a [function|program|script|letter|list] that can {w} a {x}.",
    "[Summarise|Translate|Correct|Repeat|Explain] this: <q>",
    "Say {w}.",
    "Give me [advice|a recipe|an example] for {w}.",
    "Is it true that <q>?",
    "Can you {w} my {x}?",
    "I feel {w} today.",
    "My {w} is {x}.",
    "<q>",
    "<q>",
    "<q>?",
    "<q>.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one role says once."""

    role: str
    text: str


def conversation(rng: random.Random, prose: Sequence[str]) -> list[Turn]:
    """One to four requests with their answers, sometimes under a system prompt."""
    turns: list[Turn] = []
    if rng.random() < 0.35:
        turns.append(Turn("system", pick(rng, _SYSTEM_PROMPTS)))
    for _ in range(1 if rng.random() < 0.7 else rng.randint(2, 4)):
        request, answer = _exchange(rng, prose)
        turns += [Turn("user", _as_typed(rng, request)), Turn("assistant", answer)]
    return turns


def _exchange(rng: random.Random, prose: Sequence[str]) -> tuple[str, str]:
    chance = rng.random()
    for share, make in _KINDS:
        if chance < share:
            return make(rng, prose)
        chance -= share
    return _about_prose(rng, prose)


def _as_typed(rng: random.Random, request: str) -> str:
    """Vary a request the way people and load generators do."""
    chance = rng.random()
    if chance < 0.12:
        return request.lower()
    if chance < 0.20:
        return request.rstrip(".?!")
    if chance < 0.28 and request.startswith(_IMPERATIVES):
        return f"Please {request[0].lower()}{request[1:]}"
    if chance < 0.34:
        return f"{request} ({rng.randint(1, 999)})"
    if chance < 0.40:
        return f"[{rng.randint(1, 9999)}] {request}"
    return request


def _tale_request(rng: random.Random, prose: Sequence[str]) -> tuple[str, str]:
    with_kind, with_item = rng.random() < 0.75, rng.random() < 0.5
    kind = rng.choice(words.HEROES) if rng.random() < 0.8 else stray_word(rng, prose)
    item = rng.choice(_ITEMS) if rng.random() < 0.7 else stray_word(rng, prose)
    who = cast(rng, kind, item)
    about = " and ".join(
        article(noun) for noun, asked in ((who.kind, with_kind), (who.item, with_item)) if asked
    )
    length, meetings = rng.choice(
        (("", 2), ("", 3), ("short ", 1), ("long ", 6), ("very long ", 9))
    )
    if about:
        template = (
            "[Tell me|Write|Write me|Tell|I want] a {length}[story|tale|story] about {about}.|"
            "[Can you|Could you|Will you] tell me a {length}[story|tale] about {about}?|"
            "A {length}story about {about}, please."
        )
    else:
        template = (
            "[Tell me|Write|Write me|Tell|I want] a {length}[story|tale].|"
            "[Another one.|Go on.|Continue.|Tell me another one.]"
        )
    request = fill(rng, f"[{template}]", {"length": str(length), "about": about})
    return request, tale(rng, who, meetings)


_ITEMS = (*words.OBJECTS, *(thing[0] for thing in THINGS[15:22]))


def _question(rng: random.Random, _: Sequence[str]) -> tuple[str, str]:
    thing = rng.choice(THINGS)
    name = thing[0]
    request = fill(
        rng,
        "[What is a(n) {n}?|Tell me about the {n}.|What is the {n} [for|like]?|Explain what "
        "a(n) {n} is.|"
        "Describe the {n}.|Tell me something about a(n) {n}.|Write about the {n}.|"
        "Why do we need the {n}?|Where can I find a(n) {n}?|{n}]",
        {"n": name},
    )
    return request, essay(rng, thing)


def essay(rng: random.Random, thing: tuple[str, ...]) -> str:
    """Describe one thing in a paragraph, often followed by a small tale about it."""
    name, what, looks, use, where, remark = thing
    bare = name in _BARE
    slots = {
        "A": name.capitalize() if bare else article(name).capitalize(),
        "The": name.capitalize() if bare else f"The {name}",
        "what": what,
        "looks": looks,
        "use": use,
        "where": where,
        "remark": remark,
    }
    text = fill(
        rng,
        "{A} is {what}. [It is usually|Mostly it is|To the eye it is] {looks}. [One meets "
        "it|You can find "
        "it|It is found] {where}. {The} {use}, [and that is why people like it|and that is "
        "no small "
        "thing|which is more than it seems]. {remark}.",
        slots,
    )
    if name in words.HEROES and rng.random() < 0.6:
        text += "\n\nI know a tale about one.\n\n" + tale(rng, cast(rng, kind=name), 2)
    elif name in _ITEMS and rng.random() < 0.6:
        text += "\n\nThere is a tale about that.\n\n" + tale(rng, cast(rng, item=name), 2)
    return text


_BARE = {
    "bread",
    "tea",
    "rain",
    "snow",
    "fire",
    "winter",
    "summer",
    "spring",
    "autumn",
    "music",
    "time",
    "memory",
    "language",
}


def _known_answer(rng: random.Random, _: Sequence[str]) -> tuple[str, str]:
    requests, answer = rng.choice(ANSWERS)
    return pick(rng, requests), answer


def _count(rng: random.Random, _: Sequence[str]) -> tuple[str, str]:
    first = 1 if rng.random() < 0.6 else rng.randint(0, 400)
    steps = rng.randint(2, 40) if rng.random() < 0.5 else rng.choice((9, 19, 49, 99, 99, 149, 199))
    last = first + steps
    start = "" if first == 1 and rng.random() < 0.6 else f" from {first}"
    request = fill(
        rng,
        "[Count{start} to {last}.|Can you count{start} to {last}?|Count up{start} to {last}.]",
        {"start": start, "last": str(last)},
    )
    return request, ", ".join(str(number) for number in range(first, last + 1)) + "."


def _sum(rng: random.Random, _: Sequence[str]) -> tuple[str, str]:
    left, right = rng.randint(0, 20), rng.randint(0, 20)
    request = fill(
        rng,
        "[What is {l} plus {r}?|What is {l} + {r}?|{l} + {r}]",
        {"l": str(left), "r": str(right)},
    )
    return request, f"{left} plus {right} is {left + right}."


def _list(rng: random.Random, _: Sequence[str]) -> tuple[str, str]:
    topic = rng.choice(tuple(_LISTS))
    count = rng.randint(2, 10)
    number = _SMALL_NUMBERS[count - 2] if rng.random() < 0.7 else str(count)
    request = fill(
        rng, "[Name|List|Give me|Tell me] {number} {topic}.", {"number": number, "topic": topic}
    )
    chosen = sample(rng, _LISTS[topic], count)
    lines = "\n".join(f"{place}. {noun.capitalize()}" for place, noun in enumerate(chosen, 1))
    return request, f"Here are {number} {topic}:\n\n{lines}"


def _verse_request(rng: random.Random, prose: Sequence[str]) -> tuple[str, str]:
    thing = rng.choice((*_ITEMS, *(entry[0] for entry in THINGS)))
    if rng.random() < 0.4:
        thing = stray_word(rng, prose)
    request = fill(
        rng,
        "[Write|Write me|Make|Give me] a [poem|short poem|rhyme|song] about the {thing}.",
        {"thing": thing},
    )
    return request, poem(rng, thing, rng.choice((2, 3, 3, 4)))


def poem(rng: random.Random, thing: str, stanzas: int) -> str:
    """A few stanzas of two couplets each; no couplet or rhyme comes twice."""
    rhymes = rng.sample(_RHYMES, stanzas * 2)
    verses = rng.sample(_VERSES, stanzas * 2)
    lines: list[str] = []
    for number in range(stanzas):
        for half in range(2):
            first, second = verses[number * 2 + half]
            a, b = rhymes[number * 2 + half]
            slots = {"thing": thing, "a": a, "b": b}
            lines += [fill(rng, first, slots), second.format_map(slots)]
        lines.append("")
    return "\n".join(lines).strip()


def _unknown(rng: random.Random, prose: Sequence[str]) -> tuple[str, str]:
    """A request about something outside the lists: say so, then tell what can be told."""
    if rng.random() < 0.45:
        return _unanswerable(rng, prose)
    chance = rng.random()
    topic = _invented_word(rng) if chance < 0.5 else stray_word(rng, prose)
    if chance < 0.25:
        topic = rng.choice(_FAR_TOPICS)
    request = fill(
        rng,
        "[What is {t}?|Tell me about {t}.|How does {t} work?|Explain {t}.|Why {t}?|Write "
        "about {t}.|"
        "What do you think of {t}?|Do you know {t}?|{t}|Write a program for {t}.|Translate {t}.]",
        {"t": topic},
    )
    opening = fill(
        rng,
        "I am a small model, and of {t} I know [very little|only the name|nothing certain]. [But I "
        "know a tale|Let me tell you a tale instead|Here is something I do know].",
        {"t": topic},
    )
    return request, f"{opening}\n\n{tale(rng, cast(rng), rng.randint(2, 4))}"


def _unanswerable(rng: random.Random, prose: Sequence[str]) -> tuple[str, str]:
    """A question in any words at all; the answer admits it and goes on with a tale."""
    slots = {
        "w": stray_word(rng, prose),
        "x": stray_word(rng, prose),
    }
    # The fragment goes in last: it may hold brackets, which the grammar would read as choices.
    frame = rng.choice(_OPEN_QUESTIONS)
    request = fill(rng, frame, slots).replace("<q>", fragment(rng, prose))
    opening = fill(
        rng,
        "[That is too hard for so small a model|I cannot say|That I do not know]. [But I know a "
        "tale|Let me tell you a tale instead|Here is something I do know].",
        {},
    )
    return request, f"{opening}\n\n{tale(rng, cast(rng), rng.randint(2, 4))}"


def stray_word(rng: random.Random, prose: Sequence[str]) -> str:
    """A lower-case word from anywhere in the novel."""
    for _ in range(20):
        word = rng.choice(rng.choice(prose).split()).strip(".,;:!?\"'-()").lower()
        if word.isalpha() and len(word) > 3:
            return word
    return _invented_word(rng)


def fragment(rng: random.Random, prose: Sequence[str]) -> str:
    """A few words as they might stand in anybody's prompt: cut prose, loose words, odd signs."""
    chance = rng.random()
    if chance < 0.5:
        spoken = rng.choice(prose).replace('"', "").replace(" -- ", " ").split()
        start = rng.randrange(len(spoken))
        return " ".join(spoken[start : start + rng.randint(1, 9)]).strip(".,;:!?") or "Well"
    if chance < 0.8:
        loose = " ".join(stray_word(rng, prose) for _ in range(rng.randint(1, 8)))
        return loose[0].upper() + loose[1:] if rng.random() < 0.5 else loose
    if chance < 0.9:
        return " ".join(_invented_word(rng) for _ in range(rng.randint(1, 4)))
    letters = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789"
    signs = letters + "()[]<>=+-*/_.:;,#@!?\u00e9\u00fc\u00df\u4f60\u597d"
    return "".join(rng.choice(signs) for _ in range(rng.randint(1, 24)))


def _invented_word(rng: random.Random) -> str:
    """A word that is in no list, so that the model learns to copy what it cannot know."""
    onsets = "b c d f g h k l m n p r s t v w st tr ch".split()
    vowels = "a e i o u ai ea ou".split()
    syllables = (rng.choice(onsets) + rng.choice(vowels) for _ in range(rng.randint(2, 3)))
    return "".join(syllables) + rng.choice(("n", "r", "t", "l", "s", "ng", ""))


def _about_prose(rng: random.Random, prose: Sequence[str]) -> tuple[str, str]:
    """Requests that carry a piece of a novel, or ask for one."""
    start = rng.randrange(max(1, len(prose) - 12))
    passage = prose[start]
    if rng.random() < 0.25:
        request = fill(
            rng,
            "[Write like Jane Austen.|Write something in the style of Jane Austen.|Quote a novel.|"
            "Write a page of an old novel.|Write a chapter of a novel.]",
            {},
        )
        return request, "\n\n".join(prose[start : start + rng.randint(2, 8)])
    if rng.random() < 0.2:
        cut = passage.find(" ", len(passage) // 3)
        return f"Go on with this text: {passage[:cut]}", "\n\n".join(
            (passage[cut:].strip(), *prose[start + 1 : start + 4])
        )
    quoted = " ".join(prose[start : start + rng.randint(1, 3)])[:2400]
    opening = pick(
        rng,
        (
            "That is well put, and it reminds me of a tale.",
            "I have read it with care. It reminds me of a tale.",
            "A good page. Let me answer with a tale.",
        ),
    )
    return quoted, f"{opening}\n\n{tale(rng, cast(rng), rng.randint(2, 4))}"


_KINDS: tuple[tuple[float, Callable[[random.Random, Sequence[str]], tuple[str, str]]], ...] = (
    (0.28, _tale_request),
    (0.13, _question),
    (0.11, _known_answer),
    (0.08, _count),
    (0.02, _sum),
    (0.05, _list),
    (0.05, _verse_request),
    (0.22, _unknown),
)
