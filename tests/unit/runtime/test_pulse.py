"""A pulse counts silence, and nothing that is our own lack."""

import errno
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.errors import DeadlineExceededError, DescriptorLimitError
from supervisor.process import ProcessNotReadableError
from supervisor.runtime.pulse import UNANSWERED, Pulse

_NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")


def pulse_of(error: Exception) -> Pulse:
    async def rejoin() -> None:
        raise error

    cpu = SimpleNamespace(run_delay_ns=0)
    services = SimpleNamespace(
        clock=time, machine=SimpleNamespace(cpu=lambda _: cpu)
    )  # fmt: skip
    unit = SimpleNamespace(
        instance="gateway-0-00000001", is_alive=True, is_stopped_by_signal=False, pid=1,
        is_connected=False, services=services,
    )  # fmt: skip
    return Pulse(cast("Any", unit), "status", is_starting=lambda: False, rejoin=rejoin)


@pytest.mark.parametrize("error", [
    _NO_DESCRIPTOR, OSError(errno.ENFILE, "Too many open files in system"),
    DescriptorLimitError("dup failed"), ProcessNotReadableError(1, _NO_DESCRIPTOR),
])  # fmt: skip
async def test_who_cannot_ask_for_want_of_a_descriptor_has_not_met_silence(
    error: Exception,
) -> None:
    pulse = pulse_of(error)
    for _ in range(2 * UNANSWERED):
        await pulse.beat()
    assert not pulse.is_silent


@pytest.mark.parametrize("error", [
    DeadlineExceededError("an answer", timeout_s=1.0), PermissionError(errno.EACCES, "no"),
    BlockingIOError(errno.EAGAIN, "its backlog is full"),
])  # fmt: skip
async def test_who_does_not_answer_is_silent(error: Exception) -> None:
    pulse = pulse_of(error)
    for _ in range(UNANSWERED):
        assert not pulse.is_silent
        await pulse.beat()
    assert pulse.is_silent
