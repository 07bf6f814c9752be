"""Stories told to the simulator: what random schedules reach too rarely to rely on.

Each is a coroutine that hurts the world and looks at the supervisor, on the virtual clock; the
invariants of every simulation hold besides.
"""

import asyncio
from typing import Any

import pytest

from supervisor.core.states import EngineState as S
from supervisor.errors import PreconditionError
from supervisor.process import SpawnError
from tests.sim.fakeengine import RIGHT, FakeEngine
from tests.sim.proc import Proc
from tests.sim.shapes import Shape
from tests.sim.stage import Stage, play
from tests.sim.world import Trap

# ---------------------------------------------------------------- unkillable


async def make_unkillable(stage: Stage, name: str, *, within_s: float = 10) -> Proc:
    proc = stage.engine(name)
    proc.is_blemished = "unkillable"
    proc.evidence_delay_s = -1.0  # for ever
    proc.kill()
    stage.world.judge.note(f"{proc} hangs in the kernel")
    unit = stage.group.engine(name)
    await stage.until(lambda: unit.verdict in ("dead", "hung") or unit.state is S.UNKILLABLE,
                      "the loss", within_s=within_s)  # fmt: skip
    await stage.until(lambda: unit.state is S.UNKILLABLE, "UNKILLABLE", within_s=10)
    return proc


def test_nobody_is_promoted_beside_an_unkillable_primary_until_the_operator_attests() -> None:
    async def story(stage: Stage) -> None:
        proc = await make_unkillable(stage, "a")
        await asyncio.sleep(20)
        assert stage.status["primary"] is None
        assert stage.status["state"] == "down"
        assert stage.status["unkillable"] == ["a"]

        with pytest.raises(PreconditionError, match="did not end after SIGKILL") as caught:
            await stage.order(stage.keeper.life.controller.fence("a", False))
        assert caught.value.exit_code == 4
        assert caught.value.details == {"pids": [proc.process.pid]}
        assert stage.group.engine("a").state is S.UNKILLABLE

        stage.world.judge.rests(proc)  # what the operator has seen
        done = await stage.order(stage.keeper.life.controller.fence("a", True))
        assert done.state == "done"
        await stage.whole()
        assert stage.group.primary.name == "b"
        assert "fence_attested" in stage.kinds()

    play(story)


def test_an_engine_that_can_be_killed_is_not_attested() -> None:
    async def story(stage: Stage) -> None:
        for name in ("a", "b"):
            with pytest.raises(PreconditionError, match="not unkillable"):
                await stage.order(stage.keeper.life.controller.fence(name, True))

    play(story)


def test_the_next_supervisor_remembers_what_was_attested() -> None:
    async def story(stage: Stage) -> None:
        proc = await make_unkillable(stage, "a")
        stage.world.judge.rests(proc)
        await stage.order(stage.keeper.life.controller.fence("a", True))
        await stage.whole()
        await stage.crash_supervisor()
        await stage.whole()
        stage.engine("b").is_blemished = "kill"
        stage.engine("b").kill()
        await stage.until(lambda: stage.group.primary and stage.group.primary.name == "a",
                          "a failover beside the attested one", within_s=5)  # fmt: skip
        await asyncio.sleep(20)  # sweeps for strays
        assert stage.group.primary.name == "a"

    play(story)


def test_an_unkillable_engine_that_no_journal_knows_is_attested_as_well() -> None:
    async def story(stage: Stage) -> None:
        proc = await make_unkillable(stage, "a")
        stage.world.judge.rests(proc)
        await stage.crash_supervisor(loses_journal=True)
        await asyncio.sleep(10)
        assert stage.group.primary is None
        await stage.order(stage.keeper.life.controller.fence("a", True))
        await stage.until(lambda: stage.group.is_serving, "service", within_s=20)

    play(story)


@pytest.mark.parametrize("fate", ["killed", "hung"])
def test_a_standby_that_cannot_be_killed_forbids_no_failover(fate: str) -> None:
    """It was never told to act as primary, and it has its memory read-only."""

    async def story(stage: Stage) -> None:
        await stage.until(lambda: len(stage.group.standbys) == 2, "two standbys", within_s=5)
        await make_unkillable(stage, "c", within_s=30)  # only its silence tells
        if fate == "killed":
            await stage.kill_primary()
        else:
            await stage.hang_primary(is_answered=True)
        assert stage.group.primary.name == "b"
        assert stage.status["unkillable"] == ["c"]
        assert "recovery_failed" not in stage.kinds()
        await stage.whole()

    play(story, shape=Shape(standbys=2, has_batch=False))


