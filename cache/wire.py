"""Frames over Unix sockets: length-prefixed JSON, with descriptors beside them.

A frame is a 4-byte big-endian length and that many bytes of JSON. Descriptors travel in the
ancillary data of the frame's first byte (SCM_RIGHTS); the JSON's `fds` says how many belong to
it. Shared by every protocol of the house, so that a bound or a check exists once.

Invariants
    1. A frame longer than `MAX_FRAME_BYTES` is refused before it is read.
    2. Descriptors are close-on-exec from the moment they arrive (MSG_CMSG_CLOEXEC): an engine
       that inherits a foreign extent would keep its memory alive.
    3. Descriptors that nobody claimed are closed when the buffer is closed.
    4. Nothing is ever unpickled.

WARNING: cutting frames (`FrameBuffer`) is pure; `Connection` blocks and is for processes that
may (engine start-up, loader, zygote). The supervisor and the gateway use `cache.rpc`.
"""

import array
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from cache.errors import (
    ConnectionClosedError,
    DeadlineExceededError,
    ErrorBody,
    ProtocolError,
    RemoteError,
)

__all__ = [
    "MAX_FDS_PER_FRAME",
    "MAX_FRAME_BYTES",
    "Connection",
    "Event",
    "Frame",
    "FrameBuffer",
    "Reply",
    "Request",
    "close_all",
    "connect_unix",
    "encode_frame",
    "listen_unix",
    "peer_identity",
    "peer_uid",
    "unix_address",
]

MAX_FRAME_BYTES: Final = 16 << 20
"""Bound of one frame; the manifest of a model with 10,000 tensors is about 2 MiB."""

MAX_FDS_PER_FRAME: Final = 250
"""The kernel's limit is 253 (SCM_MAX_FD)."""

_LENGTH = struct.Struct(">I")
_CHUNK_BYTES: Final = 256 << 10
_SUN_PATH_BYTES: Final = 107


class Request(msgspec.Struct, frozen=True, tag="request", tag_field="type"):
    """One call. `params` is the encoded parameter object of the verb."""

    id: int
    verb: str
    params: msgspec.Raw = msgspec.Raw(b"{}")
    fds: int = 0


class Reply(msgspec.Struct, frozen=True, tag="reply", tag_field="type"):
    """The answer to the request `re`: a result, or an error."""

    re: int
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorBody | None = None
    fds: int = 0


class Event(msgspec.Struct, frozen=True, tag="event", tag_field="type"):
    """Something the peer tells unasked."""

    name: str
    params: msgspec.Raw = msgspec.Raw(b"{}")
    fds: int = 0


Frame = Request | Reply | Event

_decoder: Final = msgspec.json.Decoder(Frame)
_encoder: Final = msgspec.json.Encoder()


