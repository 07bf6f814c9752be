"""Request and reply over asyncio: both loops, real sockets, peers that misbehave."""

import asyncio
import functools
import inspect
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec
import pytest
import uvloop

from cache import rpc
from cache.errors import (
    ConnectionClosedError,
    DeadlineExceededError,
    RemoteError,
    UnderstudyError,
)
from cache.rpc import Hello, RpcClient, RpcPeer, RpcServer
from cache.wire import Event, Frame, Reply, Request, connect_unix, encode_frame, send_once

HELLO = Hello("test", 3, "tester")
Answer = tuple[object, Sequence[int]]


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on_both_loops(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test with a started `service` under asyncio's loop and under uvloop."""
    parameters = dict(inspect.signature(test).parameters)
    del parameters["service"]
    needs_path = "tmp_path" in parameters

    def run(loop_kind: str, tmp_path: Path, **others: object) -> None:
        async def body() -> None:
            service = Service(tmp_path / "s.sock")
            await service.server.start()
            try:
                extra = {"tmp_path": tmp_path} if needs_path else {}
                await test(service=service, **others, **extra)
            finally:
                service.server.close()
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=LOOPS[loop_kind]) as runner:
            runner.run(body())

    own = inspect.Parameter("loop_kind", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for name, p in parameters.items() if name != "tmp_path"]
    functools.update_wrapper(run, test)
    run.__signature__ = inspect.Signature([own, path, *rest])  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop_kind", sorted(LOOPS))(run)


