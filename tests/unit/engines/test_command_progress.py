"""What counts as work of a server, and what as a step."""

import pytest

from engines.command.counters import EngineCounters
from engines.command.processes import TreeLook
from engines.command.progress import Progress

TREE = TreeLook(0, 0, is_runnable=False, is_stopped=False)


@pytest.fixture
def progress() -> Progress:
    return Progress()


def work(progress: Progress) -> tuple[bool, int, int]:
    page = progress.page
    return page.has_work, page.get("active"), page.get("queued")


def test_a_gauge_that_is_left_standing_is_no_work(progress: Progress) -> None:
    progress.look(EngineCounters(work=9, requests=3, waiting=1), TREE)
    assert work(progress) == (False, 0, 0)
    with progress.awaited():
        assert work(progress) == (True, 0, 1)


def test_a_server_that_refuses_because_it_is_full_has_work(progress: Progress) -> None:
    progress.look(EngineCounters(work=9, requests=3, waiting=1), TREE)
    progress.is_refusing = True
    progress.look(None, TREE)
    assert work(progress) == (True, 2, 1)
    progress.piece()
    progress.look(None, TREE)
    assert work(progress) == (False, 0, 0)


def test_counters_that_go_down_are_a_step_and_none_is_not(progress: Progress) -> None:
    steps = []
    for counters in (EngineCounters(9, 1), EngineCounters(3, 1), None, EngineCounters(3, 1)):
        progress.look(counters, TREE)
        steps.append(progress.page.get("steps"))
    assert steps == [0, 1, 1, 1]
