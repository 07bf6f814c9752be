"""A request that crashes engines ends after three of them; its neighbours go on exactly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines.contract import Accepted, End, Generate, GenerateBody
from supervisor.gateway.counters import ModelCounters
from supervisor.gateway.errors import ApiError
from supervisor.gateway.limits import Parking
from supervisor.gateway.poison import Courtroom, Opinion, Suspicion
from supervisor.gateway.protocol import GatewayLimits, GroupRoute, Routes, RouteTarget
from supervisor.gateway.routes import RouteTable
from supervisor.gateway.stream import EngineStream, LiveConnections, StreamContext
from tests.unit.gateway.scripted import PROMPT_IDS, Line, ScriptedEngine, Story, tell

LIMITS = GatewayLimits(1 << 20, 100, 16, park_timeout_s=8, resume_deadline_s=8, client_timeout_s=5)


class Sink:
    def __init__(self) -> None:
        self.whole = ""

    async def text(self, text: str) -> None:
        self.whole += text

    def restart(self) -> bool:
        return True


@dataclass
class Troupe:
    """A gateway, and a supervisor's part: whenever an engine dies, the next one takes over."""

    folder: Path
    stack: AsyncExitStack
    crash_after_s: float = 0.03  # from the poison's arrival
    explains_after_s: float | None = 0.02  # None: nobody ever says how it ended
    is_crash: bool = True
    story: Story = field(default_factory=lambda: Story(300))
    table: RouteTable = field(default_factory=RouteTable)
    live: LiveConnections = field(default_factory=LiveConnections)
    counters: ModelCounters = field(default_factory=lambda: ModelCounters("chat"))
    crashed: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    epoch: int = 0
    deaths: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    fifth_death: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.context = StreamContext(
            "gateway-0", LIMITS, self.table, Parking(16), self.live, lambda *_: None
        )

    async def promote(self) -> None:
        self.epoch += 1
        path = self.folder / f"e{self.epoch}.gen"
        engine = ScriptedEngine(path, self.story, self._play, delay_s=0.002)
        await self.stack.enter_async_context(engine)
        self.push(engine)

    def push(self, engine: ScriptedEngine | None) -> None:
        self._now = engine
        target = (
            None if engine is None else RouteTarget(engine.path.stem, str(engine.path), self.epoch)
        )
        route = GroupRoute(
            "chat", self.epoch, 2048, target,
            crashed=list(self.crashed), unexplained=list(self.unexplained),
        )  # fmt: skip
        self.table.apply(Routes(1, [route]))
        self.live.cut_stale(self.table)

    async def _play(self, engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if "poison" not in request.body.stop:
            await tell(engine, line, request)
            return
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True))
        await asyncio.sleep(self.crash_after_s)
        if self._now is engine:
            self._now = None
            self.tasks.append(asyncio.create_task(self._death(engine)))

    async def _death(self, engine: ScriptedEngine) -> None:
        self.deaths += 1
        if self.deaths == 5:
            self.fifth_death.set()
        name = engine.path.stem
        self.unexplained.append(name)
        await engine.die()
        self.push(None)
        await self.promote()
        if self.explains_after_s is not None:
            await asyncio.sleep(self.explains_after_s)
            self.unexplained.remove(name)
            if self.is_crash:
                self.crashed.append(name)
            self.push(self._now)

    async def ask(self, prompt: str = "story") -> tuple[Sink, End]:
        sink = Sink()
        model = self.table.find("chat")
        assert model is not None
        stream = EngineStream(
            self.context, model=model, body=GenerateBody("completion", prompt, stop=[prompt]),
            seed=7, counters=self.counters, sink=sink,
        )  # fmt: skip
        async with asyncio.timeout(20):
            return sink, await stream.run()


@pytest.fixture
async def troupe(tmp_path: Path) -> AsyncIterator[Troupe]:
    async with AsyncExitStack() as stack:
        troupe = Troupe(tmp_path, stack)
        yield troupe
        await asyncio.gather(*troupe.tasks)


async def test_the_third_crash_ends_the_poison_and_nobody_else(troupe: Troupe) -> None:
    await troupe.promote()
    others = [asyncio.create_task(troupe.ask()) for _ in range(8)]
    await asyncio.sleep(0.05)

    with pytest.raises(ApiError) as caught:
        await troupe.ask("poison")

    assert (caught.value.status, caught.value.stable_code) == (500, "poison")
    assert troupe.deaths == 3
    for sink, end in await asyncio.gather(*others):
        assert sink.whole == troupe.story.whole
        assert end == troupe.story.end
    assert troupe.counters.poisoned == 1


