"""Tales: a hero, a worry, a road with encounters, a turn, a way home.

Encounters never repeat within one tale, and each gift that is given is used later in the order in
which it came. A model that learns this has a reason to look back instead of falling into a loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from demo_text import words
from demo_text.grammar import fill, pick, sample

if TYPE_CHECKING:
    import random

__all__ = ["Cast", "cast", "tale"]

_PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}

_DETAIL = re.compile(
    r" (with|who|whose|on|in|at|as|tied|without|standing|asleep|playing|herding|carrying|measuring"
    r"|mending) .*"
)

_OPENINGS = (
    "[Once upon a time|Long ago|Many years ago|Once] there was a(n) {trait} {kind} called "
    "{name}, who lived in {place}. [Every day|Every evening|Day after day] {he} looked after "
    "[a(n)|an old] {object}, and [nobody knew it better|that was all {he} had|{he} was "
    "content].",
    "In {place} there lived a(n) {kind} whose name was {name}. {name} was {trait} and "
    "{trait2}, and of all things in the world {he} loved [one|only one]: a(n) {object}.",
    "This is the [story|tale] of {name}, a(n) {trait} {kind}, and of a(n) {object} that [went"
    " its own way|changed everything|was worth more than gold]. It begins in {place}.",
    "{name} the {kind} was known in {place} for two things: {he} was {trait}, and {he} owned "
    "a(n) {object} that [had come down from {his} grandmother|was older than the houses|shone"
    " a little].",
    "The {object} had always been there. The {trait} {kind} who kept it was called {name}, "
    "and the two of them lived in {place}, [where little ever happened|far from any road].",
)

_WORRY_LINES = (
    "[But|Then], {season}, {worry}. {name} [looked in every corner|sat down on the step|stood"
    " quite still] and [did not know what to say|thought for a long time|listened, but there "
    "was no sound].",
    "{season} {name} woke up and saw that {worry}. [The neighbours came and shook their "
    "heads|Nobody could explain it|The whole place spoke of nothing else].",
    'All went well until, {season}, {worry}. "[That cannot be|How strange|Well]," said '
    '{name}, "[it was there yesterday|I only closed my eyes for a moment|somebody must do '
    'something]."',
)

_DEPARTURES = (
    "So {name} put on {his} [coat|boots|hat], [locked the door|blew out the light|left a note"
    " on the table] and set out to [put it right|find help|find out why].",
    '"I will [go|go and see|not rest until it is mended]," said {name}. {he} took [bread and '
    "cheese|a flask of tea|nothing but a stick] and was gone before [noon|sunrise|anybody "
    "could object].",
    "There was [no use in waiting|nothing else to do]. {name} [packed a small bag|tied {his} "
    "shoes] and followed the [road|river|coast] to the [east|north|west].",
)

_MEETINGS = (
    '{road}. There {name} met {helper}. "[Where are you going|What are you looking for|Why so'
    ' sad]?" "[I am looking for my|It is about the] {object}," said {name}, and {favour}. '
    '"[You are kind|That was well done|I shall not forget it]," was the answer. "Take {gift}.'
    ' And remember: {advice}."',
    "{weather}. {road}, and at the [side|end|turn] of it sat {helper}. {name} stopped and "
    '{favour}. In return {he} was given {gift}. "{advice}," said the other, [and looked '
    "away|very softly|and laughed].",
    "{road}. [By and by|After an hour|Towards evening] {he} came upon {helper}, who asked for"
    ' help. {name} was tired, but {he} {favour} all the same. "I have not much," said the '
    'other, "only {gift}, but it [may be useful|has helped me|is yours]." {name} thanked and '
    "went on.",
    '{road}. [Somebody|A voice] called out, and there stood {helper}. "[Have you a '
    'minute?|Help me, and I will help you!]" {name} {favour}, [and did not ask for pay|and '
    'was thanked for it]. "Here is {gift}," said the other. "It is not [much|pretty]. But '
    '{advice_low}."',
    '"[Who goes there?|Is it far?|You look tired,]" said a voice, and it was {helper}. {name}'
    " [sat down|stopped], told about the {object}, and {favour}. [They parted as friends|It "
    "grew late]. {road}, and in {his} [bag|pocket] {name} carried {gift}.",
    "{weather}, and {name} [lost the way|slept under a tree|walked faster]. In the "
    "[morning|end] {he} found {helper}. They talked about the {object}, and {name} {favour}. "
    '"{advice}," {he} heard, and when {he} looked down {he} was holding {gift}.',
)

_REMARKS = (
    "{name} thought of {home}, and of how quiet it must be there without the {object}.",
    '"One more hill," said {name} to {himself}, "and then [one more|we shall see]."',
    "{weather}. {name} counted {his} steps up to [a hundred|one thousand], and began again.",
    "That night {name} dreamed of the {object}, and in the dream it was [whole|near|singing].",
    "{he} was {trait}, and that helped; {he} was also {trait2}, and that helped even more.",
    "Nobody followed, and nobody came the other way.",
    "{weather}. It did not matter. {name} had decided not to turn back.",
    "From time to time {he} felt in {his} pocket, and everything was still there.",
)

_TURNS = (
    "At last {he} stood before [a high gate|a black door|a deep ditch|a tall man in grey], "
    "and there was no way around. [Then|At once] {name} thought of {gift_the}. [It was just "
    "what was needed|It took only a moment|Nobody else would have thought of it]: [the way "
    "was open|the way was free].",
    "But it was dark, and something [breathed|moved|whispered] in the dark. {name} took "
    "{gift_the} and [held it up|put it on the ground|did not tremble]. [The thing drew "
    "back|The dark was only the dark]. {he} went on.",
    "Then the ground [gave way|shook]. What could {he} do? There was still {gift_the}. With "
    "its help {name} [came across|climbed out|held on], [a little dusty|out of breath], but "
    "safe.",
    "Three times {name} was asked the same question, and three times {he} gave the same "
    "answer. Then {he} showed {gift_the}, and [that settled it|nobody asked again|they let "
    "{him} pass].",
    "A river lay across the way, wide and [cold|brown], and there was no boat. {name} [sat "
    "down and thought|walked up and down]. In the end it was {gift_the} that [did it|helped],"
    " and {he} reached the other bank with [dry|wet] feet.",
    'A [dog|guard|crow] as large as a [calf|cart] watched the place. "What do you bring?" '
    '"Only this," said {name}, and held out {gift_the}. [Nothing could have pleased it '
    "more|It stepped aside], and {name} [walked by|did not wait to be told twice].",
)

_FINDS = (
    "And there, [under a heap of leaves|on a table of stone|in the arms of a sleeping "
    "child|at the bottom of a boat], was the {object}. [Nothing was missing|It was as good as"
    " new|It was a little older, like everybody]. {name} [laughed aloud|took it up with both "
    "hands|said nothing for a while].",
    'Behind the last door sat {helper}, and beside {helper_short} lay the {object}. "I only '
    'wanted to [borrow it|know how it worked|keep it safe]," {helper_short} said. "[Take it '
    'home|Then let us mend it together|You have come far enough for it]." And so they did.',
    "In the end it was simple. The {object} had [been waiting all the time|only lacked one "
    "small part|gone to where it was needed], and {name} was the one who [saw "
    "it|understood|had come to look]. {he} mended what was broken, and it was soon done.",
)

_RETURNS = (
    "The way home was [shorter|longer|the same, but it seemed shorter]. In {home} [the lamps "
    "were lit|they had kept {his} supper warm|nobody had closed the door], and the {object} "
    "was put back in its place. {weather}. {ending}.",
    "When {name} came back to {home}, [the children ran out to meet {him}|it was evening|half"
    " a year had gone by]. {he} told everything, in the right order, and left nothing out. "
    "For {moral}. {ending}.",
    'So {name} went home with the {object}. "What have you learned?" they asked in {home}. '
    '"That {moral}," said {name}. {ending}.',
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who a tale is about, and the thing it turns on."""

    kind: str
    name: str
    pronoun: str
    item: str

    @property
    def habit(self) -> int:
        """Where this kind of hero starts in every list, so that different tales differ."""
        return crc32(self.kind.encode())


