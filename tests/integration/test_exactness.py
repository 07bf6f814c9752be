"""A stream is the same bit for bit, whatever slot, neighbours, cuts and engines it goes through."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from engines.contract import Cancel, GenerateBody
from tests.integration.engines_support import (
    Engine,
    Stream,
    ZygoteClient,
    cache_daemon,
    engine_spec,
    kill_child,
    zygote,
)

Outcome = tuple[list[int], str, str]

PROMPTS = [
    "It was a dark and stormy night, and",
    "The lantern",
    "Once upon a time there was a keeper who",
    "Count: one two three",
    "Understudy is",
    "A long tale. " * 30,  # several prefill chunks
    "She said: “naïve café”, then",
    "7 8 9",
]


def bodies() -> list[GenerateBody]:
    """Greedy and sampled ones, with and without cuts and stop strings."""
    made = []
    for number, prompt in enumerate(PROMPTS):
        made.append(GenerateBody("completion", prompt=prompt, max_tokens=60, temperature=0.0,
                                 ignore_eos=True))  # fmt: skip
        made.append(GenerateBody("completion", prompt=prompt, max_tokens=90, temperature=1.0,
                                 top_p=0.9 if number % 2 else 1.0, top_k=40 if number % 3 else 0,
                                 ignore_eos=True))  # fmt: skip
    made.append(GenerateBody("completion", prompt="The keeper", max_tokens=150, temperature=1.0,
                             stop=["the", ". A"]))  # fmt: skip
    messages = [{"role": "user", "content": "What is a lantern?"}]
    made.append(GenerateBody("chat", messages=messages, temperature=1.0, max_tokens=80))
    return made


def outcome(stream: Stream, text: str | None = None) -> Outcome:
    return stream.token_ids, stream.text if text is None else text, stream.finish_reason


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    run_dir = tmp_path_factory.mktemp("run")
    with cache_daemon(run_dir), zygote(run_dir) as client:
        yield client


class Pair:
    """Engines of one group on the shared arena, each newer than the one before."""

    def __init__(self, forks: ZygoteClient) -> None:
        self._forks = forks
        self._made = 0
        self.epoch = 0
        self.engines: list[Engine] = []

    async def new(self, role: str) -> tuple[Engine, int]:
        self._made += 1
        name = f"pair-{os.urandom(3).hex()}"
        spec = engine_spec(self._forks.run_dir, name, instance=f"{name}-{self._made:08x}")
        record = self._forks.fork(spec)
        engine = Engine(spec)
        self.engines.append(engine)
        status = await engine.ready()
        assert status.exact
        if role == "primary":
            self.epoch += 1
        await engine.assume(role, self.epoch)
        return engine, record.pid


EPOCHS = iter(range(1, 1_000_000))


@pytest.fixture
def pair(forks: ZygoteClient) -> Iterator[Pair]:
    """Whatever a test leaves running is killed; epochs go on over all tests of the arena."""
    made = Pair(forks)
    made.epoch = 100 * next(EPOCHS)
    before = len(forks.pids)
    yield made
    for engine in made.engines:
        engine.close()
    for pid in forks.pids[before:]:
        kill_child(pid)


async def run_all(engine: Engine, order: list[int]) -> dict[int, Outcome]:
    """All bodies at once in this order of arrival: seven or eight share the batch."""
    made = bodies()
    gate = asyncio.Semaphore(12)  # slots + queue bound the rest

    async def one(number: int) -> tuple[int, Outcome]:
        async with gate:
            stream = await engine.complete(made[number], seed=1000 + number)
            return number, outcome(stream)

    return dict(await asyncio.gather(*[one(number) for number in order]))


async def test_arrival_order_and_slots_do_not_change_a_stream(pair: Pair) -> None:
    engine, _ = await pair.new("primary")
    count = len(bodies())

    reference = await run_all(engine, list(range(count)))
    shuffled = random.Random(3).sample(range(count), count)
    alone = {}
    for number in (0, 1, 11, count - 1):
        stream = await engine.complete(bodies()[number], seed=1000 + number)
        alone[number] = outcome(stream)

    assert await run_all(engine, shuffled) == reference
    assert alone == {number: reference[number] for number in alone}
    assert len({tuple(tokens) for tokens, _, _ in reference.values()}) > count // 2


async def test_streams_survive_a_kill_by_adoption_and_by_replay(pair: Pair) -> None:
    """SIGKILL at random points: half of the streams find their slot, half are replayed."""
    primary, pid = await pair.new("primary")
    reference = await run_all(primary, list(range(len(bodies()))))
    chosen = random.Random(5)
    made = bodies()

    for numbers in ([0, 1, 3, 5, 10, 11], [2, 7, 13, 15, 16, 17]):
        standby, standby_pid = await pair.new("standby")
        streams = {n: await primary.open(made[n], seed=1000 + n) for n in numbers}
        await asyncio.gather(*[s.read_tokens(chosen.randrange(1, 40)) for s in streams.values()])
        os.kill(pid, signal.SIGKILL)
        for stream in streams.values():
            while stream.end is None and await stream.next() is not None:
                pass  # what the kernel had already is delivered

        pair.epoch += 1
        assumed = await standby.assume("primary", pair.epoch)

        assert assumed.map_ms + assumed.adopt_ms < 50
        found = {}
        for position, (number, stream) in enumerate(streams.items()):
            if stream.end is not None:
                found[number] = outcome(stream)
                continue
            # A fresh request id finds no slot: prompt prefilled, delivered tokens forced.
            by_replay = position % 2 == 1
            again = await standby.open(
                made[number],
                seed=1000 + number,
                request_id=None if by_replay else stream.request_id,
                resume=stream.as_resume(with_prompt=by_replay),
            )
            await again.finish()
            assert again.accepted is not None
            assert again.accepted.source == ("replay" if by_replay else "slot")
            assert again.accepted.exact
            found[number] = outcome(again, stream.text + again.text)
            if by_replay:  # the slot that nobody came for
                given_up = await standby.open(
                    made[number],
                    seed=1000 + number,
                    request_id=stream.request_id,
                    resume=stream.as_resume(),
                )
                await given_up.next()
                given_up.send(Cancel())
        assert found == {number: reference[number] for number in numbers}
        primary, pid = standby, standby_pid


async def test_a_stream_cut_again_and_again_stays_the_same(pair: Pair) -> None:
    """Route cuts without a death: the row parks, and goes on from every position."""
    engine, _ = await pair.new("primary")
    body = bodies()[1]
    whole = await engine.complete(body, seed=77)
    chosen = random.Random(9)

    stream = await engine.open(body, seed=77)
    text = ""
    while stream.end is None:
        await stream.read_tokens(len(stream.token_ids) + chosen.randrange(1, 20))
        if stream.end is None:
            stream.close()
            text += stream.text
            prompt_ids, resume = (
                stream.prompt_ids,
                stream.as_resume(with_prompt=chosen.random() < 0.5),
            )
            stream = await engine.open(body, seed=77, request_id=stream.request_id, resume=resume)
            await stream.next()
            assert stream.accepted is not None
            stream.prompt_ids = prompt_ids
    text += stream.text

    assert outcome(stream, text) == outcome(whole)
