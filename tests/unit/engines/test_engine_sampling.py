"""Sampling is a pure function of logits, parameters, seed and token number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.native.sampling import draw, sample

LOGITS = np.array([0.5, 2.0, 2.0, -1.0, 1.5], dtype=np.float32)


def pick(logits: Any = LOGITS, **changes: Any) -> int:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7, "count": 0, **changes}
    return sample(np.asarray(logits, dtype=np.float32), **options)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert pick(temperature=0.0) == 1
    assert pick(temperature=1e-9) == 1


def test_the_same_question_gets_the_same_answer() -> None:
    assert [pick(count=n) for n in range(50)] == [pick(count=n) for n in range(50)]


def test_seed_and_token_number_both_matter() -> None:
    assert draw(1, 0) != draw(2, 0)
    assert draw(1, 0) != draw(1, 1)
    assert draw(2**63 - 1, 2**32) < 1.0


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 1 << 24))
def test_draws_lie_in_the_unit_interval(seed: int, count: int) -> None:
    assert 0.0 <= draw(seed, count) < 1.0


def test_draws_are_spread_evenly() -> None:
    draws = [draw(5, n) for n in range(4000)]
    assert abs(float(np.mean(draws)) - 0.5) < 0.02
    assert len({int(d * 100) for d in draws}) == 100


def test_frequencies_follow_the_distribution() -> None:
    weights = np.exp(LOGITS.astype(np.float64))
    expected = weights / weights.sum()
    seen = np.bincount([pick(count=n) for n in range(6000)], minlength=5) / 6000
    assert np.abs(seen - expected).max() < 0.02


def test_top_k_one_is_greedy() -> None:
    assert {pick(top_k=1, count=n) for n in range(100)} == {1}


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    assert {pick(top_k=2, count=n) for n in range(100)} == {1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    weights = np.sort(np.exp(LOGITS.astype(np.float64)))[::-1]
    share_of_two = float(weights[:2].sum() / weights.sum())
    assert {pick(top_p=share_of_two - 1e-6, count=n) for n in range(200)} == {1, 2}
    assert {pick(top_p=share_of_two + 1e-6, count=n) for n in range(200)} == {1, 2, 4}


def test_a_tiny_top_p_still_leaves_one_token() -> None:
    assert {pick(top_p=1e-12, count=n) for n in range(20)} == {1}


def test_temperature_sharpens_and_flattens() -> None:
    cold = sum(pick(temperature=0.1, count=n) in (1, 2) for n in range(500))
    hot = sum(pick(temperature=50.0, count=n) in (1, 2) for n in range(500))
    assert cold == 500 or cold > 490
    assert hot < 300


@pytest.mark.parametrize("top_k", [0, 3, 5, 50])
@settings(deadline=None)
@example(logits=[1.0, -1.2e-27, 0.0, 0.0], top_p=1.0, temperature=1.0, count=0)
@given(
    logits=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.05, 5.0),
    count=st.integers(0, 1000),
)
def test_the_choice_is_always_a_token_with_weight(
    top_k: int, logits: list[float], top_p: float, temperature: float, count: int
) -> None:
    token = pick(logits, top_k=top_k, top_p=top_p, temperature=temperature, count=count)
    assert 0 <= token < len(logits)
    if top_k and top_k < len(logits):
        kept = sorted(logits, reverse=True)[top_k - 1]
        assert logits[token] >= kept
    assert math.isfinite(logits[token])
