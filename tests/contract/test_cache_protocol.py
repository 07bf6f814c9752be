"""The cache protocol: one suite for both clients, and loaders that break its rules.

The same sentences must hold for the blocking client of engines and the asyncio client of the
supervisor, against the same daemon process.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_type_hints

import msgspec
import pytest

from cache import protocol
from cache.aclient import CacheClient
from cache.client import attach, open_kv
from cache.errors import RemoteError, UnderstudyError
from cache.fingerprint import fingerprint_of
from cache.protocol import CacheStatus, KvGeometry, KvOpened, LoadSpec, Manifest, Progress
from cache.service import CacheService
from cache.wire import close_all
from tests.harness.cache_daemon import ROOT, DaemonProcess, open_fds, wait_until
from tests.harness.checkpoints import make_checkpoint, spec_for

GEOMETRY = KvGeometry(2, 3, 2, 32, 16, "float32")


@dataclass
class Got:
    """What an attach or kv.open brought."""

    manifest: Manifest | None
    opened: KvOpened | None
    fds: list[int]


class Client(Protocol):
    """One way of speaking the protocol."""

    def attach(self, spec: LoadSpec, *, timeout_s: float, reload: bool = False) -> Got: ...

    def kv_open(self, geometry: KvGeometry) -> Got: ...

    def close(self) -> None: ...


class EngineClient:
    """`cache.client`."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon

    def attach(self, spec: LoadSpec, *, timeout_s: float, reload: bool = False) -> Got:
        weights = attach(
            self._daemon.socket,
            spec,
            instance="engine-1",
            timeout_s=timeout_s,
            on_mismatch="reload" if reload else "fail",
        )
        fds = [os.dup(fd) for fd in weights.fds]
        weights.close()
        return Got(weights.manifest, None, fds)

    def kv_open(self, geometry: KvGeometry) -> Got:
        connection = self._daemon.connect("engine-1", "standby")
        try:
            memory = open_kv(connection, geometry, timeout_s=10)
        finally:
            connection.close()
        return Got(None, memory.opened, [*memory.fds, memory.table_fd])

    def close(self) -> None: ...


