"""The adapter of a server by itself: its contract, its ends, and strangers at its port."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from cache.errors import ConnectionClosedError, RemoteError
from cache.rpc import Hello, RpcClient
from cache.wire import FrameBuffer, encode_frame
from engines.command.errors import ServerNotReadyError
from engines.command.process import Address, ServerProcess
from engines.command.processes import ServerTree
from engines.contract import (
    CONTROL_PROTOCOL,
    CONTROL_VERSION,
    DRAIN_LEASE_S,
    Assume,
    CanaryResult,
    CommandSpec,
    Drained,
    End,
    EngineFrame,
    EngineStatus,
    Generate,
    GenerateBody,
    GenerateError,
    Resume,
)
from supervisor.process.stat import read_stat

ROOT = Path(__file__).parents[2]
SERVER = [sys.executable, "-m", "tests.harness.http_engine"]
DEADLINE_S = 20.0

WAITS_FOR_A_WORD = """
import pathlib, runpy, sys, time
folder, port = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / port).touch()
while not (folder / (port + '.go')).exists():
    time.sleep(0.01)
sys.argv = ['server', '--port', port, '--orders', str(folder / 'orders')]
runpy.run_module('tests.harness.http_engine', run_name='__main__')
"""


class Adapter:
    """One adapter process and a supervisor's view of it."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.spec = CommandSpec(
            "a", "chat", "a-12345678", str(folder), command, 8, DEADLINE_S, 0.4,
            python_path=str(ROOT),
        )  # fmt: skip
        spec = folder / "spec.json"
        spec.write_bytes(msgspec.json.encode(self.spec))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engines.command", str(spec)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log, stdout=log,
                start_new_session=True,
            )  # fmt: skip
        self.client: RpcClient | None = None

    async def call(self, verb: str, params: object = None) -> msgspec.Raw:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.client is None:
            assert time.monotonic() < deadline_s
            with suppress(OSError):
                hello = Hello(CONTROL_PROTOCOL, CONTROL_VERSION)
                self.client, _ = await RpcClient.connect(
                    self.folder / "a-12345678.sock", hello, timeout_s=5.0
                )
            await asyncio.sleep(0.02)
        return (await self.client.call(verb, params, timeout_s=5.0))[0]

    async def status(self) -> EngineStatus:
        return msgspec.json.decode(await self.call("status"), type=EngineStatus)

    async def ready(self) -> "Adapter":
        deadline_s = time.monotonic() + DEADLINE_S
        while (status := await self.status()).state == "starting":
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)
        assert status.state == "ready", status.error
        return self

    def server_pid(self) -> int:
        (pid, *_) = ServerTree(self.process.pid).scan()
        return pid

    def order(self, word: str) -> None:
        (self.folder / "orders").write_text(f"{self.server_pid()} {word}\n")

    async def ask(
        self,
        epoch: int,
        resume: Resume | None = None,
        before_close: Callable[[], Awaitable[None]] | None = None,
    ) -> list[EngineFrame]:
        reader, writer = await asyncio.open_unix_connection(self.folder / "a-12345678.gen")
        body = GenerateBody("completion", prompt="p", max_tokens=3)
        writer.write(encode_frame(Generate(1, "00", epoch, "gateway", body, 7, resume)))
        buffer, frames = FrameBuffer(), []
        while data := await reader.read(65536):
            buffer.feed(data)
            while (frame := buffer.next_body()) is not None:
                frames.append(msgspec.json.decode(frame, type=EngineFrame))
            if frames and isinstance(frames[-1], End | GenerateError):
                break
        if before_close is not None:
            await before_close()
        writer.close()
        return frames

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def started(folder: Path, command: list[str] | None = None) -> Adapter:
    default = [*SERVER, "--port", "{port}", "--orders", str(folder / "orders")]
    return Adapter(folder, command or default)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def open_files(pid: int) -> list[str]:
    return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]


async def refused(adapter: Adapter, verb: str, params: object = None) -> str:
    with pytest.raises(RemoteError) as caught:
        await adapter.call(verb, params)
    return caught.value.stable_code


async def test_it_serves_as_primary_of_its_epoch_only_and_refuses_what_is_past(
    folder: Path,
) -> None:
    adapter = await started(folder).ready()
    try:
        for epoch in (0, 5):
            (frame,) = await adapter.ask(epoch)
            assert isinstance(frame, GenerateError)
            assert (frame.code, frame.resumable) == ("not_serving", True)
        await adapter.call("assume", Assume("primary", 5))
        assert [type(f).__name__ for f in await adapter.ask(5)] == [
            "Accepted", "Delta", "Delta", "Delta", "End",
        ]  # fmt: skip
        (frame,) = await adapter.ask(4)
        assert isinstance(frame, GenerateError)
        assert (frame.code, frame.resumable) == ("stale_epoch", True)
        (frame,) = await adapter.ask(5, Resume([1], [2], 3))
        assert isinstance(frame, GenerateError)
        assert (frame.code, frame.resumable) == ("not_resumable", False)
        assert await refused(adapter, "assume", Assume("standby", 4)) == "stale_epoch"
        assert await refused(adapter, "assume", Assume("batch", 6)) == "role_not_possible"
        assert await refused(adapter, "descriptors") == "role_not_possible"
        status = await adapter.status()
        assert (status.role, status.epoch, status.resumable) == ("primary", 5, False)
    finally:
        adapter.process.terminate()
    assert await adapter.ended() == 0
    assert names_in(folder) <= {"log", "spec.json", "orders"}


