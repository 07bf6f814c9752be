"""The transition table: complete, without dead ends, and strict."""

import pytest

from supervisor.core.states import (
    ALIVE,
    TRANSITIONS,
    EngineState,
    Facts,
    IllegalTransitionError,
    StateEvent,
    Transition,
    next_state,
)


def test_no_row_is_written_twice() -> None:
    keys = [(t.source, t.event) for t in TRANSITIONS]
    assert len(keys) == len(set(keys))


def test_every_state_can_be_reached_and_left() -> None:
    assert {t.target for t in TRANSITIONS} | {EngineState.ABSENT} == set(EngineState)
    assert {t.source for t in TRANSITIONS} == set(EngineState)


def test_every_event_is_used() -> None:
    assert {t.event for t in TRANSITIONS} == set(StateEvent)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda t: f"{t.source}-{t.event}")
def test_every_row_leads_where_it_says(row: Transition) -> None:
    facts = Facts(predecessor_fenced=True, known_answer_matches=True)
    assert next_state(row.source, row.event, facts) is row.target


def test_promotion_without_a_fenced_predecessor_is_refused() -> None:
    with pytest.raises(IllegalTransitionError) as caught:
        next_state(
            EngineState.STANDBY, StateEvent.PROMOTION_ORDERED, Facts(), engine="b", story="..."
        )
    assert caught.value.code == "illegal_transition"


def test_an_engine_with_a_wrong_answer_is_never_ready() -> None:
    with pytest.raises(IllegalTransitionError):
        next_state(EngineState.STARTING, StateEvent.PROVEN, Facts())


def test_every_living_engine_can_be_condemned() -> None:
    for state in ALIVE:
        assert next_state(state, StateEvent.CONDEMNED, Facts()) is EngineState.FENCING


def test_an_unkillable_engine_leaves_by_evidence_or_by_the_operators_word() -> None:
    rows = [t for t in TRANSITIONS if t.source is EngineState.UNKILLABLE]
    assert {(t.event, t.target) for t in rows} == {
        (StateEvent.FENCE_PROVEN, EngineState.STOPPED),
        (StateEvent.HARMLESSNESS_ATTESTED, EngineState.STOPPED),
    }