def test_an_adopted_engine_that_cannot_be_asked_or_killed_might_be_a_primary() -> None:
    async def story(stage: Stage) -> None:
        await stage.until(lambda: len(stage.group.standbys) == 2, "two standbys", within_s=5)
        await make_unkillable(stage, "c", within_s=30)
        stage.engine("a").is_blemished = "kill"
        await asyncio.sleep(1.5)
        before = stage.keeper.life
        before.kill()
        stage.engine("a").kill()
        await stage.until(lambda: stage.keeper.life is not before and stage.group.is_open,
                          "the next supervisor", within_s=30)  # fmt: skip
        await asyncio.sleep(10)
        assert stage.group.primary is None
        await stage.order(stage.keeper.life.controller.fence("c", True))
        await stage.until(lambda: stage.group.primary, "the failover behind the operator's word",
                          within_s=5)  # fmt: skip

    play(story, shape=Shape(standbys=2, has_batch=False))


# -------------------------------------------------------------- after a crash


@pytest.mark.parametrize("name", ["b", "y"])
def test_a_wrong_engine_does_not_set_the_answer_of_any_group(name: str) -> None:
    """Both of the pair turn wrong while nobody watches, the primary too: the journal knows."""

    async def story(stage: Stage) -> None:
        await asyncio.sleep(2.5)  # the journal has the answers of both groups
        pair = ("a", "b") if name == "b" else ("x", "y")
        stage.keeper.life.kill()
        for one in pair:
            proc = stage.engine(one)
            assert isinstance(proc, FakeEngine)
            proc.answers_wrong, proc.is_blemished = True, "wrong"
        before = stage.keeper.life
        await stage.until(lambda: stage.keeper.life is not before, "the next one", within_s=5)
        await stage.whole()
        await asyncio.sleep(10)
        assert all(g.golden == RIGHT for g in stage.keeper.life.runtime.groups)

    play(story, shape=Shape(has_batch=False, has_neighbour=True))


# -------------------------------------------------------------------- ladder


async def freeze_by_pressure_and_crash_paused(stage: Stage) -> Proc:
    stage.world.pressure = 3
    await stage.until(lambda: stage.group.engine("batch").state is S.FROZEN, "a freeze", within_s=5)
    frozen = stage.engine("batch")
    await stage.keeper.life.controller.pause()
    await stage.crash_supervisor()
    await asyncio.sleep(10)
    assert stage.engine("batch") is frozen
    return frozen


def test_what_the_ladder_froze_before_a_paused_crash_is_thawed_when_pressure_is_gone() -> None:
    async def story(stage: Stage) -> None:
        frozen = await freeze_by_pressure_and_crash_paused(stage)
        stage.world.pressure = 0
        await stage.keeper.life.controller.unpause()
        unit = stage.group.engine("batch")
        assert (unit.instance, unit.state) == (frozen.instance, S.FROZEN)
        await stage.until(lambda: unit.state is S.BATCH, "the thaw", within_s=5)
        await stage.until(lambda: unit.status, "its answer", within_s=3)
        assert unit.instance == frozen.instance
        await asyncio.sleep(10)
        assert (unit.instance, unit.state) == (frozen.instance, S.BATCH)

    play(story, shape=Shape(has_ladder=True))


def test_what_the_ladder_froze_before_a_paused_crash_is_evicted_when_pressure_lasts() -> None:
    async def story(stage: Stage) -> None:
        frozen = await freeze_by_pressure_and_crash_paused(stage)
        await stage.keeper.life.controller.unpause()
        unit = stage.group.engine("batch")
        assert (unit.instance, unit.state) == (frozen.instance, S.FROZEN)
        await asyncio.sleep(1.5)
        assert unit.state is S.FROZEN, "evicted before its time"
        frozen.is_blemished = "evicted"
        await stage.until(lambda: unit.state is S.EVICTED, "the eviction", within_s=3)
        stage.world.pressure = 0
        await stage.until(lambda: unit.state is S.BATCH, "its return", within_s=15)

    play(story, shape=Shape(has_ladder=True))


