"""Stories about the lives of processes, and about supervisors that follow one another quickly."""

import asyncio

import pytest

from tests.sim.fakes import FakeZygote
from tests.sim.shapes import Shape
from tests.sim.test_stories import Stage, play


def test_a_zygote_that_needs_long_to_fail_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after six seconds of imports; only what has come up can have lived long."""

    async def story(stage: Stage) -> None:
        monkeypatch.setattr(FakeZygote, "between", lambda *_: 6.0)
        stage.world.doomed["zygote-chat"] = 1000
        proc = stage.engine("zygote-chat")
        proc.is_blemished = "doom"
        proc.kill()
        await stage.until(lambda: stage.group.zygote.record.has_given_up, "the end of patience",
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
        stage.keeper.life.kill()
        first = stage.keeper.life
        await stage.until(lambda: stage.keeper.life is not first, "the second life", within_s=5)
        assert not stage.group.is_open
        await stage.order(stage.keeper.life.controller.pause())
        await asyncio.sleep(0.005)  # it is on disk, and nothing was adopted yet
        assert not stage.group.is_open
        saved = stage.keeper.disk.state
        assert saved.paused
        assert saved.roles["batch"] == "evicted"
        assert saved.held == ["batch"]
        assert saved.canaries
        assert saved.epochs["chat"] == ceiling
        second = stage.keeper.life
        second.kill()
        await stage.until(lambda: stage.keeper.life is not second and stage.group.is_open,
                          "the third life", within_s=5)  # fmt: skip
        await stage.order(stage.keeper.life.controller.unpause())
        await stage.whole()
        await asyncio.sleep(5)
        assert stage.group.engine("batch").state == "evicted"

    play(story, shape=Shape())
