"""Stories about the lives of processes, and about supervisors that follow one another quickly."""

import asyncio
import logging
import re
from dataclasses import replace
from typing import Any, Final

import pytest
from msgspec.structs import replace as replace_struct

from supervisor.errors import MachineRefusedError
from supervisor.gateway.protocol import Routes
from supervisor.runtime.gateways import GatewayFleet
from supervisor.runtime.machine import LeftBehind
from tests.sim.fakes import FakeGateway, FakeZygote
from tests.sim.machine import FakeMachine
from tests.sim.proc import Proc, ProcState
from tests.sim.schedule import Step, draw
from tests.sim.shapes import Shape
from tests.sim.simulate import simulate
from tests.sim.stage import Stage, play

_INSTANCE: Final = re.compile(r"-[0-9a-f]{8}\b|\bpid \d+")


def test_a_zygote_that_needs_long_to_fail_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after six seconds of imports; only what has come up can have lived long."""

    async def story(stage: Stage) -> None:
        monkeypatch.setattr(FakeZygote, "between", lambda *_: 6.0)
        stage.world.doomed["zygote-chat"] = 1000
        proc = stage.engine("zygote-chat")
        proc.is_blemished = "doom"
        proc.kill()
        await stage.until(lambda: stage.group.zygote.starts.has_given_up, "the end of patience",
                          within_s=60)  # fmt: skip
        stage.engine("b").is_blemished = "kill"
        stage.engine("b").kill()
        await asyncio.sleep(0.1)
        await stage.whole()  # engines start cold

    play(story)


def test_a_pause_during_adoption_forgets_nothing_of_what_was_saved() -> None:
    async def story(stage: Stage) -> None:
        await stage.order(stage.keeper.life.controller.evict("batch", True, False))
        await asyncio.sleep(1.5)  # the journal has it
        ceiling = stage.keeper.disk.state.epochs["chat"]
        first = stage.keeper.life
        stage.world.has_descriptors = False  # the second one cannot adopt anything yet
        first.kill()
        await stage.until(lambda: stage.keeper.life is not first, "the second life", within_s=5)
        pausing = stage.keeper.life.create_task(stage.keeper.life.controller.pause())
        await asyncio.sleep(0.5)  # it is on disk
        assert not pausing.done(), "what was found is still looked at"
        assert not stage.group.is_open
        saved = stage.keeper.disk.state
        assert saved.paused
        assert saved.roles["batch"] == "evicted"
        assert saved.held == ["batch"]
        assert saved.canaries
        assert saved.epochs["chat"] == ceiling
        second = stage.keeper.life
        second.kill()
        stage.world.has_descriptors = True
        await stage.until(lambda: stage.keeper.life is not second and stage.group.is_open,
                          "the third life", within_s=5)  # fmt: skip
        await stage.order(stage.keeper.life.controller.unpause())
        await stage.whole()
        await asyncio.sleep(5)
        assert stage.group.engine("batch").state == "evicted"

    play(story, shape=Shape())


def test_the_operators_freeze_outlives_the_frozen_process_until_he_says_otherwise() -> None:
    async def story(stage: Stage) -> None:
        unit = stage.group.engine("batch")
        await stage.order(stage.keeper.life.controller.freeze("batch"))
        frozen = stage.engine("batch")
        frozen.is_blemished = "kill"
        frozen.kill()
        await stage.until(lambda: unit.instance != frozen.instance and unit.state == "frozen",
                          "the next instance, frozen", within_s=5)  # fmt: skip
        assert stage.engine("batch").state is ProcState.STOPPED
        await stage.order(stage.keeper.life.controller.restart("batch"))
        assert unit.state == "batch"
        await stage.crash_supervisor()
        await stage.whole()
        assert stage.group.engine("batch").state == "batch"

    play(story, shape=Shape())


@pytest.mark.parametrize("is_slow", [False, True])
def test_an_engine_evicted_while_its_fork_is_under_way_leaves_no_process(is_slow: bool) -> None:
    async def story(stage: Stage) -> None:
        unit = stage.group.engine("batch")
        stage.engine("batch").is_blemished = "kill"
        if is_slow:
            stage.engine("zygote-chat").slow_s = 4.0
            stage.engine("zygote-chat").is_blemished = "slow"
        stage.engine("batch").kill()
        await stage.until(lambda: unit.is_forking, "a fork", within_s=2)
        await stage.order(stage.keeper.life.controller.evict("batch", False, False))
        assert unit.state == "evicted"
        assert not stage.world.living("batch")
        await asyncio.sleep(12)
        assert not stage.world.living("batch")
        assert unit.state == "evicted"

    play(story, shape=Shape())


def test_a_worker_that_nobody_can_connect_to_is_ended_at_once() -> None:
    """It would take connections and have no routes for them."""

    async def story(stage: Stage) -> None:
        stage.engine("gateway-0").is_blemished = "kill"
        stage.engine("gateway-0").kill()
        await stage.until(lambda: stage.world.births["gateway-0"] == 2, "a worker", within_s=2)
        stage.world.has_descriptors = False
        await asyncio.sleep(0.5)
        assert stage.world.births["gateway-0"] == 2, "the next one is refused meanwhile"
        assert not stage.world.living("gateway-0"), "it accepts connections, and knows no route"
        stage.world.has_descriptors = True
        await stage.whole()

    play(story)


def test_a_supervisor_that_finds_no_descriptor_adopts_as_soon_as_it_has_some() -> None:
    async def story(stage: Stage) -> None:
        alive = {p.instance for p in stage.world.living()}
        first = stage.keeper.life
        stage.world.has_descriptors = False
        first.kill()
        await asyncio.sleep(3)
        assert stage.keeper.life is not first
        assert not stage.group.is_open
        stage.world.has_descriptors = True
        await stage.whole(within_s=1)
        assert {p.instance for p in stage.world.living()} == alive

    play(story, shape=Shape(workers=2))


@pytest.mark.parametrize("name", ["zygote-chat", "cache-chat", "gateway-0"])
def test_a_helper_that_answers_too_late_to_be_adopted_is_joined_later(name: str) -> None:
    async def story(stage: Stage) -> None:
        alive = {p.instance for p in stage.world.living()}
        proc, before = stage.engine(name), stage.keeper.life
        proc.starved_since_ns, proc.slow_s = stage.world.clock.now_ns, 3.0  # no hello within 2 s
        before.kill()
        await stage.until(lambda: stage.keeper.life is not before and stage.group.is_open,
                          "the next supervisor", within_s=5)  # fmt: skip
        assert "not_adopted" in stage.kinds()
        await asyncio.sleep(8)  # as long as it starves it is not blamed
        proc.delay_ns, proc.starved_since_ns, proc.slow_s = proc.look().run_delay_ns, None, 0.0
        await stage.until(lambda: "joined" in stage.kinds(), "its answer", within_s=4)
        await stage.whole()
        assert {p.instance for p in stage.world.living()} == alive

    play(story, shape=Shape(workers=2))


def test_an_epoch_that_only_a_gateway_knows_is_overtaken() -> None:
    """Else that worker would refuse every route from now on."""

    async def story(stage: Stage) -> None:
        stage.world.judge.journal_was_lost = True
        worker, primary = stage.engine("gateway-0"), stage.group.primary.instance
        assert isinstance(worker, FakeGateway)
        worker.table = Routes(
            worker.table.sequence, [replace_struct(worker.table.groups[0], epoch=9)]
        )
        stage.engine("b").is_blemished = "kill"
        stage.engine("b").kill()
        await stage.until(lambda: stage.group.epoch == 10, "a higher epoch", within_s=3)
        await stage.whole()
        assert stage.group.primary.instance == primary
        route = worker.route("chat")
        assert route is not None
        assert route.primary is not None
        assert (route.epoch, route.primary.epoch) == (10, 10)

    play(story)


@pytest.mark.parametrize("where", ["left_behind", "open"])
def test_a_start_that_fails_before_it_is_in_charge_ends_nobody(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot look at what is there, or all workers are dead and somebody has their port."""

    async def story(stage: Stage) -> None:
        alive = {p.instance for p in stage.world.living() if p.kind != "gateway"}
        first, owner = stage.keeper.life, FakeMachine if where == "left_behind" else GatewayFleet
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, _refuse)
            first.kill()
            stage.engine("gateway-0").is_blemished = "kill"
            stage.engine("gateway-0").kill()
            await asyncio.sleep(3)
            assert len(stage.keeper.lives) > 3
            assert {p.instance for p in stage.world.living()} == alive
        await stage.whole()
        assert {p.instance for p in stage.world.living() if p.kind != "gateway"} == alive

    play(story)