class Service:
    """A server with a few verbs that show what the transport does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.release = asyncio.Event()
        self.gone: list[RpcPeer] = []
        self.received: list[int] = []
        self.server = RpcServer(
            path,
            "test",
            3,
            {
                "hello": self._hello,
                "echo": self._echo,
                "wait": self._wait,
                "give": self._give,
                "refuse": self._refuse,
                "break": self._break,
                "huge": self._huge,
            },
            on_peer_gone=self.gone.append,
        )

    async def _hello(self, _peer: RpcPeer, _raw: msgspec.Raw, fds: list[int]) -> Answer:
        assert not fds
        return {"welcome": True}, ()

    async def _echo(self, _peer: RpcPeer, raw: msgspec.Raw, fds: list[int]) -> Answer:
        for fd in fds:
            os.close(fd)
        return {"params": msgspec.json.decode(raw), "fds": len(fds)}, ()

    async def _wait(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        await self.release.wait()
        return "released", ()

    async def _give(self, _peer: RpcPeer, raw: msgspec.Raw, _fds: list[int]) -> Answer:
        await self.release.wait()
        return None, [0] * int(msgspec.json.decode(raw))

    async def _refuse(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        raise UnderstudyError("not now", hint="later", details={"n": 1})

    async def _break(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        raise ZeroDivisionError

    async def _huge(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return "x" * (17 << 20), ()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - a condition of the server's, not an event
                await asyncio.sleep(0.002)


async def connect(service: Service, hello: Hello = HELLO) -> RpcClient:
    client, _ = await RpcClient.connect(service.path, hello, timeout_s=5)
    return client


async def ask(client: RpcClient, params: object) -> object:
    raw, fds = await client.call("echo", params, timeout_s=5)
    assert fds == []
    return msgspec.json.decode(raw)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_both_loops
async def test_calls_of_one_client_may_overlap_and_others_are_not_held_up(
    service: Service,
) -> None:
    one, two = await connect(service), await connect(service)
    waiting = asyncio.create_task(one.call("wait", timeout_s=5))
    assert await ask(two, [1, 2]) == {"params": [1, 2], "fds": 0}
    service.release.set()
    assert msgspec.json.decode((await waiting)[0]) == "released"
    one.close()
    two.close()


@on_both_loops
async def test_errors_arrive_with_code_hint_and_details(service: Service) -> None:
    client = await connect(service)
    with pytest.raises(RemoteError, match="not now; later") as caught:
        await client.call("refuse", timeout_s=5)
    assert (caught.value.stable_code, caught.value.details) == ("internal", {"n": 1})
    for verb in ("break", "no.such.verb", "huge"):
        with pytest.raises(RemoteError):
            await client.call(verb, timeout_s=5)
    assert not client.is_closed
    client.close()


@pytest.mark.parametrize(
    "hello", [Hello("other", 3), Hello("test", 4)], ids=["protocol", "version"]
)
@on_both_loops
async def test_a_wrong_hello_is_refused_and_the_connection_closed(
    service: Service, hello: Hello
) -> None:
    with pytest.raises(RemoteError):
        await connect(service, hello)
    await service.until(lambda: not service.server.peers)


@on_both_loops
async def test_nothing_is_served_before_hello(service: Service) -> None:
    with connect_unix(service.path, timeout_s=5) as sock:
        send_once(sock, encode_frame(Request(1, "echo")))
        answer = await asyncio.to_thread(sock.recv, 1000)
        assert b"before hello" in answer
        assert await asyncio.to_thread(sock.recv, 10) == b""


@on_both_loops
async def test_a_silent_connection_is_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "HELLO_TIMEOUT_S", 0.02)
    with connect_unix(service.path, timeout_s=5) as sock:
        assert await asyncio.to_thread(sock.recv, 10) == b""


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"GET / HTTP/1.1\r\n\r\n",
        encode_frame(Reply(1)),
        encode_frame(Event("x")),
        encode_frame(Request(1, "hello", fds=3)),
    ],
    ids=["length", "array", "http", "reply", "event", "descriptors"],
)
@on_both_loops
async def test_rubbish_closes_its_own_connection_only(service: Service, rubbish: bytes) -> None:
    good = await connect(service)
    with connect_unix(service.path, timeout_s=5) as sock:
        sock.send(rubbish)
        assert await asyncio.to_thread(sock.recv, 10) == b""
    assert await ask(good, 1) == {"params": 1, "fds": 0}
    good.close()


@on_both_loops
async def test_a_client_that_vanishes_mid_frame_or_mid_call_leaves_nothing(
    service: Service,
) -> None:
    before = open_fds()
    with connect_unix(service.path, timeout_s=5) as sock:
        send_once(sock, encode_frame(Request(1, "hello"))[:9], [0, 0])
    client = await connect(service)
    waiting = asyncio.create_task(client.call("wait", timeout_s=5))
    await service.until(lambda: len(service.server.peers) == 1)
    client.close()
    with pytest.raises(ConnectionClosedError):
        await waiting
    await service.until(lambda: len(service.gone) == 2)
    assert open_fds() == before


@on_both_loops
async def test_an_answer_that_comes_too_late_leaks_no_descriptors(service: Service) -> None:
    client = await connect(service)
    before = open_fds()
    with pytest.raises(DeadlineExceededError):
        await client.call("give", 3, timeout_s=0.02)
    service.release.set()
    assert (await client.call("echo", 1, timeout_s=5))[1] == []
    assert open_fds() == before
    _, fds = await client.call("give", 3, timeout_s=5)
    for fd in fds:
        os.close(fd)
    assert open_fds() == before
    client.close()


@on_both_loops
async def test_too_many_descriptors_in_an_answer_are_an_error_not_a_hang(
    service: Service,
) -> None:
    service.release.set()
    client = await connect(service)
    with pytest.raises(RemoteError, match="too many"):
        await client.call("give", 300, timeout_s=5)
    client.close()


@on_both_loops
async def test_a_client_that_sends_without_reading_is_cut_off(service: Service) -> None:
    other = await connect(service)
    with connect_unix(service.path, timeout_s=5) as sock:
        sock.send(encode_frame(Request(1, "hello", msgspec.Raw(msgspec.json.encode(HELLO)))))
        await service.until(lambda: len(service.server.peers) == 2)
        frames = b"".join(encode_frame(Request(n, "wait")) for n in range(300))
        await asyncio.to_thread(sock.sendall, frames)
        await service.until(lambda: len(service.server.peers) == 1)
    assert await other.call("echo", timeout_s=5)
    other.close()


@on_both_loops
async def test_a_peer_that_does_not_read_is_passed_over_and_then_cut_off(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_UNSENT_BYTES", 4 << 20)
    with connect_unix(service.path, timeout_s=5) as sock:
        sock.send(encode_frame(Request(1, "hello", msgspec.Raw(msgspec.json.encode(HELLO)))))
        await service.until(lambda: any(p.hello for p in service.server.peers))
        peer = next(iter(service.server.peers))
        for _ in range(100):
            service.server.notify_all("news", "x" * 100_000, max_unsent_bytes=200_000)
        assert peer.unsent_bytes <= 300_100
        for _ in range(100):
            service.server.notify_all("news", "x" * 100_000)
        assert peer.is_closed


@on_both_loops
async def test_events_reach_clients_with_their_parameters(service: Service) -> None:
    events: list[Event] = []

    def on_event(event: Event, _fds: list[int]) -> None:
        events.append(event)

    client, _ = await RpcClient.connect(service.path, HELLO, timeout_s=5, on_event=on_event)
    service.server.notify_all("news", {"n": 1})
    await service.until(lambda: bool(events))
    assert (events[0].name, msgspec.json.decode(events[0].params)) == ("news", {"n": 1})
    client.close()


@on_both_loops
async def test_an_event_behind_a_reply_is_heard_after_it_though_they_arrive_together(
    service: Service, tmp_path: Path
) -> None:
    """Or what the reply says, which is older, would be taken for the latest news."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = encode_frame(Event("before"))
        writer.write(before + encode_frame(Reply(1)) + encode_frame(Event("behind")))
        await writer.drain()
        writer.close()

    heard: list[str] = []

    def on_event(event: Event, _fds: list[int]) -> None:
        heard.append(event.name)

    server = await asyncio.start_unix_server(answer, tmp_path / "all-at-once.sock")
    client, _ = await RpcClient.connect(
        tmp_path / "all-at-once.sock", HELLO, timeout_s=5, on_event=on_event
    )
    heard.append("reply")
    await client.closed
    server.close()
    assert heard == ["before", "reply", "behind"]


