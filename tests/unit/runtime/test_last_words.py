"""What a process said last is what it said itself, and its code is compared as a code."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from supervisor.core.restart import RestartPolicy
from supervisor.errors import MachineRefusedError, StartFailedError
from supervisor.runtime.lastwords import code_of, log_tail
from supervisor.runtime.unit import Unit

_OLD = "error: descriptor_limit: descriptors cannot be duplicated: Too many open files\n"


def unit_in(folder: Path) -> Unit:
    services = SimpleNamespace(
        clock=time,
        paths=SimpleNamespace(log=lambda name: folder / f"{name}.log"),
        metrics=SimpleNamespace(start_refused=lambda **_: None),
        events=SimpleNamespace(append=lambda *_, **__: None),
    )
    policy = RestartPolicy(stable_after_s=5, max_backoff_s=10, max_young_deaths=3)
    return Unit(cast("Any", services), name="a", group="chat", policy=policy,
                on_change=lambda: None)  # fmt: skip


def start_that_ends_with(folder: Path, words: str) -> None:
    """A start of a unit whose log has lines of an older instance."""
    log = folder / "a.log"
    log.write_text(_OLD)
    unit = unit_in(folder)
    unit.begin()
    with log.open("a") as file:
        file.write(words)
    with unit.starts.refusals():
        raise unit.start_failure()


async def test_last_words_of_an_older_instance_are_not_the_newest_ones(tmp_path: Path) -> None:
    with pytest.raises(StartFailedError) as caught:
        start_that_ends_with(tmp_path, "")
    assert not isinstance(caught.value, MachineRefusedError)
    assert "descriptor" not in caught.value.message


async def test_a_sentence_that_mentions_a_code_does_not_have_it(tmp_path: Path) -> None:
    with pytest.raises(StartFailedError) as caught:
        start_that_ends_with(tmp_path, "error: bad_spec: no descriptor_limit: given\n")
    assert not isinstance(caught.value, MachineRefusedError)
    assert caught.value.cause == "bad_spec"


async def test_who_says_that_no_descriptor_is_left_was_refused_by_the_machine(
    tmp_path: Path,
) -> None:
    with pytest.raises(MachineRefusedError):
        start_that_ends_with(tmp_path, "booting\n" + _OLD + "leaving\n")


def test_a_log_that_was_emptied_meanwhile_is_read_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("error: bad_spec: no\n")
    assert log_tail(tmp_path / "log", since_bytes=1 << 20) == "bad_spec: no"


@pytest.mark.parametrize(("words", "code"), [
    ("descriptor_limit: no", "descriptor_limit"),
    ("error: descriptor_limit: x", "descriptor_limit"),
    ("Traceback | at line 3: x", ""), ("", ""),
    ("killed", ""),
])  # fmt: skip
def test_only_a_code_is_a_code(words: str, code: str) -> None:
    assert code_of(words) == code
