"""A decision is a pure function: given a group, then these actions and this sentence."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.decide import (
    AssignBatch,
    AssignStandby,
    CutRoute,
    EngineView,
    Fence,
    Freeze,
    GiveUp,
    GroupSnapshot,
    Promote,
    PublishRoute,
    StartCache,
    StartEngine,
    StartZygote,
    decide,
)
from supervisor.core.states import EngineState as S
from supervisor.core.verdict import Verdict


def group(
    a: S = S.PRIMARY,
    b: S = S.STANDBY,
    batch: S = S.BATCH,
    **changes: object,
) -> GroupSnapshot:
    engines = (
        EngineView("a", is_batch=False, state=a),
        EngineView("b", is_batch=False, state=b),
        EngineView("c", is_batch=True, state=batch),
    )
    snap = GroupSnapshot("chat", epoch=3, engines=engines, preferred_primary="a")
    return replace(snap, **changes)  # type: ignore[arg-type]


def with_verdict(snap: GroupSnapshot, name: str, verdict: Verdict) -> GroupSnapshot:
    engines = tuple(replace(e, verdict=verdict) if e.name == name else e for e in snap.engines)
    return replace(snap, engines=engines)


def test_a_redundant_group_needs_nothing() -> None:
    decision = decide(group())
    assert decision.recovery == ()
    assert decision.chores == ()
    assert decision.sentence == "no action"


def test_a_dead_primary_is_cut_fenced_and_replaced_in_this_order() -> None:
    decision = decide(with_verdict(group(), "a", Verdict.DEAD))
    assert decision.recovery == (CutRoute(), Fence("a"), Promote("b", 4), PublishRoute())
    assert decision.sentence == "a is dead, promoting b"


def test_a_dead_primary_without_standby_is_only_cut_and_fenced() -> None:
    decision = decide(with_verdict(group(b=S.STARTING), "a", Verdict.DEAD))
    assert decision.recovery == (CutRoute(), Fence("a"))
    assert decision.sentence == "a is dead, there is no standby to promote"


def test_a_hung_primary_is_replaced_while_intensity_allows_it() -> None:
    hung = with_verdict(group(), "a", Verdict.HUNG)
    assert Promote("b", 4) in decide(hung).recovery
    assert decide(replace(hung, is_judging_blocked=True)).recovery == ()


def test_a_hung_primary_without_standby_is_left_alone() -> None:
    assert decide(with_verdict(group(b=S.STOPPED), "a", Verdict.HUNG)).recovery == ()


def test_a_primary_that_answers_wrongly_is_replaced_while_intensity_allows_it() -> None:
    snap = group()
    wrong = replace(snap, engines=(replace(snap.engines[0], is_proven=False), *snap.engines[1:]))
    decision = decide(wrong)
    assert decision.recovery == (CutRoute(), Fence("a"), Promote("b", 4), PublishRoute())
    assert decision.sentence == "a answers wrongly, promoting b"
    assert decide(replace(wrong, is_judging_blocked=True)).recovery == ()


def test_blocked_does_not_stop_the_replacement_of_a_dead_primary() -> None:
    dead = with_verdict(group(), "a", Verdict.DEAD)
    assert Promote("b", 4) in decide(replace(dead, is_judging_blocked=True)).recovery


def test_a_wrong_standby_is_never_promoted() -> None:
    dead = with_verdict(group(), "a", Verdict.DEAD)
    engines = tuple(replace(e, is_proven=e.name != "b") for e in dead.engines)
    decision = decide(replace(dead, engines=engines))
    assert not any(isinstance(action, Promote) for action in decision.recovery)
    assert Fence("b") in decision.chores


def test_the_first_start_waits_for_the_preferred_primary() -> None:
    assert decide(group(a=S.STARTING, b=S.READY, epoch=0)).recovery == ()
    ready = decide(group(a=S.READY, b=S.READY, epoch=0))
    assert ready.recovery == (Promote("a", 1), PublishRoute())


def test_the_first_start_goes_on_without_a_preferred_primary_that_died() -> None:
    decision = decide(group(a=S.STOPPED, b=S.READY, epoch=0))
    assert decision.recovery == (Promote("b", 1), PublishRoute())
    assert StartEngine("a") in decision.chores


def test_nobody_is_promoted_beside_an_engine_that_cannot_be_killed() -> None:
    assert decide(group(a=S.UNKILLABLE)).recovery == ()
    assert decide(group(a=S.FENCING)).recovery == ()


def test_chores_bring_redundancy_back() -> None:
    snap = group(b=S.STOPPED, batch=S.READY)
    assert decide(snap).chores == (StartEngine("b"), AssignBatch("c"))
    assert decide(group(b=S.READY)).chores == (AssignStandby("b"),)


def with_a_third(state: S, *, may_act: bool) -> GroupSnapshot:
    """`b` is no standby any more, `d` is one."""
    snap = group(b=state)
    other = replace(snap.engines[1], name="d", state=S.STANDBY)
    third = replace(snap.engines[1], may_act=may_act)
    return replace(snap, engines=(snap.engines[0], third, snap.engines[2], other))


@pytest.mark.parametrize("third", [S.FENCING, S.UNKILLABLE])
def test_who_was_never_a_primary_and_is_not_proven_dead_forbids_nothing(third: S) -> None:
    snap = with_a_third(third, may_act=False)
    for verdict in (Verdict.DEAD, Verdict.HUNG):
        assert Promote("d", 4) in decide(with_verdict(snap, "a", verdict)).recovery


@pytest.mark.parametrize("third", [S.FENCING, S.UNKILLABLE])
def test_nobody_is_promised_a_promotion_that_the_guard_would_refuse(third: S) -> None:
    snap = with_a_third(third, may_act=True)
    decision = decide(with_verdict(snap, "a", Verdict.DEAD))
    assert decision.recovery == (CutRoute(), Fence("a"))
    assert decision.sentence == "a is dead, nobody is promoted before b is proven dead"
    assert decide(with_verdict(snap, "a", Verdict.HUNG)).recovery == ()


def test_nobody_is_promoted_beside_a_stray() -> None:
    snap = with_verdict(group(has_stray=True), "a", Verdict.DEAD)
    assert decide(snap).recovery == (CutRoute(), Fence("a"))


def test_engines_wait_for_the_zygote_unless_it_has_given_up() -> None:
    snap = group(b=S.STOPPED, zygote_is_ready=False, zygote_may_start=True)
    assert decide(snap).chores == (StartZygote(),)
    cold = replace(snap, zygote_may_start=False, zygote_has_given_up=True)
    assert decide(cold).chores == (StartEngine("b"),)


def test_a_dead_cache_daemon_comes_back_and_nothing_else_happens() -> None:
    assert decide(group(cache_may_start=True)).chores == (StartCache(),)


def test_an_engine_that_died_young_too_often_is_given_up() -> None:
    snap = group(b=S.STOPPED)
    engines = tuple(replace(e, has_given_up=e.name == "b") for e in snap.engines)
    assert decide(replace(snap, engines=engines)).chores == (GiveUp("b"),)


def test_pause_means_pause() -> None:
    dead = with_verdict(group(b=S.STOPPED), "a", Verdict.DEAD)
    decision = decide(replace(dead, is_paused=True))
    assert decision.recovery == ()
    assert decision.chores == ()


def test_a_frozen_batch_engine_is_not_hung() -> None:
    assert decide(with_verdict(group(batch=S.FROZEN), "c", Verdict.HUNG)).chores == ()


def test_a_dead_frozen_batch_engine_is_noticed() -> None:
    assert decide(with_verdict(group(batch=S.FROZEN), "c", Verdict.DEAD)).chores == (Fence("c"),)


views = st.builds(
    EngineView,
    name=st.just("x"),
    is_batch=st.just(False),
    state=st.sampled_from(S),
    verdict=st.sampled_from(Verdict),
    may_start=st.booleans(),
    has_given_up=st.booleans(),
    is_proven=st.booleans(),
    may_act=st.booleans(),
)


@given(st.tuples(views, views, views), st.booleans(), st.booleans(), st.integers(0, 5))
def test_promotion_always_follows_the_fence_of_whoever_may_act(
    engines: tuple[EngineView, EngineView, EngineView], paused: bool, blocked: bool, epoch: int
) -> None:
    named = tuple(replace(e, name=n) for e, n in zip(engines, "abc", strict=True))
    serving = [e for e in named if e.state in (S.PRIMARY, S.DEMOTING, S.PROMOTING)]
    if len(serving) > 1:
        return  # not reachable: one recovery at a time
    snap = GroupSnapshot("g", epoch, named, "a", is_paused=paused, is_judging_blocked=blocked)
    decision = decide(snap)
    promotions = [a for a in decision.recovery if isinstance(a, Promote)]
    if not promotions:
        return
    assert len(promotions) == 1
    assert promotions[0].epoch == epoch + 1
    before = decision.recovery[: decision.recovery.index(promotions[0])]
    for engine in serving:
        assert Fence(engine.name) in before
    assert not any(e.may_act and e.state in (S.FENCING, S.UNKILLABLE) for e in named)
    touched = [getattr(a, "engine", "") for a in decision.chores]
    assert promotions[0].engine not in touched


def test_a_batch_engine_that_is_held_is_frozen_again_unless_paused() -> None:
    held = tuple(replace(e, is_held=e.is_batch) for e in group().engines)
    assert decide(group(engines=held)).chores == (Freeze("c"),)
    assert decide(group(engines=held, is_paused=True)).chores == ()
    dead = with_verdict(group(engines=held), "c", Verdict.DEAD)
    assert decide(dead).chores == (Fence("c"),)


def test_a_frozen_or_evicted_engine_is_not_frozen_again() -> None:
    for state in (S.FROZEN, S.EVICTED):
        snap = group(batch=state)
        held = tuple(replace(e, is_held=e.is_batch) for e in snap.engines)
        assert decide(replace(snap, engines=held)).chores == ()


def test_a_standby_that_only_its_health_page_calls_ill_is_better_than_nobody() -> None:
    for verdict in (Verdict.DEAD, Verdict.HUNG):
        snap = with_verdict(with_verdict(group(), "a", verdict), "b", Verdict.DEGRADED)
        assert Promote("b", 4) in decide(snap).recovery
    wrong = tuple(replace(e, is_proven=e.name != "b") for e in snap.engines)
    assert decide(replace(snap, engines=wrong)).recovery == ()