class SupervisorClient:
    """`cache.aclient`, on a loop of its own."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._runner = asyncio.Runner()
        self.client = self._runner.run(CacheClient.connect(daemon.socket, instance="supervisor"))

    def attach(self, spec: LoadSpec, *, timeout_s: float, reload: bool = False) -> Got:
        held = self._runner.run(
            self.client.attach(
                spec, timeout_s=timeout_s, on_mismatch="reload" if reload else "fail"
            )
        )
        return Got(held.manifest, None, held.fds)

    def kv_open(self, geometry: KvGeometry) -> Got:
        held = self._runner.run(self.client.kv_open(geometry))
        return Got(None, held.opened, held.fds)

    def close(self) -> None:
        self.client.close()
        self._runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(folder / "cache.sock") as process:
        yield process


@pytest.fixture
def spec(tmp_path: Path) -> LoadSpec:
    return spec_for(make_checkpoint(tmp_path / "model"))


@pytest.fixture(params=[EngineClient, SupervisorClient])
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Client]:
    client: Client = request.param(daemon)
    wait_until(lambda: not daemon.status().attached, "nobody is attached")
    daemon.control.call("drop", timeout_s=10)
    yield client
    client.close()


def test_weights_come_with_their_manifest_and_own_descriptors(
    client: Client, daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.load(spec)
    got = client.attach(spec, timeout_s=20)
    assert got.manifest is not None
    assert got.manifest.fingerprint == fingerprint_of(spec)
    assert [os.fstat(fd).st_size for fd in got.fds] == got.manifest.extent_bytes
    assert not any(os.get_inheritable(fd) for fd in got.fds)
    close_all(got.fds)


def test_nothing_to_wait_for_ends_at_the_deadline_with_a_code(
    client: Client, spec: LoadSpec
) -> None:
    with pytest.raises(RemoteError) as caught:
        client.attach(spec, timeout_s=0.1)
    assert caught.value.stable_code == "cache_not_ready"


def test_a_failed_load_is_told_with_the_loader_s_own_code(
    client: Client, daemon: DaemonProcess, tmp_path: Path
) -> None:
    bad = spec_for(make_checkpoint(tmp_path / "bad", leave_out=["model.norm.weight"]))
    daemon.load(bad)
    with pytest.raises(RemoteError) as caught:
        client.attach(bad, timeout_s=20)
    assert caught.value.stable_code == "missing_tensor"


def test_other_weights_are_refused_by_field_or_reloaded(
    client: Client, daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    other = spec_for(make_checkpoint(tmp_path / "other", seed=5))
    with pytest.raises(RemoteError) as caught:
        client.attach(other, timeout_s=20)
    assert caught.value.stable_code == "fingerprint_mismatch"
    assert caught.value.details["fields"] == ["model_path", "checkpoint_digest"]
    got = client.attach(other, timeout_s=20, reload=True)
    assert got.manifest is not None
    assert got.manifest.fingerprint == fingerprint_of(other)
    close_all(got.fds)


def test_kv_is_refused_without_weights_and_one_arena_with_them(
    client: Client, daemon: DaemonProcess, spec: LoadSpec
) -> None:
    with pytest.raises(RemoteError) as caught:
        client.kv_open(GEOMETRY)
    assert caught.value.stable_code == "cache_not_ready"
    daemon.serve(spec)
    first, second = client.kv_open(GEOMETRY), client.kv_open(GEOMETRY)
    assert first.opened is not None
    sizes = [*first.opened.extent_bytes, first.opened.table_bytes]
    assert [os.fstat(fd).st_size for fd in first.fds] == sizes
    assert os.fstat(first.fds[0]).st_ino == os.fstat(second.fds[0]).st_ino
    close_all([*first.fds, *second.fds])


def test_errors_leave_no_descriptor_behind(
    client: Client, daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    other = spec_for(make_checkpoint(tmp_path / "other", seed=5))
    before = open_fds()
    for _ in range(20):
        with pytest.raises(UnderstudyError):
            client.attach(other, timeout_s=5)
    assert open_fds() == before


# ------------------------------------------------------------------ the module itself


def test_the_table_of_verbs_in_the_protocol_is_what_the_daemon_serves(tmp_path: Path) -> None:
    assert protocol.__doc__ is not None
    table = re.findall(
        r"^([a-z.]+) {2,}(?:all|supervisor|loader|any)", protocol.__doc__, re.MULTILINE
    )

    async def served() -> set[str]:
        service = CacheService(
            tmp_path / "s.sock", instance="x", device="cpu", loader_argv=[],
            load_timeout_s=1, scrub_rate_bytes_per_s=1,
        )  # fmt: skip
        return set(service.handlers())

    assert set(table) == asyncio.run(served())


def test_every_message_is_frozen_typed_and_tolerates_unknown_fields() -> None:
    structs = [getattr(protocol, name) for name in protocol.__all__]
    messages = [kind for kind in structs if isinstance(kind, type)]
    assert len(messages) > 15
    for kind in messages:
        assert issubclass(kind, msgspec.Struct), kind
        assert kind.__struct_config__.frozen, kind
        assert not kind.__struct_config__.forbid_unknown_fields, kind
        get_type_hints(kind)


def test_a_client_that_asks_for_what_does_not_exist_gets_an_error_and_may_go_on(
    daemon: DaemonProcess,
) -> None:
    connection = daemon.connect("curious")
    for verb, params in (("explode", {}), ("attach", {}), ("attach", []), ("kv.open", {"a": 1})):
        with pytest.raises(RemoteError) as caught:
            connection.call(verb, params, timeout_s=5)
        assert caught.value.stable_code == "protocol"
    connection.call("status", timeout_s=5)
    connection.close()


# ------------------------------------------------------------------ loaders that break the rules

FAKE_LOADER = """
import sys
sys.path.insert(0, ROOT)
import argparse, os, time
from pathlib import Path
import msgspec
from cache.checkpoint import read_checkpoint
from cache.loader import plan_of
from cache.errors import ErrorBody
from cache.protocol import *
from cache.rpc import Hello
from cache.wire import Connection
p = argparse.ArgumentParser(); p.add_argument("what")
p.add_argument("--socket", type=Path); p.add_argument("--spec")
a = p.parse_args()
spec = msgspec.json.decode(a.spec, type=LoadSpec)
plan = plan_of(spec, read_checkpoint(Path(spec.model_path)))
c = Connection.open(a.socket)
c.call("hello", Hello(PROTOCOL, VERSION, "loader", 0, "loader"), timeout_s=10)
m = plan.manifest
sums = {t.name: "0" * 32 for t in m.tensors if t.alias_of is None}
call = lambda verb, params: c.call(verb, params, timeout_s=10)
def wait(): time.sleep(60)
"""

MISDEEDS: dict[str, tuple[str, str, str]] = {
    "exits without a word": ("sys.exit(0)", "load_failed", "status 0"),
    "exits with a status": ("sys.exit(7)", "load_failed", "status 7"),
    "closes its connection": ("c.close(); wait()", "load_failed", "closed its connection"),
    "commits before publishing": (
        "call('commit', Commit(sums, 0.1))", "load_failed", "status 1",
    ),
    "publishes another model": (
        "call('publish', msgspec.structs.replace(m, fingerprint="
        "msgspec.structs.replace(m.fingerprint, revision='x')))",
        "fingerprint_mismatch", "revision",
    ),
    "publishes overlapping tensors": (
        "t = list(m.tensors); t[1] = msgspec.structs.replace(t[1], offset_bytes=0);"
        "call('publish', msgspec.structs.replace(m, tensors=t))",
        "manifest", "overlap",
    ),
    "publishes more than there is": (
        "call('publish', msgspec.structs.replace(m, total_bytes=1 << 50))",
        "out_of_memory", "available",
    ),
    "publishes twice": ("call('publish', m); call('publish', m)", "load_failed", "status 1"),
    "commits without checksums": (
        "call('publish', m); call('commit', Commit({}, 0.1))", "manifest", "checksums",
    ),
    "aborts with its own error": (
        "call('abort', Abort(ErrorBody('own_code', 'own words')))", "own_code", "own words",
    ),
    "sends rubbish": ("os.write(c.fileno(), b'\\xff' * 9); wait()", "load_failed", "closed its"),
    "keeps a writable mapping and dies later": (
        "_, fds = call('publish', m); import cache.mapping;"
        "x = cache.mapping.Mapping(fds, [os.fstat(fd).st_size for fd in fds], writable=True);"
        "call('commit', Commit({}, 0.1))",
        "manifest", "checksums",
    ),
}  # fmt: skip


@pytest.fixture
async def service_with(
    tmp_path: Path,
) -> AsyncIterator[Callable[[str], Awaitable[CacheClient]]]:
    """A service in this process whose loader does what a test says."""
    script = tmp_path / "fake_loader.py"
    services: list[CacheService] = []
    clients: list[CacheClient] = []

    async def make(deed: str) -> CacheClient:
        script.write_text(f"ROOT = {str(ROOT)!r}\n{FAKE_LOADER}{deed}\n")
        service = CacheService(
            tmp_path / "cache.sock",
            instance="cache-fake",
            device="cpu",
            loader_argv=[sys.executable, str(script), "x"],
            load_timeout_s=20,
            scrub_rate_bytes_per_s=1 << 30,
        )
        await service.start()
        services.append(service)
        clients.append(await CacheClient.connect(tmp_path / "cache.sock", instance="supervisor"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    for service in services:
        await service.stop()


@pytest.mark.parametrize("name", sorted(MISDEEDS))
async def test_a_loader_that_breaks_the_rules_fails_its_load_and_nothing_else(
    name: str, service_with: Callable[[str], Awaitable[CacheClient]], spec: LoadSpec
) -> None:
    deed, code, words = MISDEEDS[name]
    client = await service_with(deed)
    before = open_fds()
    await client.load(spec)
    with pytest.raises(RemoteError, match=words) as caught:
        await client.attach(spec, timeout_s=20)
    assert caught.value.stable_code == code
    status = await client.status()
    assert (status.state, status.weights_bytes) == ("failed", 0)
    assert open_fds() <= before


async def test_wrong_checksums_are_found_by_a_scrub_which_fences_the_cache(
    service_with: Callable[[str], Awaitable[CacheClient]], spec: LoadSpec
) -> None:
    client = await service_with("call('publish', m); call('commit', Commit(sums, 0.1))")
    await client.load(spec)
    held = await client.attach(spec, timeout_s=20)
    result = await client.scrub(timeout_s=20)
    assert set(result.mismatches) == {t.name for t in held.manifest.tensors if not t.alias_of}
    assert (await client.status()).state == "fenced"
    with pytest.raises(RemoteError) as caught:
        await client.attach(spec, timeout_s=5)
    assert caught.value.stable_code == "cache_fenced"
    held.close()
    await client.drop()
    assert (await client.status()).state == "empty"


async def test_a_loader_that_lives_on_with_a_writable_mapping_is_ended_and_then_sealed(
    service_with: Callable[[str], Awaitable[CacheClient]],
    spec: LoadSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fcntl

    from cache import loads

    monkeypatch.setattr(loads, "_EXIT_GRACE_S", 0.1)
    client = await service_with(
        "_, fds = call('publish', m)\nimport cache.mapping\n"
        "x = cache.mapping.Mapping(fds, [os.fstat(fd).st_size for fd in fds], writable=True)\n"
        "call('commit', Commit(sums, 0.1)); wait()"
    )
    await client.load(spec)
    held = await client.attach(spec, timeout_s=20)
    async with asyncio.timeout(10):
        while not fcntl.fcntl(held.fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await client.status()).state == "serving"
    held.close()


async def test_weights_that_a_stranger_can_still_write_fence_the_cache(
    service_with: Callable[[str], Awaitable[CacheClient]], spec: LoadSpec, tmp_path: Path
) -> None:
    """The loader is gone, and some process it left behind maps the weights writable."""
    stop = tmp_path / "stop"
    client = await service_with(
        "_, fds = call('publish', m)\nimport cache.mapping\n"
        "x = cache.mapping.Mapping(fds, [os.fstat(fd).st_size for fd in fds], writable=True)\n"
        "call('commit', Commit(sums, 0.1))\n"
        "if os.fork() == 0:\n"
        f"    for _ in range(1000):\n        os.path.exists({str(stop)!r}) and os._exit(0)\n"
        "        time.sleep(0.02)\n"
        "    os._exit(1)\n"
    )
    await client.load(spec)
    async with asyncio.timeout(10):
        while (status := await client.status()).state != "fenced":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stop.touch()
    assert status.error is not None
    assert status.error.code == "seals"
    with pytest.raises(RemoteError) as caught:
        await client.attach(spec, timeout_s=5)
    assert caught.value.stable_code == "seals"


async def test_events_carry_state_and_progress(daemon: DaemonProcess, spec: LoadSpec) -> None:
    await asyncio.to_thread(daemon.control.call, "drop", timeout_s=10)
    states: list[CacheStatus] = []
    progress: list[Progress] = []
    client = await CacheClient.connect(
        daemon.socket, instance="watcher", on_state=states.append, on_progress=progress.append
    )
    await client.load(spec)
    held = await client.attach(spec, timeout_s=20)
    held.close()
    async with asyncio.timeout(10):
        while not states or states[-1].state != "serving":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert states[0].state == "loading"
    assert progress[-1].bytes_done == progress[-1].bytes_total
    client.close()
