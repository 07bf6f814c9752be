"""Verdicts on a server of which only its HTTP API is known: a real process on a real port."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from engines.command.api import HttpEngine
from engines.command.processes import ServerTree
from engines.command.progress import Progress
from supervisor.core.verdict import ProgressJudge, Sample, Verdict
from tests.harness.http_engine import HttpEngineProcess

HANG_AFTER_S = 0.4
INTERVAL_S = 0.1
PAGE_S = 0.08
DEADLINE_S = 10.0


@pytest.fixture
def process() -> Iterator[HttpEngineProcess]:
    with HttpEngineProcess() as process:
        yield process


class Watch:
    """Samples as a supervisor does, and remembers every verdict."""

    def __init__(self, process: HttpEngineProcess) -> None:
        self.engine = HttpEngine(process.url)
        self.verdicts: list[Verdict] = []
        self._tree = ServerTree(os.getpid())
        self._judge = ProgressJudge(hang_after_s=HANG_AFTER_S, interval_s=INTERVAL_S)
        self.progress = Progress()

    async def look_for(self, seconds: float) -> list[Verdict]:
        """Verdicts of so many seconds."""
        self.verdicts.clear()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await self.look()
        return self.verdicts

    async def look(self) -> None:
        counters, page = await self.engine.counters(timeout_s=PAGE_S), self.progress.page
        self.progress.look(counters, self._tree.look())
        sample = Sample(
            at_ns=time.monotonic_ns(),
            steps=page.get("steps"),
            has_work=page.has_work,
            is_stopped=bool(page.get("tree_stopped")),
            on_cpu_ns=page.get("tree_on_cpu_ns"),
            run_delay_ns=page.get("tree_run_delay_ns"),
            is_runnable=bool(page.get("tree_runnable")),
        )
        self.verdicts.append(self._judge.observe(sample))
        await asyncio.sleep(INTERVAL_S / 2)

    async def until(self, wanted: Verdict) -> float:
        """Seconds until the verdict."""
        began_s = time.monotonic()
        while not self.verdicts or self.verdicts[-1] is not wanted:
            assert time.monotonic() - began_s < DEADLINE_S, self.verdicts
            await self.look()
        return time.monotonic() - began_s


@asynccontextmanager
async def requests(process: HttpEngineProcess, watch: Watch, count: int = 3) -> AsyncIterator[None]:
    """So many long requests are under way."""

    async def ask(session: aiohttp.ClientSession) -> None:
        body = {"model": "m", "prompt": "p", "max_tokens": 100_000}
        with watch.progress.awaited():
            async with session.post(f"{process.url}/v1/completions", json=body):
                pass

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(ask(session)) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_that_works_is_busy_and_one_without_work_is_healthy(
    process: HttpEngineProcess,
) -> None:
    watch = Watch(process)
    assert set(await watch.look_for(1.0)) == {Verdict.HEALTHY}
    async with requests(process, watch):
        await watch.until(Verdict.BUSY)
        assert Verdict.HUNG not in await watch.look_for(1.5)


async def test_one_that_answers_health_while_its_decode_stands_still_is_hung(
    process: HttpEngineProcess,
) -> None:
    watch = Watch(process)
    async with requests(process, watch):
        await watch.until(Verdict.BUSY)
        process.be("stall")
        assert await watch.engine.is_healthy(timeout_s=1.0) is True
        assert await watch.until(Verdict.HUNG) >= HANG_AFTER_S * 0.5
        process.be("well")
        await watch.until(Verdict.BUSY)


async def test_one_whose_http_hangs_with_it_is_hung_if_it_had_work(
    process: HttpEngineProcess,
) -> None:
    watch = Watch(process)
    await watch.look_for(0.3)
    process.be("mute")
    assert Verdict.HUNG not in await watch.look_for(1.5), "it had no work: silence proves nothing"
    process.be("well")
    async with requests(process, watch):
        await watch.until(Verdict.BUSY)
        process.be("mute")
        assert await watch.engine.is_healthy(timeout_s=0.2) is None
        await watch.until(Verdict.HUNG)


async def test_one_that_is_stopped_is_hung_also_without_work(process: HttpEngineProcess) -> None:
    watch = Watch(process)
    await watch.look_for(0.3)
    os.kill(process.process.pid, signal.SIGSTOP)
    await watch.until(Verdict.HUNG)
    os.kill(process.process.pid, signal.SIGCONT)
    await watch.until(Verdict.HEALTHY)


async def test_a_wrong_answer_is_found_and_a_refusal_is_no_answer(
    process: HttpEngineProcess,
) -> None:
    engine, prompt = HttpEngine(process.url), "the known prompt"
    assert await engine.ask("m", prompt, timeout_s=5.0) == (200, "w0 w1 w2 w3")
    process.be("full")
    status, text = await engine.ask("m", prompt, timeout_s=5.0)
    assert (status, text) == (429, None), "429 is no statement"
    process.be("stall")
    silence = await engine.ask("m", prompt, timeout_s=0.2)
    assert silence == (None, None), "silence is judged by progress"
    process.be("wrong")
    status, text = await engine.ask("m", prompt, timeout_s=5.0)
    assert status == 200
    assert text not in (None, "w0 w1 w2 w3")
    process.be("well")
    assert await engine.ask("m", "p", timeout_s=5.0) == (200, "w0 w1 w2 w3")


async def test_one_that_is_gone_answers_nothing(process: HttpEngineProcess) -> None:
    engine = HttpEngine(process.url)
    process.process.kill()
    process.process.wait(10)
    assert await engine.counters(timeout_s=1.0) is None
    assert await engine.is_healthy(timeout_s=1.0) is None
    assert await engine.ask("m", "p", timeout_s=1.0) == (None, None)
