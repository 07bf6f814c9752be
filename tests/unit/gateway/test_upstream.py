"""The connection to an engine fails in the one way that is tried again, whatever the reason."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from supervisor.gateway.errors import EngineLostError
from supervisor.gateway.protocol import RouteTarget
from supervisor.gateway.upstream import EngineConnection

NOBODY = RouteTarget("chat-a-1", "/nowhere/chat-a-1.gen", 1)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No number below the limit is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(probe)


async def test_without_descriptors_the_attempt_fails_and_not_the_request() -> None:
    with no_descriptors(), pytest.raises(EngineLostError, match="Too many open files"):
        await EngineConnection.open(NOBODY, deadline=None)


async def test_an_engine_that_is_gone_is_a_failed_attempt_too() -> None:
    with pytest.raises(EngineLostError):
        await EngineConnection.open(NOBODY, deadline=None)
