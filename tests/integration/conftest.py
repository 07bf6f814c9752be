"""Fixtures of the system tests: one running system a module, its logs in a failed report."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from chaos.system import DEMO_MODEL, RunningSystem, SystemOptions
from tests.harness.near_ties import make_near_tie_model
from tests.harness.rounds import Figures, Load

SYSTEMS = pytest.StashKey[list[tuple[Path, RunningSystem]]]()
"""Systems whose logs belong into a failed report, with the test file that started each. They stay
here after their stop: a failure of the stop itself is reported later still."""

FAILURES = pytest.StashKey[Counter[Path]]()
"""Failed tests that shared a running system, by test file."""

TOO_MANY_FAILURES = 3
"""A system that broke is broken for the tests behind it too: each would wait out its deadlines."""

FIGURES = pytest.StashKey[list[str]]()
"""One line for each module that measured something; printed below the results."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SYSTEMS] = []
    config.stash[FAILURES] = Counter()
    config.stash[FIGURES] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.stash[FAILURES][item.path] >= TOO_MANY_FAILURES:
        pytest.fail("not run: the system of this module broke earlier, see above", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured belongs into every report, passed or not."""
    if lines := terminalreporter.config.stash[FIGURES]:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed system test shows the end of the supervisor's and of every child's log."""
    report = yield
    if report.failed and call.when != "setup" and "system" in getattr(item, "fixturenames", ()):
        item.config.stash[FAILURES][item.path] += 1
    if report.failed:
        of_this_file = [s for path, s in item.config.stash[SYSTEMS] if path == item.path]
        for system in of_this_file[-1:]:  # earlier ones belong to tests that have ended
            report.sections += [
                (f"{name} of {system.state_dir}", text) for name, text in system.logs().items()
            ]
    return report


@pytest.fixture(scope="module")
def new_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[SystemOptions], RunningSystem]:
    """Makes systems that are not started yet; a failure of the module's tests shows their logs."""

    def make(options: SystemOptions) -> RunningSystem:
        system = RunningSystem(tmp_path_factory.mktemp("system"), options)
        request.config.stash[SYSTEMS].append((request.path, system))
        return system

    return make


@pytest.fixture(scope="session")
def near_tie_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose texts change with the last bit of a logit."""
    return make_near_tie_model(DEMO_MODEL, tmp_path_factory.mktemp("near-ties") / "model")


@pytest.fixture(scope="module")
def system_options() -> SystemOptions:
    """The shape of the module's system; a module that needs another one overrides this."""
    return SystemOptions()


@pytest.fixture(scope="module")
def system(
    new_system: Callable[[SystemOptions], RunningSystem], system_options: SystemOptions
) -> Iterator[RunningSystem]:
    """A running system; after the module it is stopped, and nothing may be left behind."""
    with new_system(system_options) as running:
        yield running


@pytest.fixture(scope="module")
def load(system: RunningSystem) -> Load:
    """Sixteen requests and their texts from an undisturbed run."""
    return Load.of(system)


@pytest.fixture(scope="module")
def figures(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Figures]:
    """Collects what the rounds of a module measure; printed at the end of the run."""
    collected = Figures(request.path.stem.removeprefix("test_system_"))
    yield collected
    if collected.rounds:
        request.config.stash[FIGURES].append(collected.write(tmp_path_factory.mktemp("figures")))