@pytest.mark.parametrize("has_ladder", [True, False])
def test_the_operators_freeze_in_quiet_times_is_not_taken_for_the_ladders(has_ladder: bool) -> None:
    async def story(stage: Stage) -> None:
        unit = stage.group.engine("batch")
        await stage.until(lambda: unit.state is S.BATCH, "the batch engine", within_s=10)
        await asyncio.sleep(5)  # quiet for long enough to thaw what the ladder has frozen
        proc = stage.engine("batch")
        stop = proc.stop
        proc.stop = lambda: stage.world.clock.after(0.3, stop)  # type: ignore[method-assign,assignment]
        await stage.order(stage.keeper.life.controller.freeze("batch"))
        await asyncio.sleep(10)
        assert unit.state is S.FROZEN

    play(story, shape=Shape(has_ladder=has_ladder))


@pytest.mark.parametrize("step", ["thaw", "evict"])
def test_the_operators_freeze_comes_before_a_step_of_the_ladder_that_waits(step: str) -> None:
    async def story(stage: Stage) -> None:
        unit, group = stage.group.engine("batch"), stage.group
        stage.world.pressure = 3
        await stage.until(lambda: unit.state is S.FROZEN, "a freeze", within_s=5)
        await stage.until(lambda: group.tasks.is_free("ladder batch"), "its end", within_s=1)
        await unit.orders.acquire()  # an order that takes its time
        order = asyncio.create_task(stage.order(stage.keeper.life.controller.freeze("batch")))
        stage.world.pressure = 0 if step == "thaw" else 3
        await stage.until(lambda: "ladder batch" in group.tasks, "the ladder's step", within_s=4.5)
        unit.orders.release()
        await order
        await asyncio.sleep(10)
        assert unit.state is S.FROZEN
        assert unit.is_held

    play(story, shape=Shape(has_ladder=True))


# ---------------------------------------------------------------- a bug of ours


def test_a_promotion_that_a_bug_of_ours_has_torn_is_taken_back() -> None:
    async def story(stage: Stage) -> None:
        unit = stage.group.engine("b")
        assume = unit.assume

        async def broken(*_: Any, **__: Any) -> None:
            unit.assume = assume
            raise RuntimeError("a bug")

        unit.assume = broken
        stage.engine("b").is_blemished = "torn"
        stage.engine("a").is_blemished = "kill"
        stage.engine("a").kill()
        await asyncio.sleep(1)
        await stage.whole()
        states = {o["kind"]: o["state"] for o in stage.keeper.life.runtime.operations.history()}
        assert "running" not in states.values()
        objections = stage.world.judge.violations
        assert len(objections) == 1, "the bug is logged once, with its traceback"
        assert "recovery failed: RuntimeError('a bug')" in objections.pop()

    play(story)


# ------------------------------------------------------------------- blocked


def test_the_intensity_of_judgement_ends_in_blocked_and_ack_ends_that() -> None:
    async def story(stage: Stage) -> None:
        for _ in range(3):
            await stage.hang_primary(is_answered=True)
        assert stage.status["blocked"]
        assert stage.status["state"] == "redundant"
        await asyncio.sleep(0.5)
        await stage.hang_primary(is_answered=False)
        victim = stage.group.primary.instance
        await asyncio.sleep(5)
        assert stage.group.primary.instance == victim, "a hung primary was touched while BLOCKED"
        assert stage.status["state"] == "blocked"
        assert stage.kinds().count("blocked") == 1

        await stage.order(stage.keeper.life.controller.ack(None))
        await stage.until(lambda: stage.group.primary and stage.group.primary.instance != victim,
                          "the failover behind the ack", within_s=3)  # fmt: skip
        await stage.whole()
        assert stage.kinds().count("unblocked") == 1
        assert not stage.status["blocked"]

    play(story)


