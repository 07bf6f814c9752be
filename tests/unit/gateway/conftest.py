"""The gateway runs on uvloop, and its parts must not depend on that: every test runs on both."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Called by pytest-asyncio for each asynchronous test in this folder."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
