"""Every scenario file is one that the runner can perform, and wrong ones are told in words."""

from pathlib import Path

import pytest

from chaos import scenario as module
from chaos.cli import main
from chaos.faults import catalogue
from chaos.scenario import ScenarioError, Step, load_scenario, names


def all_steps(steps: list[Step]) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        found += all_steps(step.repeat.steps) if step.repeat is not None else [step]
    return found


@pytest.mark.parametrize("name", names())
def test_a_scenario_reads_and_ends_in_calm_or_a_stop(name: str) -> None:
    scenario = load_scenario(name)
    steps = all_steps(scenario.steps)
    assert any(step.fault or step.storm for step in steps)
    assert any(step.load for step in steps), "without load no stream proves anything"
    last = steps[-1]
    stops = last.command is not None and last.command.do == "stop"
    assert last.calm or stops or last.expect


@pytest.mark.parametrize("name", names())
def test_every_expectation_about_a_change_follows_a_fault_or_an_order(name: str) -> None:
    seen = False
    for step in all_steps(load_scenario(name).steps):
        seen = seen or step.fault is not None or step.command is not None
        if step.expect is not None and (step.expect.same or step.expect.other):
            assert seen


def test_every_fault_of_the_catalogue_says_what_it_is_and_has_a_name() -> None:
    kinds = [fault.model_fields["kind"].default for fault in catalogue()]
    assert len(set(kinds)) == len(kinds)
    assert all((fault.__doc__ or "").strip() for fault in catalogue())


def test_every_kind_of_fault_is_used_by_some_scenario() -> None:
    used = set().union(*(load_scenario(name).kinds_of_faults() for name in names()))
    assert used == {fault.model_fields["kind"].default for fault in catalogue()}


def write(directory: Path, text: str) -> None:
    (directory / "mine.yaml").write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps: [", "no YAML"),
        ("title: x\nsteps: [{wait: {seconds: 1s}, calm: now}]", "exactly one key"),
        ("title: x\nsteps: [{fault: {do: {kind: meteor}}}]", "meteor"),
        ("title: x\nsteps: [{wait: {seconds: 5}}]", "unit"),
        ("title: x\nsteps: []\nsize: 3", "size"),
    ],
)
def test_a_wrong_file_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.setattr(module, "SCENARIOS", tmp_path)
    write(tmp_path, text)
    with pytest.raises(ScenarioError, match=sentence):
        load_scenario("mine")


def test_an_unknown_scenario_and_a_missing_record_end_with_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "--scenario", "nothing"]) == 2
    assert main(["run"]) == 2
    assert main(["check", str(tmp_path)]) == 2
    assert "kill-each" in capsys.readouterr().err


def test_the_list_names_scenarios_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "kill-each" in shown
    assert "clients_leave" in shown