def test_blocked_ends_by_time_and_outlives_the_supervisor() -> None:
    async def story(stage: Stage) -> None:
        for _ in range(3):
            await stage.hang_primary(is_answered=True)
        await stage.crash_supervisor()
        await stage.whole()
        assert stage.status["blocked"], "a crash of the supervisor is no ack"
        victim = stage.group.primary.instance
        await stage.hang_primary(is_answered=False)
        await asyncio.sleep(3)
        assert stage.group.primary.instance == victim
        await stage.until(lambda: stage.group.primary and stage.group.primary.instance != victim,
                          "the failover behind the period", within_s=40)  # fmt: skip

    play(story)


def test_a_dead_primary_is_replaced_while_blocked() -> None:
    async def story(stage: Stage) -> None:
        for _ in range(3):
            await stage.hang_primary(is_answered=True)
        await stage.kill_primary()

    play(story)


def test_ack_starts_what_has_given_up() -> None:
    async def story(stage: Stage) -> None:
        stage.world.doomed["b"] = 100
        proc = stage.engine("b")
        proc.is_blemished = "doom"
        proc.kill()
        await stage.until(lambda: stage.group.engine("b").state is S.FATAL, "FATAL", within_s=60)
        stage.world.doomed["b"] = 0
        await stage.order(stage.keeper.life.controller.ack(None))
        await stage.whole()

    play(story)


# --------------------------------------------------------------------- stalls


@pytest.mark.parametrize("verb", ["assume", "routes", "fence"])
@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_failover_during_which_the_supervisor_is_stopped_for_ten_seconds_succeeds(
    verb: str, phase: str
) -> None:
    async def story(stage: Stage) -> None:
        stage.world.traps.append(Trap(verb, phase, "", lambda _: stage.world.clock.stall(10)))
        proc = stage.engine("a")
        proc.is_blemished = "kill"
        proc.kill()
        await stage.until(lambda: stage.group.primary and stage.group.primary.name == "b",
                          "the failover", within_s=15)  # fmt: skip
        await stage.whole()
        assert "recovery_failed" not in stage.kinds()
        assert stage.kinds().count("failover_completed") == 1

    play(story)


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_supervisor_that_was_stopped_for_ten_seconds_judges_nobody(seed: int) -> None:
    async def story(stage: Stage) -> None:
        alive = {p.instance for p in stage.world.living()}
        for _ in range(3):
            stage.world.clock.stall(10)
            await asyncio.sleep(4)
        assert {p.instance for p in stage.world.living()} == alive
        assert "verdict" not in stage.kinds()

    play(story, seed=seed, shape=Shape(workers=2))


def test_a_start_that_was_under_way_is_not_given_up_for_our_own_absence() -> None:
    async def story(stage: Stage) -> None:
        proc = stage.engine("b")
        proc.is_blemished = "kill"
        proc.kill()
        await asyncio.sleep(0.03)
        stage.world.clock.stall(60)  # longer than any deadline of a start
        await stage.whole(within_s=90)
        assert "start_failed" not in stage.kinds()

    play(story)


@pytest.mark.parametrize(("verb", "victim"), [("fork", "b"), ("donate", "cache-chat")])
def test_no_helper_is_blamed_for_a_machine_that_slept(verb: str, victim: str) -> None:
    async def story(stage: Stage) -> None:
        def sleep(proc: Proc) -> None:
            stage.world.clock.stall(30)
            proc.stop()
            stage.world.clock.after(30.1, proc.wake)

        stage.world.traps.append(Trap(verb, "before", "", sleep))
        helpers = [stage.engine(n) for n in ("zygote-chat", "cache-chat") if n != victim]
        proc = stage.engine(victim)
        proc.is_blemished = "kill"
        proc.kill()
        await asyncio.sleep(32)
        await stage.whole()
        assert all(stage.engine(p.unit) is p for p in helpers)
        assert {"start_failed", "cache_failed", "zygote_silent"}.isdisjoint(stage.kinds())

    play(story)


# ----------------------------------------------------------- a machine that refuses


