"""Real engine, zygote and cache processes for tests, and a gateway's side of the protocols."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import socket  # noqa: TC003 - a module of this size need not hide an import
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cache.protocol import PROTOCOL as CACHE_PROTOCOL
from cache.protocol import VERSION as CACHE_VERSION
from cache.protocol import CacheStatus, Load, LoadSpec
from cache.rpc import Hello, RpcClient
from cache.wire import Connection, FrameBuffer, connect_unix
from engines.contract import (
    CONTROL_PROTOCOL,
    CONTROL_VERSION,
    GENERATE_VERSION,
    ZYGOTE_PROTOCOL,
    ZYGOTE_VERSION,
    Accepted,
    Assume,
    Assumed,
    Cancel,
    ChildRecord,
    Delta,
    End,
    EngineFrame,
    EngineSpec,
    EngineStatus,
    Fork,
    Generate,
    GenerateBody,
    GenerateError,
    Resume,
    ZygoteSpec,
)
from engines.native.threads import SINGLE_THREAD_ENVIRONMENT

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs" / "models" / "demo"
LOAD = LoadSpec(str(MODEL))
MARKER = "0123abcd:"

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(EngineFrame)


def environment(instance: str) -> dict[str, str]:
    return {
        **os.environ,
        **SINGLE_THREAD_ENVIRONMENT,
        "HF_HUB_OFFLINE": "1",
        "UNDERSTUDY_INSTANCE": (MARKER + instance).ljust(96),
    }


def engine_spec(run_dir: Path, name: str, **changes: Any) -> EngineSpec:
    spec = EngineSpec(
        name=name,
        group="chat",
        instance=f"{name}-00000001",
        run_dir=str(run_dir),
        cache_socket=str(run_dir / "cache-chat.sock"),
        load=LOAD,
        on_mismatch="fail",
        slots=8,
        max_length=512,
        private_kv=False,
        max_queue=8,
        adopt_grace_s=20.0,
        attach_timeout_s=30.0,
    )
    return msgspec.structs.replace(spec, **changes)


def wait_for(condition: Callable[[], T], *, timeout_s: float = 30.0) -> T:
    """Poll until the condition holds (is true, does not raise)."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"{condition} did not hold in {timeout_s} s"
        time.sleep(0.005)


async def wait_until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the condition is another process
            await asyncio.sleep(0.01)


@dataclass
class Spawned:
    """A child process with its log."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, module: str, *arguments: str, instance: str, log: Path) -> Spawned:
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment(instance),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def terminate(self, *, timeout_s: float = 10.0) -> int:
        self.process.terminate()
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def cache_daemon(
    run_dir: Path, *, load: bool = True, spec: LoadSpec = LOAD, load_timeout_s: float = 30.0
) -> Iterator[Spawned]:
    path = run_dir / "cache-chat.sock"
    daemon = Spawned.start(
        "cache.daemon", "--socket", str(path), "--instance", "cache-chat-00000001",
        "--device", spec.device, instance="cache-chat-00000001", log=run_dir / "cache.log",
    )  # fmt: skip
    try:
        connection = wait_for(lambda: Connection.open(path))
        hello = Hello(CACHE_PROTOCOL, CACHE_VERSION, "tests")
        connection.call("hello", hello, timeout_s=5)
        if load:
            connection.call("load", Load(spec), timeout_s=load_timeout_s)
        connection.close()
        yield daemon
    finally:
        daemon.kill()


def cold_engine(spec: EngineSpec, run_dir: Path) -> Spawned:
    file = run_dir / f"{spec.instance}.json"
    file.write_bytes(_encoder.encode(spec))
    log = run_dir / f"{spec.name}.log"
    return Spawned.start("engines.native", str(file), instance=spec.instance, log=log)


@dataclass
class ZygoteClient:
    """A zygote, and a blocking connection to it."""

    spawned: Spawned
    connection: Connection
    run_dir: Path
    hello: Any = None
    pids: list[int] = field(default_factory=list)

    def fork(self, spec: EngineSpec) -> ChildRecord:
        with (self.run_dir / f"{spec.name}.log").open("ab") as log:
            raw, _ = self.connection.call(
                "fork", Fork(spec, MARKER + spec.instance), fds=[log.fileno()], timeout_s=10
            )
        record = msgspec.json.decode(raw, type=ChildRecord)
        self.pids.append(record.pid)
        return record


def kill_child(pid: int) -> None:
    """Kill an engine of ours, unless it is gone; its pid may belong to somebody else by then."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if MARKER.encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def zygote(run_dir: Path, *, spec: LoadSpec = LOAD) -> Iterator[ZygoteClient]:
    """A zygote; at the end it and every child of it are gone."""
    path = run_dir / "zygote.sock"
    file = run_dir / "zygote.json"
    file.write_bytes(_encoder.encode(ZygoteSpec("chat", "zygote-chat-1", str(path), spec)))
    spawned = Spawned.start(
        "engines.zygote", str(file), instance="zygote-chat-1", log=run_dir / "zygote.log"
    )
    client: ZygoteClient | None = None
    try:
        connection = wait_for(lambda: Connection.open(path), timeout_s=120)
        hello, _ = connection.call(
            "hello", Hello(ZYGOTE_PROTOCOL, ZYGOTE_VERSION, "tests"), timeout_s=5
        )
        client = ZygoteClient(spawned, connection, run_dir, hello)
        yield client
        connection.close()
    finally:
        for pid in client.pids if client else []:
            kill_child(pid)
        spawned.kill()


