"""The batch ladder: pressure freezes at once, lasting pressure evicts, quiet brings back."""

import pytest

from supervisor.core.ladder import Condition, Ladder, LadderSettings, LadderStep, parse_condition
from supervisor.core.states import EngineState as S


def ladder() -> Ladder:
    return Ladder(LadderSettings(Condition("queue", 0), evict_after_s=2.0, resume_after_s=5.0))


def step(
    subject: Ladder, state: S, queue: int, at_s: float, *, held: bool = False
) -> LadderStep | None:
    return subject.step(state, {"queue": queue, "active": 0}, is_held=held, now_s=at_s)


def test_pressure_freezes_at_once() -> None:
    assert step(ladder(), S.BATCH, queue=1, at_s=0.0) is LadderStep.FREEZE


def test_lasting_pressure_evicts_after_its_time() -> None:
    subject = ladder()
    step(subject, S.BATCH, queue=1, at_s=0.0)
    assert step(subject, S.FROZEN, queue=1, at_s=0.1) is None
    assert step(subject, S.FROZEN, queue=1, at_s=2.0) is None
    assert step(subject, S.FROZEN, queue=1, at_s=2.1) is LadderStep.EVICT


def test_quiet_thaws_after_its_time_and_pressure_in_between_starts_over() -> None:
    subject = ladder()
    step(subject, S.BATCH, queue=1, at_s=0.0)
    assert step(subject, S.FROZEN, queue=0, at_s=1.0) is None
    assert step(subject, S.FROZEN, queue=1, at_s=1.5) is None
    assert step(subject, S.FROZEN, queue=0, at_s=1.6) is None
    assert step(subject, S.FROZEN, queue=0, at_s=6.5) is None
    assert step(subject, S.FROZEN, queue=0, at_s=6.6) is LadderStep.THAW


def test_quiet_resumes_an_evicted_engine_unless_it_is_held() -> None:
    subject = ladder()
    assert step(subject, S.EVICTED, queue=0, at_s=0.0) is None
    assert step(subject, S.EVICTED, queue=0, at_s=5.0, held=True) is None
    assert step(subject, S.EVICTED, queue=0, at_s=5.0) is LadderStep.RESUME


def test_an_eviction_in_quiet_times_lasts_its_time_too() -> None:
    subject = ladder()
    step(subject, S.BATCH, queue=0, at_s=0.0)
    assert step(subject, S.EVICTED, queue=0, at_s=60.0) is None
    assert step(subject, S.EVICTED, queue=0, at_s=64.9) is None
    assert step(subject, S.EVICTED, queue=0, at_s=65.0) is LadderStep.RESUME


def test_what_the_operator_froze_is_neither_thawed_nor_evicted() -> None:
    subject = ladder()
    assert step(subject, S.FROZEN, queue=0, at_s=0.0, held=True) is None
    assert step(subject, S.FROZEN, queue=0, at_s=100.0, held=True) is None
    assert step(subject, S.FROZEN, queue=9, at_s=200.0, held=True) is None


def test_what_the_ladder_froze_and_the_operator_then_held_stays() -> None:
    subject = ladder()
    step(subject, S.BATCH, queue=1, at_s=0.0)
    step(subject, S.FROZEN, queue=1, at_s=1.0)
    assert step(subject, S.FROZEN, queue=1, at_s=9.0, held=True) is None
    assert step(subject, S.FROZEN, queue=0, at_s=20.0, held=True) is None
    assert step(subject, S.FROZEN, queue=0, at_s=99.0, held=True) is None


@pytest.mark.parametrize(("queue", "after_s", "expected"), [
    (1, 2.0, LadderStep.EVICT), (0, 5.0, LadderStep.THAW),
])  # fmt: skip
def test_a_new_ladder_goes_on_with_what_it_finds_frozen(
    queue: int, after_s: float, expected: LadderStep
) -> None:
    subject = ladder()
    assert step(subject, S.FROZEN, queue=queue, at_s=100.0) is None
    assert step(subject, S.FROZEN, queue=queue, at_s=99.9 + after_s) is None
    assert step(subject, S.FROZEN, queue=queue, at_s=100.0 + after_s) is expected


def test_without_a_condition_nothing_is_done() -> None:
    subject = Ladder(LadderSettings(None, 0.0, 0.0))
    assert step(subject, S.BATCH, queue=9, at_s=0.0) is None


def test_what_a_ladder_of_yesterday_left_frozen_is_thawed_when_there_is_none_today() -> None:
    subject = Ladder(LadderSettings(None, None, None))
    assert step(subject, S.FROZEN, queue=9, at_s=0.0) is LadderStep.THAW
    assert step(subject, S.FROZEN, queue=9, at_s=0.0, held=True) is None


@pytest.mark.parametrize(
    ("text", "condition"),
    [("queue > 0", Condition("queue", 0)), (" active>=4 ", Condition("active", 3))],
)
def test_conditions_are_parsed(text: str, condition: Condition) -> None:
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    "text", ["", "queue", "queue > x", "tokens > 1", "queue < 3", "queue > 1 or"]
)
def test_rubbish_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="queue > 0"):
        parse_condition(text)