async def test_two_poisons_end_one_after_the_other(troupe: Troupe) -> None:
    await troupe.promote()
    others = [asyncio.create_task(troupe.ask()) for _ in range(4)]
    await asyncio.sleep(0.05)

    outcomes = await asyncio.gather(
        troupe.ask("poison"), troupe.ask("poison"), return_exceptions=True
    )

    codes = [o.stable_code for o in outcomes if isinstance(o, ApiError)]
    assert codes == ["poison", "poison"]
    for sink, _ in await asyncio.gather(*others):
        assert sink.whole == troupe.story.whole


async def test_deaths_from_outside_poison_nothing(troupe: Troupe) -> None:
    troupe.is_crash = False
    await troupe.promote()
    ask = asyncio.create_task(troupe.ask("poison"))
    async with asyncio.timeout(10):
        await troupe.fifth_death.wait()
    assert not ask.done()
    ask.cancel()
    await asyncio.gather(ask, return_exceptions=True)
    assert troupe.counters.poisoned == 0


async def test_the_verdict_waits_for_the_explanation(troupe: Troupe) -> None:
    troupe.explains_after_s = 0.4
    await troupe.promote()
    with pytest.raises(ApiError):
        await troupe.ask("poison")
    assert troupe.deaths == 3, "it was given a fourth engine before the third death was explained"


def _table(crashed: list[str], unexplained: list[str]) -> RouteTable:
    table = RouteTable()
    route = GroupRoute("chat", 1, 2048, None, crashed=crashed, unexplained=unexplained)
    table.apply(Routes(1, [route]))
    return table


def test_the_opinion_follows_the_evidence() -> None:
    suspicion = Suspicion()
    for name in ("a", "b"):
        suspicion.lost(name)
        suspicion.lost(name)  # a connection may break twice at one engine
    assert suspicion.opinion(_table([], []), "chat") is Opinion.CLEAR
    assert suspicion.opinion(_table(["a"], []), "chat") is Opinion.CLEAR
    assert suspicion.opinion(_table(["a"], ["b"]), "chat") is Opinion.SUSPECT
    suspicion.lost("c")
    assert suspicion.opinion(_table(["a", "b"], ["c"]), "chat") is Opinion.UNEXPLAINED
    assert suspicion.opinion(_table(["a", "b", "c"], []), "chat") is Opinion.POISON


def test_a_crash_stays_known_when_the_next_supervisor_does_not_know_it() -> None:
    table = _table(["a", "b"], [])
    table.apply(Routes(2, [GroupRoute("chat", 1, 2048, None, crashed=["c"])]))
    assert table.crashes_among("chat", ["a", "b", "c", "d"]) == 3


async def test_a_suspect_whose_turn_does_not_come_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.gateway.poison.TRIAL_WAIT_S", 0.05)
    court = Courtroom()
    async with (
        court.trial(Suspicion(), "chat", "e1", is_suspect=True) as first,
        court.trial(Suspicion(), "chat", "e1", is_suspect=True) as second,
        court.trial(Suspicion(), "chat", "e1", is_suspect=False) as third,
    ):
        assert first is not None
        assert second is None
        assert third is None


async def test_a_crash_in_a_trial_is_the_defendants_alone() -> None:
    court, guilty, other = Courtroom(), Suspicion(), Suspicion()
    async with court.trial(guilty, "chat", "e1", is_suspect=True) as trial:
        assert trial is not None
        assert court.is_excused(other, "chat", "e1")
        assert not court.is_excused(other, "chat", "e2")
        assert not court.is_excused(guilty, "chat", "e1")
        trial.failed()
    assert court.is_excused(other, "chat", "e1"), "whose loss is noticed a little later"


async def test_a_crash_after_a_passed_trial_counts_for_everybody() -> None:
    court, defendant, other = Courtroom(), Suspicion(), Suspicion()
    async with court.trial(defendant, "chat", "e1", is_suspect=True) as trial:
        assert trial is not None
        trial.saw_tokens()
        trial.saw_tokens()
        await asyncio.sleep(0.15)
        trial.failed()
    assert not court.is_excused(defendant, "chat", "e1")
    assert not court.is_excused(other, "chat", "e1")


async def test_a_request_that_was_present_at_three_crashes_ends_though_it_made_progress(
    troupe: Troupe,
) -> None:
    await troupe.promote()
    ask = asyncio.create_task(troupe.ask())
    for _ in range(3):
        await asyncio.sleep(0.1)
        engine, troupe._now = troupe._now, None
        assert engine is not None
        await troupe._death(engine)
    with pytest.raises(ApiError) as caught:
        await ask
    assert caught.value.stable_code == "poison"
