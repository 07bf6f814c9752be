"""Fixtures of the system tests: one running system a module, its logs in a failed report."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from chaos.system import RunningSystem, SystemOptions
from tests.harness.rounds import Figures, Load

SYSTEMS = pytest.StashKey[list[tuple[Path, RunningSystem]]]()
"""Systems whose logs belong into a failed report, with the test file that started each. They stay
here after their stop: a failure of the stop itself is reported later still."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SYSTEMS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed system test shows the end of the supervisor's and of every child's log."""
    report = yield
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
    """Collects what the rounds of a module measure; printed at its end."""
    collected = Figures(request.path.stem.removeprefix("test_system_"))
    yield collected
    if collected.rounds:
        text = collected.write(tmp_path_factory.mktemp("figures"))
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\n{text}")
