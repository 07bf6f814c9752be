"""Frames, descriptors and blocking connections."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import (
    ConnectionClosedError,
    DeadlineExceededError,
    ErrorBody,
    ProtocolError,
    RemoteError,
)
from cache.wire import (
    MAX_FDS_PER_FRAME,
    MAX_FRAME_BYTES,
    Connection,
    Event,
    Frame,
    FrameBuffer,
    Reply,
    Request,
    connect_unix,
    encode_frame,
    listen_unix,
    peer_identity,
    receive_once,
    send_once,
)


def open_fds() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield one, two
    one.close()
    two.close()


@given(
    frames=st.lists(
        st.one_of(
            st.builds(Request, st.integers(0, 2**53), st.text(max_size=20)),
            st.builds(Reply, st.integers(0, 2**53)),
            st.builds(Event, st.text(max_size=20)),
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=200),
)
@settings(deadline=None)
def test_frames_survive_any_way_of_cutting_the_stream(
    frames: list[Request | Reply | Event], cuts: list[int]
) -> None:
    stream = b"".join(encode_frame(frame) for frame in frames)
    buffer, found, position = FrameBuffer(), [], 0
    sizes = iter(cuts * (len(stream) + 1))
    while position < len(stream):
        size = next(sizes)
        buffer.feed(stream[position : position + size])
        position += size
        while (cut := buffer.next_frame()) is not None:
            found.append(cut[0])
    assert found == frames


@given(noise=st.binary(min_size=1, max_size=300))
def test_noise_raises_a_protocol_error_or_waits_for_more(noise: bytes) -> None:
    buffer = FrameBuffer(max_frame_bytes=1000)
    buffer.feed(noise)
    try:
        while buffer.next_frame() is not None:
            pass
    except ProtocolError:
        pass


def test_a_frame_over_the_bound_is_refused_from_its_length_alone() -> None:
    buffer = FrameBuffer()
    buffer.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="bound"):
        buffer.next_frame()
    with pytest.raises(ProtocolError, match="bound"):
        encode_frame(Event("x", msgspec.Raw(b'"' + b"x" * MAX_FRAME_BYTES + b'"')))


def test_fewer_descriptors_than_announced_is_an_error() -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_frame(Event("x", fds=1)))
    with pytest.raises(ProtocolError, match="1 descriptors announced, 0 arrived"):
        buffer.next_frame()


def test_descriptors_that_no_frame_announced_are_an_error_and_are_closed() -> None:
    before = open_fds()
    buffer = FrameBuffer()
    buffer.feed(encode_frame(Event("x", fds=1)), [os.dup(0), os.dup(0)])
    with pytest.raises(ProtocolError, match="no frame announced"):
        buffer.next_frame()
    buffer.close()
    assert open_fds() == before


def test_a_hoard_of_descriptors_is_an_error() -> None:
    buffer = FrameBuffer()
    with pytest.raises(ProtocolError, match="ahead of their frames"):
        buffer.feed(b"\0", [os.dup(0) for _ in range(2 * MAX_FDS_PER_FRAME + 1)])
    buffer.close()


def test_descriptors_arrive_with_their_frame_and_close_on_exec(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, two = pair
    fd = os.memfd_create("sent")
    os.write(fd, b"hello")
    send_once(one, encode_frame(Event("first")))
    send_once(one, encode_frame(Event("second", fds=2)), [fd, fd])
    buffer = FrameBuffer()
    frames: list[tuple[Frame, list[int]]] = []
    while len(frames) < 2:
        buffer.feed(*receive_once(two))
        while (cut := buffer.next_frame()) is not None:
            frames.append(cut)
    assert frames[0] == (Event("first"), [])
    received = frames[1][1]
    assert len(received) == 2
    for got in received:
        assert not os.get_inheritable(got)
        assert os.pread(got, 5, 0) == b"hello"
        os.close(got)
    os.close(fd)


# ------------------------------------------------------------------ connections


def test_a_call_returns_its_own_reply_and_skips_events(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client = Connection(pair[0])
    for frame in (Event("noise"), Reply(77), Reply(1, msgspec.Raw(b"5"))):
        send_once(pair[1], encode_frame(frame))
    assert client.call("ask", timeout_s=1) == (msgspec.Raw(b"5"), [])


def test_an_error_reply_raises_and_its_descriptors_are_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client = Connection(pair[0])
    before = open_fds()
    reply = Reply(1, error=ErrorBody("some_code", "no", "try later"), fds=1)
    fd = os.memfd_create("x")
    send_once(pair[1], encode_frame(reply), [fd])
    os.close(fd)
    with pytest.raises(RemoteError, match="no; try later") as caught:
        client.call("ask", timeout_s=1)
    assert caught.value.stable_code == "some_code"
    assert open_fds() == before


def test_silence_ends_at_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        Connection(pair[0]).call("ask", timeout_s=0.05)
    assert time.monotonic() - started < 2


def test_endless_events_do_not_move_the_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    stop = threading.Event()

    def chatter() -> None:
        data = encode_frame(Event("again"))
        while not stop.is_set():
            try:
                pair[1].send(data)
            except OSError:
                return

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        with pytest.raises(DeadlineExceededError):
            Connection(pair[0]).call("ask", timeout_s=0.1)
    finally:
        stop.set()
        pair[0].close()
        thread.join(10)


def test_a_peer_that_vanishes_in_the_middle_of_a_frame_is_a_closed_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client = Connection(pair[0])
    pair[1].send(encode_frame(Reply(1))[:7])
    pair[1].close()
    with pytest.raises(ConnectionClosedError):
        client.call("ask", timeout_s=1)


def test_a_peer_that_takes_nothing_is_a_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(DeadlineExceededError):
        Connection(pair[0]).call("ask", "x" * (4 << 20), timeout_s=0.05)


def test_drain_returns_what_has_come_and_tells_the_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client = Connection(pair[0])
    assert client.drain() == []
    send_once(pair[1], encode_frame(Event("a")) + encode_frame(Event("b"))[:6])
    assert [event.name for event in client.drain()] == ["a"]
    pair[1].close()
    with pytest.raises(ConnectionClosedError):
        client.drain()


# --------------------------------------------------------------------- sockets


def test_a_path_over_the_kernel_s_limit_works(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    path = folder / "s.sock"
    server = listen_unix(path)
    client = connect_unix(path, timeout_s=1)
    accepted, _ = server.accept()
    assert peer_identity(accepted) == (os.getpid(), os.getuid())
    assert path.stat().st_mode & 0o777 == 0o600
    for sock in (server, client, accepted):
        sock.close()


def test_a_stale_socket_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = listen_unix(path)
    first.close()  # died without unlinking
    with pytest.raises(ConnectionRefusedError):
        connect_unix(path, timeout_s=1)
    second = listen_unix(path)
    connect_unix(path, timeout_s=1).close()
    second.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.sock"]


def test_nothing_is_left_when_a_socket_cannot_be_bound(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(FileNotFoundError):
        listen_unix(tmp_path / "nowhere" / "s.sock")
    assert open_fds() == before
