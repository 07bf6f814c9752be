"""Stories about how long a process has lived."""

import asyncio

import pytest

from tests.sim.fakes import FakeZygote
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