def encode_frame(frame: object) -> bytes:
    """Bytes of one frame, length prefix included.

    Raises:
        ProtocolError: when the frame would be longer than `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the bound of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames and keeps the descriptors that came with it.

    Feed it what was received; take `next_body` until it returns None. Not thread-safe.
    """

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self._max = max_frame_bytes

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Append received bytes and descriptors; the descriptors belong to the buffer now.

        Raises:
            ProtocolError: more descriptors wait than any frames in flight can own.
        """
        self._data += data
        self._fds.extend(fds)
        if len(self._fds) > 2 * MAX_FDS_PER_FRAME:
            raise ProtocolError(f"the peer sent {len(self._fds)} descriptors ahead of their frames")

    def next_body(self) -> bytes | None:
        """The next complete frame's JSON, or None when more bytes are needed.

        Raises:
            ProtocolError: the announced length is over the bound.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self._max:
            raise ProtocolError(
                f"the peer announced a frame of {length} bytes, the bound is {self._max}"
            )
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body

    def next_frame(self) -> tuple[Frame, list[int]] | None:
        """The next complete request, reply or event with its descriptors (the caller owns them).

        Raises:
            ProtocolError: rubbish, or other descriptors arrived than announced.
        """
        body = self.next_body()
        if body is None:
            return None
        try:
            frame = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"the peer sent a frame that cannot be understood: {error}"
            ) from error
        fds = self.take_fds(frame.fds)
        if self._fds and not self._data:
            # Nothing follows that they could belong to. Kept, they would be taken for the next
            # frame's, and a peer could fill our descriptor table with them.
            close_all(fds)
            raise ProtocolError("the peer sent descriptors that no frame announced")
        return frame, fds

    def take_fds(self, count: int) -> list[int]:
        """The next `count` descriptors; the caller owns them.

        Raises:
            ProtocolError: fewer arrived than announced.
        """
        if count < 0 or count > len(self._fds):
            raise ProtocolError(f"{count} descriptors announced, {len(self._fds)} arrived")
        return [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close descriptors that nobody claimed."""
        while self._fds:
            os.close(self._fds.popleft())


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a frame which is not wanted."""
    for fd in fds:
        os.close(fd)


def receive_once(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One recvmsg: bytes (empty at end of file) and the descriptors that came with them."""
    space = socket.CMSG_SPACE(253 * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(_CHUNK_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        raise ProtocolError(
            "descriptors were cut off on the way; the descriptor limit may be reached"
        )
    return data, list(fds)


def send_once(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
    """One sendmsg; returns how many bytes the kernel took (descriptors go with the first)."""
    if len(fds) > MAX_FDS_PER_FRAME:
        raise ProtocolError(
            f"{len(fds)} descriptors in one frame, the bound is {MAX_FDS_PER_FRAME}"
        )
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


@contextmanager
def unix_address(path: Path) -> Iterator[str]:
    """An address for bind() or connect() that also works for paths over 107 bytes.

    A long path goes through `/proc/self/fd/<dirfd>/name`; valid only inside the block.
    """
    if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen_unix(path: Path, *, backlog: int = 64) -> socket.socket:
    """A listening socket at `path`, mode 0600, replacing a stale one in one step.

    It is bound under a temporary name and renamed, so nobody finds a half-made socket.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = path.with_name(f".{os.getpid():x}-{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        with unix_address(temporary) as address:
            sock.bind(address)
        temporary.chmod(0o600)
        sock.listen(backlog)
        temporary.rename(path)
    except BaseException:
        sock.close()
        temporary.unlink(missing_ok=True)
        raise
    return sock


def connect_unix(path: Path, *, timeout_s: float) -> socket.socket:
    """A connected blocking socket with its timeout set to `timeout_s`.

    Raises:
        OSError: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_s)
    try:
        with unix_address(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def peer_identity(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that connected, as the kernel recorded them (SO_PEERCRED)."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)


def peer_uid(sock: socket.socket) -> int:
    """The uid of the process at the other end."""
    return peer_identity(sock)[1]


class Connection:
    """A blocking request/reply client with a deadline on every wait. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        self._next_id = 0

    @classmethod
    def open(cls, path: Path, *, timeout_s: float = 5.0) -> Self:
        """Connect to `path`."""
        return cls(connect_unix(path, timeout_s=timeout_s))

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket and unclaimed descriptors; idempotent."""
        self._sock.close()
        self._buffer.close()

    def call(
        self, verb: str, params: object = None, *, fds: Sequence[int] = (), timeout_s: float
    ) -> tuple[Any, list[int]]:
        """Send a request and wait for its reply; returns the raw result and descriptors.

        Raises:
            RemoteError: the peer answered with an error.
            DeadlineExceededError: no reply in time; the connection is unusable afterwards.
            ConnectionClosedError: the peer went away.
        """
        self._next_id += 1
        raw = msgspec.Raw(_encoder.encode({} if params is None else params))
        self.send(Request(self._next_id, verb, raw, len(fds)), fds, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            frame, received = self.receive(
                timeout_s=max(0.0, deadline - time.monotonic()), what=verb
            )
            if isinstance(frame, Reply) and frame.re == self._next_id:
                if frame.error is not None:
                    close_all(received)
                    raise RemoteError(frame.error)
                return frame.result, received
            close_all(received)

    def send(self, frame: Frame, fds: Sequence[int] = (), *, timeout_s: float) -> None:
        """Send one frame.

        Raises:
            DeadlineExceededError: the peer did not take it in time.
            ConnectionClosedError: the peer went away.
        """
        data = memoryview(encode_frame(frame))
        deadline = time.monotonic() + timeout_s
        while data:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sent = send_once(self._sock, data, fds)
            except TimeoutError as error:
                raise DeadlineExceededError("sending to the peer", timeout_s=timeout_s) from error
            except OSError as error:
                raise ConnectionClosedError(f"the peer went away: {error.strerror}") from error
            data, fds = data[sent:], ()

    def receive(self, *, timeout_s: float, what: str = "a frame") -> tuple[Frame, list[int]]:
        """The next frame with its descriptors.

        Raises:
            DeadlineExceededError: nothing complete arrived in time.
            ConnectionClosedError: end of file.
            ProtocolError: rubbish.
        """
        deadline = time.monotonic() + timeout_s
        # A peer that writes without pause must not keep us past the deadline: look at the clock
        # before every read, not only when nothing comes.
        while (frame := self._buffer.next_frame()) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(f"the answer to {what}", timeout_s=timeout_s)
            self._sock.settimeout(remaining_s)
            try:
                data, fds = receive_once(self._sock)
            except TimeoutError as error:
                raise DeadlineExceededError(f"the answer to {what}", timeout_s=timeout_s) from error
            except OSError as error:
                raise ConnectionClosedError(f"the peer went away: {error.strerror}") from error
            if not data:
                raise ConnectionClosedError(
                    f"the peer closed the connection while {what} was awaited"
                )
            self._buffer.feed(data, fds)
        return frame

    def drain(self) -> list[Event]:
        """Events that have arrived, without waiting; keeps an idle connection's buffer empty.

        Raises:
            ConnectionClosedError: the peer went away.
            ProtocolError: rubbish.
        """
        events: list[Event] = []
        while True:
            while (cut := self._buffer.next_frame()) is not None:
                close_all(cut[1])
                if isinstance(cut[0], Event):
                    events.append(cut[0])
            self._sock.setblocking(False)
            try:
                data, fds = receive_once(self._sock)
            except BlockingIOError:
                return events
            except OSError as error:
                raise ConnectionClosedError(f"the peer went away: {error.strerror}") from error
            if not data:
                raise ConnectionClosedError("the peer closed the connection")
            self._buffer.feed(data, fds)