def _refuse(*_: object, **__: object) -> None:
    raise MachineRefusedError("supervisor", "no")


@pytest.mark.parametrize("seed", [3, 17, 29])
def test_the_wall_clock_decides_nothing(seed: int) -> None:
    """Set to anything at any time it changes no step of what happens."""

    def told(jump_s: float) -> list[str]:
        jumps = (Step(at_s, "clock_jump", "", jump_s) for at_s in (0.1, 2.6, 3.1, 7.0))
        drawn = draw(seed)
        steps = sorted((*drawn.steps, *jumps), key=lambda step: step.at_s)
        outcome = simulate(replace(drawn, steps=tuple(steps)))
        assert not outcome.violations
        return [_INSTANCE.sub("", h) for h in outcome.history if "clock_jump" not in h]

    assert told(86400.0) == told(0.0)
    assert told(-9e8) == told(0.0)


def _count_far_ahead(stage: Stage) -> None:
    """The workers have a table in force of a supervisor whose clock was ahead by years."""
    for proc in stage.world.living("gateway-0"):
        assert isinstance(proc, FakeGateway)
        proc.table = replace_struct(proc.table, sequence=1 << 60)


@pytest.mark.parametrize("is_seen_at_join", [True, False])
def test_routes_go_above_what_a_worker_has_whoever_counted(is_seen_at_join: bool) -> None:
    async def story(stage: Stage) -> None:
        _count_far_ahead(stage)
        if is_seen_at_join:
            await stage.crash_supervisor()
            await stage.whole()
        await stage.kill_primary()
        worker = stage.world.find("gateway-0")
        assert isinstance(worker, FakeGateway)
        await stage.until(lambda: worker.route("chat") == stage.group.route(), "its route",
                          within_s=0.5)  # fmt: skip
        assert ("route_unconfirmed" in stage.kinds()) is not is_seen_at_join
        await stage.whole()

    play(story)