def open_numbers(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


def settled_numbers(pid: int, *, still_s: float = 0.3, timeout_s: float = 30.0) -> set[int]:
    """Its open descriptors once they have not changed for a while: what is closing is closed."""
    numbers, since = open_numbers(pid), time.monotonic()

    def are_still() -> bool:
        nonlocal numbers, since
        if (now := open_numbers(pid)) != numbers:
            numbers, since = now, time.monotonic()
        return time.monotonic() - since >= still_s

    wait_for(are_still, timeout_s=timeout_s)
    return numbers


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """The process cannot open one file meanwhile. The limit is on numbers: the lowest free one."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = settled_numbers(pid)
    lowest = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


class Engine:
    """The supervisor's and the gateway's side of one engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.run_dir = Path(spec.run_dir)
        self.epoch = 0
        self._streams: list[Stream] = []

    def close(self) -> None:
        """Close what tests left open; an engine sees it as a gateway that died."""
        for stream in self._streams:
            stream.close()

    @contextlib.asynccontextmanager
    async def control(self, *, timeout_s: float = 30.0) -> AsyncIterator[RpcClient]:
        path = self.run_dir / f"{self.spec.instance}.sock"
        hello = Hello(CONTROL_PROTOCOL, CONTROL_VERSION, "tests")
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    client, _ = await RpcClient.connect(path, hello, timeout_s=5.0)
                    break
                except OSError:
                    await asyncio.sleep(0.02)
        try:
            yield client
        finally:
            client.close()

    async def call(self, verb: str, params: object = None, *, timeout_s: float = 10.0) -> Any:
        async with self.control() as client:
            raw, fds = await client.call(verb, params, timeout_s=timeout_s)
            for fd in fds:
                os.close(fd)
            return raw

    async def status(self) -> EngineStatus:
        return msgspec.json.decode(await self.call("status"), type=EngineStatus)

    async def ready(self, *, timeout_s: float = 60.0) -> EngineStatus:
        async with asyncio.timeout(timeout_s):
            while (status := await self.status()).state == "starting":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return status

    async def assume(self, role: Any, epoch: int) -> Assumed:
        raw = await self.call("assume", Assume(role, epoch))
        self.epoch = epoch
        return msgspec.json.decode(raw, type=Assumed)

    async def open(
        self,
        body: GenerateBody,
        *,
        seed: int = 1,
        request_id: str | None = None,
        resume: Resume | None = None,
        epoch: int | None = None,
        gateway: str = "gateway-1",
    ) -> Stream:
        sock = connect_unix(self.run_dir / f"{self.spec.instance}.gen", timeout_s=5.0)
        stream = Stream(sock, request_id or os.urandom(16).hex(), body, seed)
        self._streams.append(stream)
        stream.send(
            Generate(
                GENERATE_VERSION,
                stream.request_id,
                self.epoch if epoch is None else epoch,
                gateway,
                body,
                seed,
                resume,
            )
        )
        if resume is not None:
            stream.prompt_ids = resume.prompt_ids or []
            stream.token_ids = list(resume.token_ids)
            stream.chars = resume.chars
        return stream

    async def complete(self, body: GenerateBody, **options: Any) -> Stream:
        stream = await self.open(body, **options)
        await stream.finish()
        return stream


class Stream:
    """One generation as a gateway reads it; checks contiguity on the way."""

    def __init__(self, sock: socket.socket, request_id: str, body: GenerateBody, seed: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = FrameBuffer()
        self.request_id = request_id
        self.body = body
        self.seed = seed
        self.accepted: Accepted | None = None
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.chars = 0
        self.end: End | GenerateError | None = None

    def send(self, frame: Generate | Cancel) -> None:
        data = _encoder.encode(frame)
        self._sock.setblocking(True)
        self._sock.sendall(struct.pack(">I", len(data)) + data)
        self._sock.setblocking(False)

    async def next(self, *, timeout_s: float = 20.0) -> EngineFrame | None:
        """The next frame, None at end of file."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            while (body := self._buffer.next_body()) is None:
                try:
                    data = await loop.sock_recv(self._sock, 65536)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._buffer.feed(data)
        frame: EngineFrame = _decoder.decode(body)
        match frame:
            case Accepted():
                self.accepted = frame
                self.prompt_ids = frame.prompt_ids or self.prompt_ids
            case Delta():
                assert frame.index == len(self.token_ids)
                self.token_ids += frame.token_ids
                self.text += frame.text
                self.chars += len(frame.text)
                assert self.chars == frame.chars
            case End() | GenerateError():
                self.end = frame
        return frame

    async def read_tokens(self, count: int) -> None:
        """Read until at least `count` tokens are there, or the stream ends."""
        while len(self.token_ids) < count and self.end is None:
            if await self.next() is None:
                return

    async def finish(self) -> None:
        while self.end is None:
            if await self.next() is None:
                break
        self.close()

    def close(self) -> None:
        """Close without `Cancel`, as a gateway does that cuts a route."""
        self._sock.close()

    def as_resume(self, *, with_prompt: bool = True) -> Resume:
        assert self.accepted is not None
        if with_prompt:
            return Resume(self.prompt_ids, self.token_ids, self.chars)
        return Resume(None, self.token_ids, self.chars, prompt_tokens=len(self.prompt_ids))

    @property
    def finish_reason(self) -> str:
        assert isinstance(self.end, End), self.end
        return self.end.finish_reason


async def cache_status(run_dir: Path) -> CacheStatus:
    client, _ = await RpcClient.connect(
        run_dir / "cache-chat.sock",
        Hello(CACHE_PROTOCOL, CACHE_VERSION, "tests"),
        timeout_s=5,
    )
    try:
        raw, _ = await client.call("status", timeout_s=5)
        return msgspec.json.decode(raw, type=CacheStatus)
    finally:
        client.close()
