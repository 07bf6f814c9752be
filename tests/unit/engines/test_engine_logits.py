"""Choosing on the device follows the same distribution and the same cuts as on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.native.logits import Choice, DeviceChooser, DeviceLogits, HostLogits

ROWS, VOCABULARY = 4, 2500  # more than the head of sorted candidates that travels at once


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, VOCABULARY, generator=random) * 3


def both(values: torch.Tensor) -> tuple[HostLogits, DeviceLogits]:
    chooser = DeviceChooser(ROWS, values.shape[1], torch.device("cpu"))
    return HostLogits(values.numpy()), DeviceLogits(values, chooser)


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"top_k": 5},
        {"top_k": 2000},
        {"top_k": 2499, "top_p": 0.9},
        {"top_p": 0.5},
        {"top_p": 0.999999},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 99_999},
        {"temperature": 0.0},
        {"temperature": 0.3},
    ],
)
def test_device_and_host_draw_the_same_tokens(values: torch.Tensor, cuts: dict[str, float]) -> None:
    """Sums are made in another order, so a draw may fall beside an edge: hardly ever."""
    host, device = both(values)
    different = 0
    for nth in range(60):
        options = {"temperature": 1.0, "seed": 11, "nth": nth, **cuts}
        choices = [Choice(row, **options) for row in (2, 0, 3)]  # type: ignore[arg-type]
        different += host.choose(choices) != device.choose(choices)
    assert different <= 1


def test_a_row_draws_the_same_beside_other_neighbours(values: torch.Tensor) -> None:
    _, device = both(values)
    mine = Choice(1, temperature=1.0, seed=5, nth=9)
    alone = device.choose([mine])
    changed = values.clone()
    changed[[0, 2, 3]] *= -2
    _, beside = both(changed)
    others = [Choice(0, temperature=0.4, top_p=0.9, seed=1), mine, Choice(3)]
    assert beside.choose(others)[1:2] == alone


def test_the_lowest_id_wins_a_tie(values: torch.Tensor) -> None:
    tied = values.clone()
    tied[0, [700, 31, 2000]] = 50.0
    host, device = both(tied)
    assert host.choose([Choice(0)]) == device.choose([Choice(0)]) == [31]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_choose_nothing(values: torch.Tensor, bad: float) -> None:
    broken = values.clone()
    broken[1, 77] = bad
    for logits in both(broken):
        choices = [Choice(0), Choice(1), Choice(1, temperature=1.0), Choice(2, temperature=1.0)]
        found = logits.choose(choices)
        assert found[0] is not None
        assert found[3] is not None
    assert HostLogits(broken.numpy()).choose([Choice(1)]) == [None]
    assert both(broken)[1].choose([Choice(1, temperature=1.0)]) == [None]


def test_a_draw_never_lands_on_padding_or_on_a_token_without_weight() -> None:
    steep = torch.full((ROWS, VOCABULARY), -1e4)
    steep[:, 100] = 0.0
    steep[:, 300] = 0.0
    _, device = both(steep)
    found = {device.choose([Choice(0, temperature=1.0, seed=seed)])[0] for seed in range(40)}
    assert found == {100, 300}


def test_the_array_is_the_logits(values: torch.Tensor) -> None:
    host, device = both(values)
    assert np.array_equal(host.array(), device.array())
