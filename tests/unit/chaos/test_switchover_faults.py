"""An order to promote that is disturbed must be answered, and with an answer that means something.

The run and its supervisor are stand-ins: what is asked here is how the fault takes the answer.
"""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from cache.errors import UnderstudyError
from chaos.client import AdminReply
from chaos.history import Target
from chaos.switchfaults import HitSwitchoverFault


class Hurt:
    """As much of a world as the fault asks for."""

    def __init__(self, answer: int | OSError, *, is_up: bool = True, is_there: bool = True) -> None:
        self._answer = answer
        self._is_there = is_there
        self.sent: list[signal.Signals] = []
        self.system = SimpleNamespace(
            admin=SimpleNamespace(request=self._request), status=lambda: object() if is_up else None
        )

    def _request(self, *_args: object, **_more: object) -> AdminReply:
        if isinstance(self._answer, OSError):
            raise self._answer
        return AdminReply(self._answer, {})

    def locate(self, role: Any) -> Target:
        return Target(role, 100, 1)

    def send(self, _target: Target, sig: signal.Signals) -> bool:
        self.sent.append(sig)
        return self._is_there


def problem(world: Hurt, **params: Any) -> str:
    injury = HitSwitchoverFault(**params).inject(world)  # type: ignore[arg-type]
    assert world.sent == [signal.SIGKILL]
    return injury.problem


@pytest.mark.parametrize("status", [200, 409, 412, 503])
def test_done_and_refused_with_a_reason_are_answers(status: int) -> None:
    assert problem(Hurt(status), target="standby") == ""


@pytest.mark.parametrize("answer", [500, TimeoutError("too long"), ConnectionResetError()])
def test_an_internal_error_or_none_at_all_is_no_answer(answer: int | OSError) -> None:
    assert "the order to promote" in problem(Hurt(answer), target="primary")


def test_a_supervisor_that_is_killed_may_break_off_but_not_answer_nonsense() -> None:
    assert problem(Hurt(ConnectionResetError()), target="supervisor") == ""
    assert problem(Hurt(ConnectionRefusedError(), is_up=False), target="primary") == ""
    assert problem(Hurt(TimeoutError()), target="supervisor") != ""
    assert problem(Hurt(500), target="supervisor") != ""


def test_a_target_that_was_gone_before_the_signal_was_not_hit() -> None:
    with pytest.raises(UnderstudyError, match="gone before the signal"):
        problem(Hurt(200, is_there=False), target="standby")
