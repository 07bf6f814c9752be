"""Failovers by judgement, counted within a period."""

from supervisor.core.intensity import Intensity


def test_the_limit_blocks_until_the_oldest_leaves_the_period() -> None:
    intensity = Intensity(2, period_s=10.0)
    intensity.count(100.0)
    assert not intensity.is_used_up(100.0)
    intensity.count(103.0)
    assert intensity.is_used_up(103.0)
    assert intensity.free_in_s(104.0) == 6.0
    assert not intensity.is_used_up(110.0)
    assert intensity.free_in_s(110.0) == 0.0


def test_more_than_the_limit_waits_for_as_many_to_leave() -> None:
    intensity = Intensity(1, period_s=10.0)
    intensity.recall([1.0, 5.0])
    assert intensity.free_in_s(6.0) == 9.0


def test_the_operators_ack_forgets_them() -> None:
    intensity = Intensity(1, period_s=10.0)
    intensity.count(1.0)
    intensity.forgive()
    assert not intensity.is_used_up(1.0)
    assert intensity.judged_s == []