async def test_a_drain_that_nobody_repeats_is_over(folder: Path) -> None:
    adapter = await started(folder).ready()
    try:
        await adapter.call("assume", Assume("primary", 1))
        raw = await adapter.call("drain")
        assert msgspec.json.decode(raw, type=Drained).open == 0
        (frame,) = await adapter.ask(1)
        assert isinstance(frame, GenerateError)
        assert (frame.code, frame.resumable) == ("not_serving", True)
        await asyncio.sleep(DRAIN_LEASE_S)
        assert len(await adapter.ask(1)) == 5
        await adapter.call("drain")
        await adapter.call("assume", Assume("primary", 2))
        assert len(await adapter.ask(2)) == 5, "a role ends the draining"
    finally:
        adapter.process.terminate()
        await adapter.ended()


async def test_a_drain_waits_until_the_last_frame_is_taken(folder: Path) -> None:
    adapter = await started(folder).ready()

    async def unfinished() -> int:
        return msgspec.json.decode(await adapter.call("drain"), type=Drained).open

    async def still_open() -> None:
        await asyncio.sleep(0.2)
        assert await unfinished() == 1, "the gateway may not have handed it on to a slow client"

    try:
        await adapter.call("assume", Assume("primary", 1))
        frames = await adapter.ask(1, before_close=still_open)
        assert isinstance(frames[-1], End)
        deadline_s = time.monotonic() + DEADLINE_S
        while await unfinished():
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)
    finally:
        adapter.process.terminate()
        await adapter.ended()