@on_both_loops
async def test_events_that_wait_when_the_client_closes_are_dropped(
    service: Service, tmp_path: Path
) -> None:
    heard: list[str] = []

    def on_event(event: Event, _fds: list[int]) -> None:
        heard.append(event.name)

    client, _ = await RpcClient.connect(service.path, HELLO, timeout_s=5, on_event=on_event)
    service.server.notify_all("news")
    client.close()
    await asyncio.sleep(0.01)
    assert heard == []


@on_both_loops
async def test_the_server_s_end_ends_calls_and_is_told_once(service: Service) -> None:
    client = await connect(service)
    waiting = asyncio.create_task(client.call("wait", timeout_s=5))
    await asyncio.sleep(0)
    service.server.close()
    with pytest.raises(ConnectionClosedError):
        await waiting
    assert isinstance(await client.closed, ConnectionClosedError)
    assert not service.path.exists()


@on_both_loops
async def test_a_server_that_was_replaced_leaves_its_successor_s_socket_alone(
    service: Service, tmp_path: Path
) -> None:
    successor = Service(tmp_path / "s.sock")
    await successor.server.start()
    service.server.close()
    client = await connect(successor)
    assert await client.call("echo", timeout_s=5)
    client.close()
    successor.server.close()


async def test_connecting_where_nobody_listens_fails_at_once(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(OSError, match="No such file"):
        await RpcClient.connect(tmp_path / "none.sock", HELLO, timeout_s=5)
    assert open_fds() == before


async def test_a_server_that_accepts_and_says_nothing_is_a_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        before = open_fds()
        with pytest.raises(DeadlineExceededError):
            await RpcClient.connect(tmp_path / "mute.sock", HELLO, timeout_s=0.05)
        assert open_fds() == before


def test_frames_of_every_kind_round_trip() -> None:
    frames: list[Frame] = [Request(1, "v"), Reply(1), Event("e")]
    for frame in frames:
        assert msgspec.json.decode(msgspec.json.encode(frame), type=Frame) == frame
