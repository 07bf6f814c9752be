"""Engines as processes on the card: zygote, takeover, switchover, batch, and errors."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cache.protocol import LoadSpec
from engines.contract import EngineStatus, GenerateBody
from engines.native.device import DeviceFault  # noqa: TC001 - parametrised with it
from engines.native.faults import FAULTS_VARIABLE, InjectFault
from tests.gpu.engine_models import say
from tests.integration.engines_support import (
    Engine,
    Stream,
    ZygoteClient,
    cache_daemon,
    engine_spec,
    kill_child,
    wait_until,
    zygote,
)

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
LOAD = LoadSpec(str(MODEL), dtype="bfloat16", device="cuda:0")
EPOCHS = iter(range(100, 1_000_000, 100))


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    run_dir = tmp_path_factory.mktemp("run")
    before = os.environ.get(FAULTS_VARIABLE)
    os.environ[FAULTS_VARIABLE] = "1"
    try:
        with (
            cache_daemon(run_dir, spec=LOAD, load_timeout_s=90.0),
            zygote(run_dir, spec=LOAD) as client,
        ):
            yield client
    finally:
        os.environ.pop(FAULTS_VARIABLE)
        if before is not None:
            os.environ[FAULTS_VARIABLE] = before


class Group:
    """Engines of one group, each newer than the one before."""

    def __init__(self, forks: ZygoteClient) -> None:
        self.forks = forks
        self.epoch = next(EPOCHS)
        self.engines: list[Engine] = []

    async def new(self, role: str) -> tuple[Engine, int, EngineStatus]:
        name = f"gpu-{os.urandom(3).hex()}"
        spec = engine_spec(
            self.forks.run_dir, name, instance=f"{name}-{len(self.engines):08x}", load=LOAD,
            slots=16, max_length=2048, private_kv=role == "batch",
        )  # fmt: skip
        record = self.forks.fork(spec)
        engine = Engine(spec)
        self.engines.append(engine)
        status = await engine.ready(timeout_s=60.0)
        log = (self.forks.run_dir / f"{name}.log").read_text()
        assert status.state == "ready", log
        assert status.exact, log
        say(f"{role}: ready after {status.start_ms:.0f} ms, attached in {status.attach_ms:.1f}")
        if role == "primary":
            self.epoch += 1
        await engine.assume(role, self.epoch)
        return engine, record.pid, status


@pytest.fixture
def group(forks: ZygoteClient) -> Iterator[Group]:
    made = Group(forks)
    before = len(forks.pids)
    yield made
    for engine in made.engines:
        engine.close()
    for pid in forks.pids[before:]:
        kill_child(pid)


def body(number: int) -> GenerateBody:
    return GenerateBody(
        "completion", prompt=f"The lantern {number} " * (1 + 40 * (number % 2)), max_tokens=200,
        temperature=float(number % 3 > 0), ignore_eos=True,
    )  # fmt: skip


async def run_all(engine: Engine, count: int = 12) -> list[list[int]]:
    streams = await asyncio.gather(
        *[engine.complete(body(number), seed=number) for number in range(count)]
    )
    return [stream.token_ids for stream in streams]


async def open_all(engine: Engine, tokens: int, count: int = 12) -> list[Stream]:
    streams = [await engine.open(body(number), seed=number) for number in range(count)]
    for stream in streams:
        await stream.read_tokens(tokens)
    return streams


async def resume_all(engine: Engine, streams: list[Stream]) -> list[list[int]]:
    found = []
    for stream in streams:
        stream.close()
    again = [
        await engine.open(
            s.body, seed=s.seed, request_id=s.request_id, resume=s.as_resume(),
        )
        for s in streams
    ]  # fmt: skip
    for stream in again:
        await stream.finish()
        assert stream.accepted is not None
        assert stream.accepted.source == "slot"
        found.append(stream.token_ids)
    return found


async def test_streams_go_on_bit_for_bit_when_the_primary_is_killed(group: Group) -> None:
    primary, pid, _ = await group.new("primary")
    standby, _, _ = await group.new("standby")
    wanted = await run_all(primary)
    assert await run_all(primary) == wanted
    streams = await open_all(primary, 30)
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: _is_exiting(pid))
    group.epoch += 1
    assumed = await standby.assume("primary", group.epoch)
    say(f"map {assumed.map_ms:.1f} ms, adopt {assumed.adopt_ms:.1f} ms")
    assert len(assumed.adopted) == len(streams)
    assert await resume_all(standby, streams) == wanted
    # Slots are used anew once the dead writer is gone; the newcomer is as exact.
    assert await run_all(standby) == wanted


async def test_no_slot_is_begun_anew_before_the_dead_writer_has_ended(group: Group) -> None:
    primary, pid, _ = await group.new("primary")
    standby, _, _ = await group.new("standby")
    wanted = await run_all(primary, 1)
    await open_all(primary, 10, 6)  # 10 of 16 slots stay free
    pidfd = os.pidfd_open(pid)
    dead = select.poll()
    dead.register(pidfd, select.POLLIN)
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: _is_exiting(pid))
    group.epoch += 1
    await standby.assume("primary", group.epoch)
    say(f"ended when the successor is the writer: {bool(dead.poll(0))}")
    fresh = await standby.open(body(0), seed=0)
    await fresh.read_tokens(1)
    assert dead.poll(0), "a slot was begun anew while the dead writer's kernels may still run"
    await fresh.finish()
    assert fresh.token_ids == wanted[0]
    os.close(pidfd)


async def _is_exiting(pid: int) -> bool:
    return exit_flag(pid)


def exit_flag(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return bool(int(stat.rpartition(")")[2].split()[6]) & 4)


async def test_roles_change_hands_without_recomputing(group: Group) -> None:
    one, _, _ = await group.new("primary")
    two, _, _ = await group.new("standby")
    wanted = await run_all(one, 6)
    for old, new in ((one, two), (two, one)):
        streams = await open_all(old, 20, 6)
        group.epoch += 1
        await old.assume("standby", group.epoch)
        await new.assume("primary", group.epoch)
        assert await resume_all(new, streams) == wanted
        assert await run_all(new, 6) == wanted


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("device_error", "device_failed"),
        ("device_write", "device_failed"),
        ("device_memory", "device_out_of_memory"),
    ],
)
async def test_a_gpu_error_ends_that_engine_and_disturbs_no_other(
    group: Group, action: DeviceFault, code: str
) -> None:
    primary, _, _ = await group.new("primary")
    standby, standby_pid, _ = await group.new("standby")
    batch, batch_pid, _ = await group.new("batch")
    wanted = await run_all(primary, 6)
    streams = await open_all(primary, 10, 6)
    for victim in (standby, batch):
        await victim.call("fault", InjectFault(action))
    for pid, engine in ((standby_pid, standby), (batch_pid, batch)):
        await wait_until(lambda pid=pid: _is_exiting(pid))  # type: ignore[misc]
        log = (group.forks.run_dir / f"{engine.spec.name}.log").read_text()
        assert f"error: {code}: " in log
    for stream in streams:
        await stream.finish()
    assert [stream.token_ids for stream in streams] == wanted
    assert await run_all(primary, 6) == wanted


async def test_canaries_agree_and_graphs_are_captured_when_idle(group: Group) -> None:
    primary, _, _ = await group.new("primary")
    standby, _, _ = await group.new("standby")
    batch, _, _ = await group.new("batch")
    answers = {bytes(await engine.call("canary")) for engine in (primary, standby, batch)}
    ids = {tuple(msgspec.json.decode(raw)["token_ids"]) for raw in answers}
    assert len(ids) == 1
    status = await primary.status()
    assert status.device_memory is not None
    assert status.device_memory.total_bytes > status.device_memory.free_bytes > 0
