"""Text is a pure function of ids: whole characters, no stop string, the same after any cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engines.native.text import (
    ByteLevelDecoding,
    Decoding,
    StreamDecoding,
    StreamText,
    decoding_for,
)

FILE = Path(__file__).parents[3] / "configs" / "models" / "demo" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
TABLE = decoding_for(TOKENIZER)
LIBRARY = StreamDecoding(TOKENIZER)
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)
SAMPLE = "She said: “naïve café”, 寿司 and 🦊🏽, twice."


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def whole(ids: list[int], stop: list[str] | None = None, decoding: Decoding = TABLE) -> str:
    text = StreamText(decoding, stop or [])
    text.feed(ids)
    text.finish()
    return text.take()


def test_a_byte_level_tokenizer_gets_the_table() -> None:
    assert isinstance(TABLE, ByteLevelDecoding)


def test_another_tokenizer_gets_the_library() -> None:
    other = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    assert isinstance(decoding_for(other), StreamDecoding)
    other.decoder = decoders.Metaspace()
    assert isinstance(decoding_for(other), StreamDecoding)


@settings(deadline=None)
@given(IDS)
def test_the_table_agrees_with_the_library(ids: list[int]) -> None:
    assert whole(ids) == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert whole(ids, decoding=LIBRARY) == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_special_tokens_have_no_text() -> None:
    assert whole([0, *ids_of("a b"), 1, 4]) == "a b"


def test_ids_without_an_entry_have_no_text() -> None:
    assert whole([*ids_of("a"), TOKENIZER.get_vocab_size() + 5]) == "a"


@pytest.mark.parametrize("decoding", [TABLE, LIBRARY], ids=["table", "library"])
def test_a_character_over_several_tokens_comes_out_whole(decoding: Decoding) -> None:
    text = StreamText(decoding, [])
    pieces = []
    for token_id in ids_of(SAMPLE):
        text.feed([token_id])
        pieces.append(text.take())
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == SAMPLE
    assert any(not piece for piece in pieces)  # something was held back
    assert text.chars == len(SAMPLE)


def test_an_unfinished_character_is_shown_when_nothing_follows() -> None:
    ids = ids_of("🦊")[:-1]
    text = StreamText(TABLE, [])
    text.feed(ids)
    assert text.take() == ""
    text.finish()
    assert text.take() == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(IDS, st.data())
def test_one_call_or_many_release_the_same(ids: list[int], data: st.DataObject) -> None:
    stop = data.draw(st.lists(st.text("abe. t", min_size=1, max_size=3), max_size=2))
    bulk, single = StreamText(TABLE, stop), StreamText(TABLE, stop)
    bulk.feed(ids)
    for token_id in ids:
        single.feed([token_id])
    assert (bulk.take(), bulk.chars, bulk.is_stopped) == (
        single.take(),
        single.chars,
        single.is_stopped,
    )


def test_a_stop_string_over_several_tokens_is_never_released() -> None:
    ids = ids_of("one two three STOP four")
    text = StreamText(TABLE, ["STOP"])
    released = ""
    for token_id in ids:
        text.feed([token_id])
        released += text.take()
        assert "S" not in released
    assert text.is_stopped
    assert released == "one two three "


def test_the_beginning_of_a_stop_string_is_released_when_it_goes_on_differently() -> None:
    assert whole(ids_of("a STOCK"), ["STOP"]) == "a STOCK"
    assert whole(ids_of("a STO"), ["STOP"]) == "a STO"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert whole(ids_of("x cab"), ["ab", "ca"]) == "x "


def test_an_empty_stop_string_is_none() -> None:
    assert whole(ids_of("abc"), [""]) == "abc"


def test_overlapping_beginnings_are_all_held() -> None:
    text = StreamText(TABLE, ["aab"])
    released = ""
    for token_id in [i for c in "aaaab" for i in ids_of(c)]:
        text.feed([token_id])
        released += text.take()
    assert released == "aa"
    assert text.is_stopped


@settings(max_examples=60, deadline=None)
@given(IDS, st.lists(st.text("abe. tS", min_size=1, max_size=4), max_size=3))
def test_a_resume_at_every_prefix_gives_the_same_text(ids: list[int], stop: list[str]) -> None:
    for decoding in (TABLE, LIBRARY):
        before = StreamText(decoding, stop)
        total = whole(ids, stop, decoding)
        got = ""
        for cut in range(len(ids) + 1):
            again = StreamText(decoding, stop, skip_chars=before.chars)
            again.feed(ids[:cut])
            again.feed(ids[cut:])
            again.finish()
            assert got + again.take() == total
            if cut < len(ids):
                before.feed([ids[cut]])
                got += before.take()


def test_skipped_characters_are_counted_all_the_same() -> None:
    ids = ids_of("hello there")
    text = StreamText(TABLE, [], skip_chars=6)
    text.feed(ids)
    assert text.take() == "there"
    assert text.chars == len("hello there")


def test_a_long_stream_is_rebuilt_in_no_time() -> None:
    import time

    chosen = random.Random(1)
    ids = [chosen.randrange(5, 2000) for _ in range(8000)]
    started = time.perf_counter()
    whole(ids)
    assert time.perf_counter() - started < 0.1
