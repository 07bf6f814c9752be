"""Restart policy: lived long, at once; died young, later and later; too often, never."""

from dataclasses import replace

import pytest

from supervisor.core.restart import (
    FIRST_BACKOFF_S,
    LONGEST_SERVED_S,
    SERVED_PAUSE_S,
    RestartPolicy,
    RestartRecord,
)

POLICY = RestartPolicy(stable_after_s=5.0, max_backoff_s=1.0, max_young_deaths=4)


def test_one_that_lived_long_comes_back_at_once() -> None:
    record = RestartRecord().after_death(POLICY, lived_s=60.0, now_s=100.0, was_ours=False)
    assert record.not_before_s == 100.0
    assert record.restarts == 1


def test_young_deaths_double_the_delay_up_to_the_bound_and_end() -> None:
    record, delays = RestartRecord(), []
    for _ in range(4):
        record = record.after_death(POLICY, lived_s=0.1, now_s=0.0, was_ours=False)
        delays.append(record.not_before_s)
    assert delays == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 1.0, 1.0]
    assert record.has_given_up


def test_what_has_served_is_never_given_up_and_its_pauses_begin_late() -> None:
    record, delays = RestartRecord(), []
    for _ in range(20):
        record = record.after_death(POLICY, lived_s=0.1, now_s=0.0, was_ours=False, has_served=True)
        delays.append(record.not_before_s)
    assert delays[:6] == [*[SERVED_PAUSE_S] * 3, FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 1.0]
    assert max(delays) == LONGEST_SERVED_S
    assert not record.has_given_up
    assert record.young_deaths == 0


@pytest.mark.parametrize("was_ours", [True, False])
def test_behind_a_primary_the_streams_go_on_first(was_ours: bool) -> None:
    record = RestartRecord().after_death(
        POLICY, lived_s=60.0, now_s=100.0, was_ours=was_ours, has_served=True
    )
    assert record.not_before_s == 100.0 + SERVED_PAUSE_S


def test_there_is_no_pause_where_starts_wait_for_the_streams_themselves() -> None:
    policy = replace(POLICY, served_pause_s=0.0)
    record, delays = RestartRecord(), []
    for _ in range(5):
        record = record.after_death(policy, lived_s=0.1, now_s=0.0, was_ours=False, has_served=True)
        delays.append(record.not_before_s)
    assert delays == [0.0, 0.0, 0.0, FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S]


def test_deaths_before_service_count_whatever_lies_between_them() -> None:
    record = RestartRecord()
    for has_served in (False, True, False, True, False, False):
        record = record.after_death(
            POLICY, lived_s=0.1, now_s=0.0, was_ours=False, has_served=has_served
        )
    assert record.has_given_up


def test_a_long_life_clears_the_record() -> None:
    record = RestartRecord().after_death(POLICY, lived_s=0.1, now_s=0.0, was_ours=False)
    record = record.after_death(POLICY, lived_s=9.0, now_s=9.0, was_ours=False)
    assert record.young_deaths == 0


def test_deaths_that_we_caused_do_not_count() -> None:
    record = RestartRecord()
    for _ in range(10):
        record = record.after_death(POLICY, lived_s=0.0, now_s=1.0, was_ours=True)
    assert not record.has_given_up
    assert record.not_before_s == 1.0


def test_an_operators_restart_forgives() -> None:
    record = RestartRecord(restarts=7, young_deaths=4, has_given_up=True).forgiven()
    assert record == RestartRecord(restarts=7)


def test_a_machine_that_refuses_is_asked_again_for_ever_with_pauses() -> None:
    record, delays = RestartRecord(), []
    for _ in range(30):
        record = record.after_trouble(POLICY, now_s=100.0)
        delays.append(record.not_before_s - 100.0)
    assert delays[:4] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 1.0, 1.0]
    assert max(delays) == 1.0
    assert not record.has_given_up
    assert record.young_deaths == 0
    assert record.restarts == 0
    assert record.started().troubles == 0