def cast(rng: random.Random, kind: str = "", item: str = "") -> Cast:
    """Choose what the caller leaves open."""
    pronoun = "she" if rng.random() < 0.6 else "he"
    if kind in ("king", "prince", "boy"):
        pronoun = "he"
    if kind in ("queen", "princess", "girl"):
        pronoun = "she"
    kind = (kind or pick(rng, words.HEROES)).replace("_", " ")
    habit = crc32(kind.encode())
    return Cast(
        kind=kind,
        name=pick(rng, words.NAMES[pronoun], habit),
        pronoun=pronoun,
        item=item or pick(rng, words.OBJECTS, habit),
    )


def tale(rng: random.Random, who: Cast, meetings: int) -> str:
    """Write one tale; `meetings` decides its length (about 110 tokens each)."""
    turn = who.habit
    slots = _slots(rng, who)
    helpers = sample(rng, words.HELPERS, meetings + 1, turn)
    gifts = sample(rng, words.GIFTS, meetings, turn)
    roads = sample(rng, words.ROADS, meetings, turn)
    favours = sample(rng, words.FAVOURS, meetings, turn)
    advice = sample(rng, words.ADVICE, meetings, turn)
    weather = sample(rng, words.WEATHER, len(words.WEATHER), turn)
    remarks = sample(rng, _REMARKS, len(_REMARKS), turn)
    scenes = sample(rng, _MEETINGS, len(_MEETINGS), turn)
    turns = sample(rng, _TURNS, len(_TURNS), turn)

    def line(options: tuple[str, ...], **extra: str) -> str:
        sky = weather.pop(0) if weather else pick(rng, words.WEATHER)
        return fill(rng, pick(rng, options, turn), {**slots, "weather": sky, **extra})

    parts = [line(_OPENINGS), line(_WORRY_LINES), line(_DEPARTURES)]
    for number in range(meetings):
        parts.append(
            line(
                (scenes[number % len(scenes)],),
                helper=helpers[number],
                gift=gifts[number],
                road=roads[number],
                favour=favours[number],
                advice=advice[number],
                advice_low=advice[number][0].lower() + advice[number][1:],
            )
        )
        if remarks and rng.random() < 0.5:
            parts.append(line((remarks.pop(0),)))
    for number, gift in enumerate(gifts):
        parts.append(line((turns[number % len(turns)],), gift_the=_definite(gift)))
    last = helpers[meetings]
    parts += [line(_FINDS, helper=last, helper_short=_short(last)), line(_RETURNS)]
    return "\n\n".join(parts)


def _slots(rng: random.Random, who: Cast) -> dict[str, str]:
    turn = who.habit
    trait, trait2 = sample(rng, words.TRAITS, 2, turn)
    place = pick(rng, words.PLACES, turn)
    return {
        **_PRONOUNS[who.pronoun],
        "name": who.name,
        "kind": who.kind,
        "object": who.item,
        "trait": trait,
        "trait2": trait2,
        "place": place,
        "home": _definite(place),
        "season": pick(rng, words.SEASONS, turn),
        "worry": pick(rng, words.WORRIES, crc32(who.item.encode())),
        "moral": pick(rng, words.MORALS, turn),
        "ending": pick(rng, words.ENDINGS, turn),
    }


def _definite(phrase: str) -> str:
    """`a castle` becomes `the castle`."""
    return f"the {phrase.split(' ', 1)[1]}"


def _short(helper: str) -> str:
    """`an old woman with a basket` becomes `the old woman`."""
    return _definite(_DETAIL.sub("", helper))
