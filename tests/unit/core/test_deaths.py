"""What an exit status says about whose fault a death was."""

import signal

import pytest

from supervisor.core.deaths import EXPLAINED_WITHIN_S, REMEMBERED, DeathRecord, is_own_fault
from supervisor.core.deaths import sentence_of as sentence


@pytest.mark.parametrize(
    ("status", "is_fault"),
    [
        (0, False), (1, True), (120, True),
        (-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGBUS, True),
        (-signal.SIGKILL, False), (-signal.SIGTERM, False), (-signal.SIGINT, False),
    ],
)  # fmt: skip
def test_only_what_the_process_did_itself_is_a_crash(status: int, is_fault: bool) -> None:
    assert is_own_fault(status) is is_fault


def test_sentences() -> None:
    assert sentence(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert sentence(3) == "left with status 3"
    assert sentence(-40) == "was ended by signal 40"


def test_a_death_is_unexplained_until_somebody_says_how() -> None:
    record = DeathRecord()
    record.died("a", 1.0)
    assert record.unexplained(1.1) == ["a"]
    assert record.explained("a", -signal.SIGSEGV)
    assert not record.explained("a", -signal.SIGSEGV), "it is news only once"
    assert record.unexplained(1.2) == []
    assert record.crashed == ["a"]


def test_an_explanation_may_come_before_the_proof() -> None:
    record = DeathRecord()
    assert not record.explained("a", -signal.SIGKILL)
    record.died("a", 1.0)
    assert record.unexplained(1.0) == []
    assert record.crashed == []


def test_an_explanation_that_never_comes_is_not_awaited_for_ever() -> None:
    record = DeathRecord()
    record.died("a", 1.0)
    assert record.unexplained(1.0 + EXPLAINED_WITHIN_S + 0.1) == []


def test_who_had_said_that_it_failed_has_crashed_whoever_ended_it() -> None:
    record = DeathRecord()
    record.announced("a")
    record.announced("a")
    assert record.explained("a", -signal.SIGKILL)
    assert not record.explained("b", -signal.SIGKILL)
    assert record.crashed == ["a"]


def test_the_record_is_bounded() -> None:
    record = DeathRecord()
    for number in range(REMEMBERED + 5):
        record.explained(f"e{number}", 1)
    assert len(record.crashed) == REMEMBERED
    assert record.crashed[-1] == f"e{REMEMBERED + 4}"