async def answered(adapter: Adapter) -> CanaryResult:
    """The next answer: one that differs is asked for twice, and comes with a later question."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return msgspec.json.decode(await adapter.call("canary"), type=CanaryResult)
        except RemoteError:
            assert time.monotonic() < deadline_s


async def test_the_known_answer_is_the_text_of_a_greedy_completion(folder: Path) -> None:
    adapter = await started(folder).ready()
    try:
        raw = await adapter.call("canary")
        answer = msgspec.json.decode(raw, type=CanaryResult)
        assert bytes(answer.token_ids) == b"w0 w1 w2 w3"
        adapter.order("full")
        await asyncio.sleep(0.1)
        assert await refused(adapter, "canary") == "not_ready", "429 is no answer"
        adapter.order("wrong")
        await asyncio.sleep(0.1)
        assert bytes((await answered(adapter)).token_ids) == b"x0 x1 x2 x3"
        adapter.order("broken")
        await asyncio.sleep(0.1)
        assert (await answered(adapter)).token_ids == [500]
        adapter.order("stall")
        await asyncio.sleep(0.1)
        assert await refused(adapter, "canary") == "not_ready"
        assert (await adapter.status()).active == 1, "the open question is work"
        assert adapter.client is not None
        question = asyncio.ensure_future(adapter.client.call("canary", timeout_s=5.0))
        await asyncio.sleep(0.01)
        began_s = time.monotonic()
        await adapter.call("assume", Assume("standby", 1))
        assert time.monotonic() - began_s < 0.8, "an order does not wait for a slow answer"
        with suppress(RemoteError):
            await question
    finally:
        adapter.process.terminate()
        await adapter.ended()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_it_ends_by_the_signal_that_ended_its_server(
    folder: Path, sig: signal.Signals
) -> None:
    adapter = await started(folder).ready()
    os.kill(adapter.server_pid(), sig)
    assert await adapter.ended() == -sig
    assert f"server_ended: the server was ended by {sig.name}" in adapter.log.read_text()
    assert "Traceback" not in adapter.log.read_text()


async def test_it_ends_with_the_status_of_its_server(folder: Path) -> None:
    adapter = await started(folder).ready()
    adapter.order("leave")
    assert await adapter.ended() == 1


async def test_its_server_dies_with_it(folder: Path) -> None:
    adapter = await started(folder).ready()
    server = adapter.server_pid()
    adapter.process.kill()
    await adapter.ended()
    deadline_s = time.monotonic() + DEADLINE_S
    while (stat := read_stat(server)) is not None and stat.state != "Z":
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    adapter = started(folder, [sys.executable, "-c", "import sys; sys.exit('no {port} for me')"])
    assert await adapter.ended() == 1
    last = adapter.log.read_text().splitlines()[-1]
    assert last.startswith("error: server_ended: the server left with status 1")


async def test_a_server_that_goes_into_the_background_is_told_to_stay(folder: Path) -> None:
    code = "import os, time\nif not os.fork(): os.setsid(); time.sleep(60)"
    adapter = Adapter(folder, [sys.executable, "-c", code, "{port}"])
    assert await adapter.ended() == 1
    text = "the server left with status 0: it must stay in the foreground"
    assert text in adapter.log.read_text()


async def test_one_that_listens_elsewhere_is_told_where(folder: Path) -> None:
    """As a command whose `{port}` is not what the server takes for its port."""
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)"
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.command.process._PATIENCE_S", 1.0)
        process = ServerProcess(
            [sys.executable, "-c", code, "{port}"], folder / "srv", python_path=None,
            on_delay=said.append,
        )  # fmt: skip
        try:
            with pytest.raises(ServerNotReadyError, match="does not listen on port"):
                await process.start(deadline_s=time.monotonic() + 3.0)
        finally:
            os.kill(process._pid, signal.SIGKILL)  # it alone: other tests have children too
            await asyncio.to_thread(os.waitpid, process._pid, 0)
    (text,) = said
    assert "does not listen on port" in text
    assert ", but on " in text


def test_placeholders_are_filled_where_check_sees_them() -> None:
    address = Address(8001, Path("/s"), is_unix=False)
    words = ["{port}", "{{port}}", '{"a":{port}}', "--url=http://h:{port}/", "{x}"]
    assert address.fill(words) == ["8001", "{{port}}", '{"a":8001}', "--url=http://h:8001/", "{x}"]


async def test_another_port_is_taken_when_a_stranger_takes_the_first(folder: Path) -> None:
    adapter = started(folder, [sys.executable, "-c", WAITS_FOR_A_WORD, str(folder), "{port}"])

    async def chosen(known: set[str]) -> str:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (new := {n for n in names_in(folder) if n.isdigit()} - known):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        return new.pop()

    first = await chosen(set())
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", int(first)))
        stranger.listen()
        (folder / f"{first}.go").touch()
        second = await chosen({first})
        (folder / f"{second}.go").touch()
        await adapter.ready()
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()  # it was never even asked
    adapter.process.terminate()
    await adapter.ended()


async def test_it_ends_when_a_stranger_takes_the_port_of_a_server_that_let_it_go(
    folder: Path,
) -> None:
    adapter = await started(folder).ready()
    (line,) = [x for x in adapter.log.read_text().splitlines() if "ready after" in x]
    port = int(line.rsplit(" ", 1)[1])
    adapter.order("deaf")
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                stranger.bind(("127.0.0.1", port))
            except OSError:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.01)
            else:
                break
        stranger.listen()
        assert await adapter.ended() == 1
    assert "error: port_taken" in adapter.log.read_text()


@pytest.mark.parametrize("where", ["port", "uds"])
async def test_it_ends_when_its_server_listens_no_more(folder: Path, where: str) -> None:
    address = "{port}" if where == "port" else "{socket}"
    adapter = await started(
        folder, [*SERVER, f"--{where}", address, "--orders", str(folder / "orders")]
    ).ready()
    adapter.order("deaf")
    assert await adapter.ended() == 1
    assert "error: server_unusable: the server has not listened" in adapter.log.read_text()


async def test_a_socket_path_that_is_too_long_for_an_address_works(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    folder.mkdir(mode=0o700, parents=True)
    adapter = await started(folder, [*SERVER, "--uds", "{socket}", "--orders", "x"]).ready()
    adapter.process.terminate()
    assert await adapter.ended() == 0


async def test_no_descriptor_of_the_adapter_reaches_the_server(folder: Path) -> None:
    adapter = await started(folder).ready()
    try:
        assert not [x for x in open_files(adapter.server_pid()) if "memfd" in x]
    finally:
        adapter.process.terminate()
        await adapter.ended()
    with pytest.raises(ConnectionClosedError):
        await adapter.call("status")


def test_a_tree_that_waits_for_a_cpu_is_seen_to(tmp_path: Path) -> None:
    """Four spinning processes on one CPU: each has three quarters of the time to wait."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    try:
        tree = ServerTree(os.getpid())
        time.sleep(0.5)
        before = tree.look()
        time.sleep(1.5)
        after = tree.look()
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    assert after.is_runnable
    assert not after.is_stopped
    assert after.run_delay_ns - before.run_delay_ns > 1.0e9


def test_who_cannot_look_says_nothing_about_the_port() -> None:
    """Without a descriptor left our own server must not be taken for a stranger."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port, tree = server.getsockname()[1], ServerTree(os.getppid())
        assert tree.owns_listeners(port)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                tree.owns_listeners(port)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 512, reason="there are not enough to raise"
)
async def test_it_uses_all_descriptors_and_the_server_has_its_own_limit(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        adapter = started(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        await adapter.ready()
        assert resource.prlimit(adapter.process.pid, resource.RLIMIT_NOFILE)[0] == before[1]
        assert resource.prlimit(adapter.server_pid(), resource.RLIMIT_NOFILE)[0] == 512
    finally:
        adapter.process.terminate()
        await adapter.ended()