@pytest.mark.parametrize("is_full", [True, False])
def test_epochs_that_no_disk_has_taken_are_told(
    is_full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(stage: Stage) -> None:
        await asyncio.sleep(1.5)
        stage.keeper.life.kill()
        stage.keeper.disk.is_full = is_full
        for proc in stage.world.living():
            proc.is_blemished = "kill"
            proc.kill()
        logging.getLogger("supervisor.runtime.keeping").addHandler(caplog.handler)
        await asyncio.sleep(1)
        await stage.whole()

    try:
        play(story)
    finally:
        logging.getLogger("supervisor.runtime.keeping").removeHandler(caplog.handler)
    assert any("has not taken the epochs" in m for m in caplog.messages) is is_full


def test_what_was_frozen_by_order_outlives_a_crash_of_a_paused_supervisor() -> None:
    async def story(stage: Stage) -> None:
        await stage.whole()
        for name in ("a", "batch"):  # so that the epoch of its role is not the first
            stage.engine(name).is_blemished = "kill"
            stage.engine(name).kill()
            await asyncio.sleep(5)
        await stage.until(lambda: stage.group.engine("batch").state == "batch", "the batch engine",
                          within_s=20)  # fmt: skip
        await stage.order(stage.keeper.life.controller.freeze("batch"))
        frozen = stage.engine("batch")
        await stage.keeper.life.controller.pause()
        await stage.crash_supervisor()
        await asyncio.sleep(10)
        await stage.keeper.life.controller.unpause()
        await asyncio.sleep(20)
        unit = stage.group.engine("batch")
        assert (unit.instance, unit.state) == (frozen.instance, "frozen")
        assert frozen.state is ProcState.STOPPED
        await stage.order(stage.keeper.life.controller.thaw("batch"))
        worker = stage.world.find("gateway-0")
        assert isinstance(worker, FakeGateway)
        await stage.until(lambda: unit.status, "its answer", within_s=3)
        assert unit.status.role == "batch"
        assert unit.status.epoch > 0
        await stage.until(lambda: worker.routes_to(frozen.instance, unit.status.epoch),
                          "its route", within_s=3)  # fmt: skip
        await asyncio.sleep(20)
        assert (unit.instance, unit.state) == (frozen.instance, "batch")
        await stage.whole()

    play(story, shape=Shape())


@pytest.mark.parametrize("unit", ["a", "b", "batch", "zygote-chat", "cache-chat", "gateway-0"])
def test_a_connection_that_breaks_is_made_again_and_costs_no_process(unit: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.group.engine("batch").state == "batch", "the batch engine",
                          within_s=20)  # fmt: skip
        alive = {p.instance for p in stage.world.living()}
        for _ in range(3):
            for client in tuple(stage.engine(unit).connections):
                client.lost()
            await asyncio.sleep(10)
            assert {p.instance for p in stage.world.living()} == alive
            assert stage.engine(unit).connections
        assert "verdict" not in stage.kinds()

    play(story, shape=Shape())


@pytest.mark.parametrize("before_s", [0.0, 0.3, 2.5])
def test_a_standby_whose_connection_broke_a_moment_ago_is_promoted(before_s: float) -> None:
    async def story(stage: Stage) -> None:
        await asyncio.sleep(3)
        for client in tuple(stage.engine("b").connections):
            client.lost()
        await asyncio.sleep(before_s)
        await stage.kill_primary()
        assert stage.group.primary.name == "b"
        assert "recovery_failed" not in stage.kinds()

    play(story)


@pytest.mark.parametrize("order", ["evict", "freeze"])
def test_an_order_to_the_batch_engine_delays_no_failover(order: str) -> None:
    """It waits for the kernel: for memory that comes back, or for a stop that is not seen."""

    async def story(stage: Stage) -> None:
        unit = stage.group.engine("batch")
        await stage.until(lambda: unit.state == "batch", "the batch engine", within_s=20)
        proc = stage.engine("batch")
        proc.is_blemished = order
        proc.stop = lambda: None  # type: ignore[method-assign]
        proc._tear_down = lambda: None  # type: ignore[method-assign]
        controller = stage.keeper.life.controller
        work = controller.evict("batch", False, False) if order == "evict" else (
            controller.freeze("batch")
        )  # fmt: skip
        task = asyncio.create_task(stage.order(work))
        await asyncio.sleep(0.1)
        assert not task.done()
        began_s = stage.world.clock.monotonic()
        await stage.kill_primary()
        assert stage.world.clock.monotonic() - began_s < 0.1
        await task

    play(story, shape=Shape())


@pytest.mark.parametrize(("unit", "verb"), [
    ("b", "assume"), ("b", "canary"), ("b", "descriptors"), ("b", "status"),
    ("gateway-0", "routes"), ("gateway-0", "status"), ("cache-chat", "status"),
    ("cache-chat", "attach"), ("zygote-chat", "fork"),
])  # fmt: skip
def test_an_answer_that_makes_no_sense_is_no_answer_and_stops_nothing(unit: str, verb: str) -> None:
    async def story(stage: Stage) -> None:
        proc = stage.engine(unit)
        proc.is_blemished = "mad"
        handle = proc.handle

        def mad(asked: str, params: Any, memories: Any, reply: Any) -> None:
            if asked == verb:
                reply([7, "nonsense"])
            else:
                handle(asked, params, memories, reply)

        proc.handle = mad  # type: ignore[method-assign,assignment]
        await asyncio.sleep(3)
        if verb == "descriptors":
            await stage.crash_supervisor()
            stage.engine("cache-chat").is_blemished = "kill"
            stage.engine("cache-chat").kill()
        await stage.kill_primary()
        await stage.crash_supervisor()
        proc.handle = handle  # type: ignore[method-assign]
        await stage.whole()

    play(story)


def test_a_daemon_whose_start_has_begun_is_not_started_behind_a_pause() -> None:
    """Its memory is still collected from an engine when the operator pauses."""

    async def story(stage: Stage) -> None:
        for name in ("a", "b"):
            _answers_late(stage.engine(name), "descriptors", 1.0)
        await asyncio.sleep(1.5)
        before = stage.keeper.life
        before.kill()
        stage.engine("cache-chat").is_blemished = "kill"
        stage.engine("cache-chat").kill()
        await stage.until(lambda: stage.keeper.life is not before and "cache" in stage.group.tasks,
                          "the start of the daemon", within_s=10)  # fmt: skip
        await stage.keeper.life.controller.pause()
        born = stage.world.births["cache-chat"]
        await asyncio.sleep(5)
        assert stage.world.births["cache-chat"] == born
        await stage.keeper.life.controller.unpause()
        await stage.whole()

    play(story)


def _answers_late(proc: Proc, late: str, delay_s: float) -> None:
    handle = proc.handle

    def slowly(verb: str, params: Any, memories: Any, reply: Any) -> None:
        if verb == late:
            proc.later(delay_s, lambda: handle(verb, params, memories, reply))
        else:
            handle(verb, params, memories, reply)

    proc.handle = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("unit", ["zygote-chat", "cache-chat"])
def test_a_helper_that_is_silent_is_not_ended_in_the_moment_of_a_pause(unit: str) -> None:
    async def story(stage: Stage) -> None:
        proc = stage.engine(unit)
        proc.is_blemished = "stop"
        proc.stop()
        tasks, key = stage.group.tasks, f"end {unit.partition('-')[0]}"
        run = tasks.run

        def run_and_pause(what: str, work: Any) -> None:
            run(what, work)
            if what == key:
                stage.keeper.life.services.is_paused = True

        tasks.run = run_and_pause
        await stage.until(lambda: stage.keeper.life.services.is_paused, "its end", within_s=20)
        tasks.run = run
        await asyncio.sleep(5)
        assert stage.engine(unit) is proc
        await stage.keeper.life.controller.unpause()
        await stage.whole()

    play(story)


def test_a_look_for_strays_that_hangs_in_the_kernel_stops_no_housekeeping() -> None:
    """The environment of a process whose memory is locked cannot be read, for as long as it is."""

    async def story(stage: Stage) -> None:
        gate, looks = asyncio.Event(), 0

        async def hang(state_id: str) -> list[LeftBehind]:
            nonlocal looks
            looks += 1
            await gate.wait()
            return []

        machine = stage.keeper.life.machine
        look, machine.left_behind = machine.left_behind, hang  # type: ignore[method-assign]
        await asyncio.sleep(12)
        assert looks == 1
        await stage.order(stage.keeper.life.controller.freeze("batch"))
        stage.engine("gateway-0").is_blemished = "stop"
        stopped = stage.engine("gateway-0")
        stopped.stop()
        await asyncio.sleep(10)
        assert stage.keeper.disk.state.held == ["batch"]
        assert stage.engine("gateway-0") is not stopped
        machine.left_behind = look  # type: ignore[method-assign]
        gate.set()
        await stage.whole()

    play(story, shape=Shape())


def test_a_start_is_not_given_up_because_the_machine_slept_before_a_worker_answered() -> None:
    async def story(stage: Stage) -> None:
        await asyncio.sleep(1.5)
        stage.keeper.life.kill()
        for proc in stage.world.living():
            proc.is_blemished = "kill"
            proc.kill()
        stage.world.doomed["gateway-0"] = 3
        await asyncio.sleep(1)
        life = stage.keeper.life
        await stage.until(lambda: stage.group.is_serving, "service", within_s=10)
        assert not stage.keeper.life.runtime.is_ready
        stage.world.clock.stall(70)
        await stage.whole(within_s=100)
        assert stage.keeper.life is life

    play(story)


@pytest.mark.parametrize("is_dead", [False, True])
def test_slots_are_freed_for_a_dead_worker_and_not_for_one_that_is_slow(is_dead: bool) -> None:
    async def story(stage: Stage) -> None:
        await asyncio.sleep(1.5)
        worker, before = stage.engine("gateway-0"), stage.keeper.life
        worker.is_blemished = "touched"
        before.kill()
        if is_dead:
            worker.kill()
        else:
            worker.slow_s = 3.0
        await stage.until(lambda: stage.keeper.life is not before and stage.group.is_open,
                          "the next supervisor", within_s=20)  # fmt: skip
        worker.slow_s = 0.0
        await stage.whole()
        assert is_dead or "not_adopted" in stage.kinds()
        assert (worker.instance in stage.group._lost_gateways) is is_dead

    play(story)