@pytest.mark.parametrize("unit", ["zygote-chat", "cache-chat"])
def test_a_machine_that_refuses_to_start_a_helper_is_asked_again_with_pauses(unit: str) -> None:
    async def story(stage: Stage) -> None:
        machine, attempts = stage.keeper.life.machine, 0
        spawn = machine.spawn

        def refuse(argv: Any, **more: Any) -> Any:
            nonlocal attempts
            attempts += 1
            raise SpawnError(argv, more["log_path"], OSError(11, "no room for a process"))

        machine.spawn = refuse  # type: ignore[method-assign]
        proc = stage.engine(unit)
        proc.is_blemished = "kill"
        proc.kill()
        await asyncio.sleep(30)
        assert 4 <= attempts <= 20, f"{attempts} attempts in 30 s"
        assert stage.keeper.life.runtime.degraded()["start"]
        assert stage.kinds().count("start_refused") == 1
        machine.spawn = spawn  # type: ignore[method-assign]
        await stage.until(lambda: stage.world.find(unit), f"a new {unit}", within_s=10)
        await stage.whole()
        await asyncio.sleep(5)
        assert stage.keeper.life.runtime.degraded() == {}
        assert "degraded" in stage.kinds()
        assert "recovered" in stage.kinds()

    play(story)


def test_forks_that_fail_make_no_engine_fatal() -> None:
    async def story(stage: Stage) -> None:
        stage.world.failing_forks = 30
        proc = stage.engine("a")
        proc.is_blemished = "kill"
        proc.kill()
        await stage.until(lambda: stage.group.primary and stage.group.primary.name == "b",
                          "the failover", within_s=3)  # fmt: skip
        await asyncio.sleep(20)
        assert stage.world.failing_forks > 0, "it asked without a pause"
        assert stage.group.engine("a").state is not S.FATAL
        stage.world.failing_forks = 0
        await stage.whole(within_s=10)

    play(story)


def test_young_deaths_on_a_full_disk_make_no_engine_fatal() -> None:
    async def story(stage: Stage) -> None:
        stage.keeper.disk.is_full, stage.world.takes_sockets = True, False
        proc = stage.engine("b")
        proc.is_blemished = "kill"
        proc.kill()
        await asyncio.sleep(60)
        assert stage.group.engine("b").state is not S.FATAL
        stage.keeper.disk.is_full, stage.world.takes_sockets = False, True
        await stage.whole(within_s=10)

    play(story)


@pytest.mark.parametrize("length_s", [5, 15, 60])
def test_a_supervisor_without_descriptors_ends_nothing_that_it_finds(length_s: int) -> None:
    async def story(stage: Stage) -> None:
        alive = {p.instance for p in stage.world.living()}
        await asyncio.sleep(1.5)
        before = stage.keeper.life
        before.kill()
        stage.world.has_descriptors = False
        await stage.until(lambda: stage.keeper.life is not before, "the next one", within_s=5)
        await asyncio.sleep(length_s)
        assert {p.instance for p in stage.world.living()} == alive
        assert "adoption_waits" in stage.kinds()
        stage.world.has_descriptors = True
        await stage.whole()
        await asyncio.sleep(10)
        assert {p.instance for p in stage.world.living()} == alive

    play(story)


def test_a_supervisor_that_waits_for_descriptors_can_be_stopped() -> None:
    async def story(stage: Stage) -> None:
        await asyncio.sleep(1.5)
        before = stage.keeper.life
        before.kill()
        stage.world.has_descriptors = False
        await stage.until(lambda: stage.keeper.life is not before, "the next one", within_s=5)
        life = stage.keeper.life
        await asyncio.sleep(5)
        life.runtime.stop_requested.set()
        await stage.until(life.task.done, "the stop", within_s=10)
        stage.world.has_descriptors = True

    play(story)


@pytest.mark.parametrize("unit", ["zygote-chat", "cache-chat"])
def test_who_could_not_be_asked_for_want_of_a_descriptor_is_kept(unit: str) -> None:
    """It was slow when it was to be adopted; then we have nothing left to ask it with."""

    async def story(stage: Stage) -> None:
        await asyncio.sleep(1.5)
        proc, before = stage.engine(unit), stage.keeper.life
        before.kill()
        proc.slow_s = 3.0
        await stage.until(lambda: "not_adopted" in stage.kinds(), "an adoption that fails",
                          within_s=20)  # fmt: skip
        stage.world.has_descriptors, proc.slow_s = False, 0.0
        await asyncio.sleep(15)
        stage.world.has_descriptors = True
        await stage.whole()
        assert stage.engine(unit) is proc

    play(story)
