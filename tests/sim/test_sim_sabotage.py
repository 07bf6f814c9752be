"""The judge judged: with one safety taken out of the runtime, the simulator must object.

A simulator that finds nothing may be blind. Each test breaks one rule on purpose.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_state

from supervisor.core.decide import Decision, GroupSnapshot, decide
from supervisor.core.states import StateEvent
from supervisor.runtime import group as group_module
from supervisor.runtime.cache import CacheUnit
from supervisor.runtime.chores import GroupChores
from supervisor.runtime.commands import GroupCommands
from supervisor.runtime.engine import EngineUnit
from supervisor.runtime.group import GroupRuntime
from supervisor.runtime.operations import OpenOperation
from supervisor.runtime.routing import RouteTable
from tests.sim.machine import FakeMachine
from tests.sim.records import SimDisk
from tests.sim.schedule import Schedule, Step
from tests.sim.shapes import Shape
from tests.sim.simulate import simulate

_PAIR = Shape(has_batch=False)


def objections(*steps: Step, shape: Shape = _PAIR) -> str:
    return "; ".join(simulate(Schedule(1, shape, steps, heals=False)).violations)


async def nothing(*_: Any, **__: Any) -> int:
    return 0


def test_a_promotion_without_evidence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMachine, "_evidence", nothing)
    found = objections(Step(3.0, "unkillable", "primary", 3.0))
    assert "b was promoted to epoch 2 while a was not fenced" in found
    assert "b and a act as primary at the same time" in found


def test_a_recovery_while_paused_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(snap: GroupSnapshot) -> Decision:
        return decide(replace(snap, is_paused=False))

    monkeypatch.setattr(group_module, "decide", careless)
    found = objections(Step(3.0, "pause"), Step(3.5, "kill", "primary"))
    assert "b was promoted while paused" in found
    assert "a was started while paused" not in found  # its chore looks once more by itself


def test_a_fence_without_a_cut_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouteTable, "cut", nothing)
    found = objections(Step(3.0, "restart", "batch"), shape=Shape())
    assert "batch is fenced while gateway-0 is told to route to it" in found


def test_an_epoch_given_out_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupRuntime, "set_epoch", lambda _group, _epoch: None)
    found = objections(Step(3.0, "kill", "primary"))
    assert "were both primary of epoch 1" in found


def test_an_epoch_that_comes_again_behind_a_reboot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful = property(lambda _: 0, lambda _group, _ceiling: None)
    monkeypatch.setattr(GroupRuntime, "epoch_ceiling", forgetful, raising=False)
    assert "were both primary of epoch 1" in objections(Step(3.0, "reboot"))


def test_a_crash_of_the_supervisor_that_ends_a_pause_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = SimDisk.load
    monkeypatch.setattr(SimDisk, "load", lambda disk: replace_state(load(disk), paused=False))
    found = objections(Step(3.0, "pause"), Step(3.1, "crash"), Step(3.2, "kill", "b"))
    assert "b was started while paused" in found


def test_a_fence_that_only_asks_and_acts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attest = GroupCommands.attest

    async def hasty(commands: GroupCommands, name: str, *, is_confirmed: bool) -> OpenOperation:
        return await attest(commands, name, is_confirmed=is_confirmed or True)

    monkeypatch.setattr(GroupCommands, "attest", hasty)
    found = objections(Step(3.0, "unkillable", "a", -1.0), Step(8.0, "fence", "a"))
    assert "the fence of a was not only explained" in found


def test_a_process_whose_unit_was_sent_away_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sloppy(commands: GroupCommands, unit: EngineUnit, _: OpenOperation) -> None:
        unit.apply(StateEvent.CONDEMNED)
        unit.apply(StateEvent.FENCE_PROVEN)
        unit.apply(StateEvent.EVICTION_COMPLETED)

    monkeypatch.setattr(GroupCommands, "_end_batch", sloppy)
    found = objections(Step(3.0, "evict", "batch"), shape=Shape())
    assert "nobody owns batch-" in found


def test_a_chore_that_nobody_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def idle(_: GroupChores) -> None:
        await asyncio.sleep(1.0)

    monkeypatch.setattr(GroupChores, "end_zygote", idle)
    found = objections(Step(3.0, "stop", "zygote-chat", 3.0))
    assert "there is no zygote that works" in found


def test_memory_that_is_never_let_go_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheUnit, "close", lambda _: None)
    assert "descriptors leak: ['kv', 'kv', 'weights']" in objections()


def test_a_healthy_engine_that_is_killed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_right(chores: GroupChores, unit: Any, **_: Any) -> bool:
        return bool(unit.name == "a")

    monkeypatch.setattr(GroupChores, "prove", never_right)
    assert "b was killed though it did its work" in objections()


def test_nothing_is_seen_where_nothing_is_wrong() -> None:
    assert objections(Step(3.0, "kill", "primary"), shape=Shape(workers=2)) == ""
