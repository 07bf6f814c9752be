"""Requests of a chaos run last long enough to be under way together."""

from dataclasses import replace

from chaos.requests import make_pool, stretch

POOL = make_pool(24, tokens=(40, 160), seed=3)


def test_where_a_stream_lasts_nothing_is_stretched() -> None:
    assert stretch(POOL, tokens_per_s=120.0) == POOL


def test_where_it_would_be_over_at_once_answers_are_longer() -> None:
    longer = stretch(POOL, tokens_per_s=900.0)
    factors = {new.max_tokens / old.max_tokens for new, old in zip(longer, POOL, strict=True)}
    assert factors in ({2.0}, {4.0})
    assert [replace(r, max_tokens=0) for r in longer] == [replace(r, max_tokens=0) for r in POOL]


def test_no_answer_outgrows_a_slot() -> None:
    assert max(request.max_tokens for request in stretch(POOL, tokens_per_s=1e9)) <= 8 * 160
