"""The zygote: imports everything once, then forks engines that are ready in a fraction of a second.

`python -m engines.zygote SPECFILE`. Its socket exists only once everything is imported and the
model skeleton is built. It forks on request, is the parent of what it forked, reaps it and tells
every client; the last 100 records are kept for a client that comes later.

Invariants
    1. Exactly one thread of ours: a fork copies only the calling thread, and a lock that another
       one held would be held for ever. The zygote refuses to listen otherwise. A thread that some
       library has started by itself is named in the log, and must be asleep.
    2. It never computes, maps no arena and holds no descriptor of one. CUDA is not touched: a
       process that has initialised it cannot fork others that use it.
    3. A client that does not read is cut off; it never blocks the others or a fork.
    4. SIGTERM ends the zygote and leaves the children alone.
"""

import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from cache.errors import (
    ErrorBody,
    ProtocolError,
    UnderstudyError,
    VersionMismatchError,
)
from cache.rpc import ACCEPT_PAUSE_S, Hello
from cache.wire import (
    Event,
    FrameBuffer,
    Reply,
    Request,
    encode_frame,
    listen_unix,
    peer_uid,
    receive_once,
)
from engines.contract import (
    ZYGOTE_PROTOCOL,
    ZYGOTE_VERSION,
    ChildRecord,
    Children,
    Fork,
    ZygoteHello,
    ZygoteSpec,
)
from engines.native.threads import check_environment, other_threads, thread_count
from engines.zygote_child import become_child, check_marker
from engines.zygote_gpu import GPU_ENVIRONMENT, opened_gpu_files, warm_gpu_libraries

if TYPE_CHECKING:
    from _typeshed import HasFileno

    from engines.native.skeleton import Skeleton

__all__ = ["Zygote", "main"]

log = logging.getLogger(__name__)

_KEPT_RECORDS: Final = 100
_MAX_UNSENT_BYTES: Final = 1 << 20
_MAX_CLIENTS: Final = 64

_encoder: Final = msgspec.json.Encoder()


class _Client:
    """One connection: frames in, a bounded run of bytes out."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.buffer = FrameBuffer()
        self.unsent = bytearray()
        self.has_said_hello = False

    def push(self) -> None:
        """Send what the kernel takes now.

        Raises:
            OSError: the client is gone.
        """
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            del self.unsent[:sent]


class ThreadsFoundError(UnderstudyError):
    """Something imported started a thread, so forking would not be safe."""

    code = "threads_found"


class DeviceTouchedError(UnderstudyError):
    """Something imported opened the GPU, so no fork could use it."""

    code = "device_touched"


class Zygote:
    """The server loop. One thread, one selector, no asyncio."""

    def __init__(self, spec: ZygoteSpec, skeleton: "Skeleton", *, ready_ms: float) -> None:
        self._spec = spec
        self._skeleton = skeleton
        self._ready_ms = ready_ms
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}
        self._children: dict[int, ChildRecord] = {}  # living ones, by pidfd
        self._reaped: deque[ChildRecord] = deque(maxlen=_KEPT_RECORDS)
        self._listener: socket.socket | None = None
        self._signals: tuple[socket.socket, socket.socket] | None = None

    def serve(self) -> None:
        """Listen, serve, return after SIGTERM."""
        _check_threads()
        if opened := opened_gpu_files():
            raise DeviceTouchedError(f"{', '.join(opened)} opened during the imports")
        self._catch_sigterm()
        path = Path(self._spec.control_socket)
        self._listener = listen_unix(path)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        log.info("zygote ready after %.0f ms", self._ready_ms)
        stop = False
        while not stop:
            for key, events in self._selector.select():
                if key.data is None:
                    stop = True
                elif _is_open(key.fileobj):  # not closed while an earlier one was served
                    key.data(key.fileobj, events)
        path.unlink(missing_ok=True)
        log.info("zygote leaves, %d children stay", len(self._children))

    def _catch_sigterm(self) -> None:
        self._signals = socket.socketpair()
        for end in self._signals:
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals[1].fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        self._selector.register(self._signals[0], selectors.EVENT_READ, None)

    # ------------------------------------------------------------------ clients

    def _accept(self, listener: socket.socket, _events: int) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has left again
        except OSError as error:  # out of descriptors: it cannot fork now either
            log.warning("cannot accept: %s", error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        if peer_uid(sock) != os.getuid() or len(self._clients) >= _MAX_CLIENTS:
            sock.close()
            return
        client = _Client(sock)
        self._clients[sock.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ, self._client_ready)

    def _client_ready(self, sock: socket.socket, events: int) -> None:
        client = self._clients[sock.fileno()]
        try:
            if events & selectors.EVENT_WRITE:
                client.push()
                self._watch(client)
            if events & selectors.EVENT_READ:
                self._read(client)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as error:
            log.info("a client is gone: %s", error)
            self._drop(client)

    def _read(self, client: _Client) -> None:
        data, fds = receive_once(client.sock)
        client.buffer.feed(data, fds)
        if not data:
            self._drop(client)
            return
        while client.sock.fileno() >= 0 and (cut := client.buffer.next_frame()) is not None:
            frame, frame_fds = cut
            try:
                if not isinstance(frame, Request):
                    raise ProtocolError("a client may only send requests")
                self._answer(client, frame, frame_fds)
            finally:
                for fd in frame_fds:
                    os.close(fd)

    def _answer(self, client: _Client, request: Request, fds: Sequence[int]) -> None:
        try:
            result = self._perform(client, request, fds)
            reply = Reply(request.id, msgspec.Raw(_encoder.encode(result)))
        except UnderstudyError as error:
            reply = Reply(request.id, error=error.to_body())
        except (OSError, msgspec.MsgspecError) as error:
            body = ErrorBody("fork_failed", f"{request.verb} failed: {error}")
            reply = Reply(request.id, error=body)
        self._send(client, encode_frame(reply))
        if not client.has_said_hello:
            self._drop(client)

    def _send(self, client: _Client, data: bytes) -> None:
        """Send or queue; a client that does not read is dropped at the bound."""
        client.unsent += data
        try:
            client.push()
        except OSError:
            self._drop(client)
            return
        if len(client.unsent) > _MAX_UNSENT_BYTES:
            log.warning("a client does not read; cutting it off")
            self._drop(client)
            return
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.sock, wanted, self._client_ready)

    def _drop(self, client: _Client) -> None:
        if client.sock.fileno() >= 0:
            self._selector.unregister(client.sock)
            del self._clients[client.sock.fileno()]
            client.sock.close()
            client.buffer.close()

    # -------------------------------------------------------------------- verbs

    def _perform(self, client: _Client, request: Request, fds: Sequence[int]) -> object:
        if request.verb == "hello":
            _check_hello(request.params)
            client.has_said_hello = True
            return ZygoteHello(self._spec.instance, os.getpid(), thread_count(), self._ready_ms)
        if not client.has_said_hello:
            raise ProtocolError(f"{request.verb} before hello")
        if request.verb == "fork":
            return self._fork(msgspec.json.decode(request.params, type=Fork), fds)
        if request.verb == "children":
            return Children([*self._children.values(), *self._reaped])
        raise ProtocolError(f"{ZYGOTE_PROTOCOL} has no verb {request.verb!r}")

    def _fork(self, order: Fork, fds: Sequence[int]) -> ChildRecord:
        if len(fds) != 1:
            raise ProtocolError(f"fork comes with one descriptor, the log, not {len(fds)}")
        if order.spec.load != self._spec.load:
            raise ProtocolError("the engine wants another model than this zygote holds")
        check_marker(order.marker)
        pid = os.fork()
        if pid == 0:
            self._child(order, fds[0])
        pidfd = os.pidfd_open(pid)
        record = ChildRecord(order.spec.instance, pid, _start_ticks(pid))
        self._children[pidfd] = record
        self._selector.register(pidfd, selectors.EVENT_READ, self._child_ended)
        log.info("forked %s as pid %d", order.spec.instance, pid)
        return record

    def _child_ended(self, pidfd: int, _events: int) -> None:
        record = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(record.pid, 0)
        ended = msgspec.structs.replace(record, status=status)
        self._reaped.append(ended)
        log.info("%s, pid %d, ended with wait status %d", record.instance, record.pid, status)
        event = encode_frame(Event("exited", msgspec.Raw(_encoder.encode(ended))))
        for client in list(self._clients.values()):
            if client.has_said_hello:
                self._send(client, event)

    def _child(self, order: Fork, log_fd: int) -> NoReturn:
        """The forked engine. Stays below the zygote's frames, so nothing of it is collected."""
        try:
            # The selector's registrations are shared with the parent: close, never unregister.
            for owner in (*self._owners(), *(c.sock for c in self._clients.values())):
                owner.detach()
            become_child(log_fd, order.marker, order.spec.name)
            from engines.native.main import run

            run(order.spec, self._skeleton)
        except BaseException:
            log.critical("the forked engine could not start", exc_info=True)
            os._exit(1)

    def _owners(self) -> list[socket.socket]:
        owners = [] if self._listener is None else [self._listener]
        return [*owners, *(self._signals or ())]


def _check_threads() -> None:
    """Only this thread, but for what libraries have put to sleep.

    Raises:
        ThreadsFoundError: Python has started threads, or one is at work.
    """
    others = other_threads()
    if threading.active_count() != 1 or not all(others.values()):
        names = ", ".join(others) or "none that the kernel knows"
        raise ThreadsFoundError(f"other threads after the imports: {names}")
    if others:
        log.warning("threads of libraries, asleep: %s", ", ".join(others))
        # Python says so at each fork, which is what has just been looked into.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)


def _is_open(owner: "int | HasFileno") -> bool:
    return isinstance(owner, int) or owner.fileno() >= 0


def _check_hello(raw: msgspec.Raw) -> None:
    hello = msgspec.json.decode(raw, type=Hello)
    if hello.protocol != ZYGOTE_PROTOCOL:
        raise ProtocolError(f"this socket speaks {ZYGOTE_PROTOCOL}, not {hello.protocol}")
    if hello.version != ZYGOTE_VERSION:
        raise VersionMismatchError(ZYGOTE_PROTOCOL, ours=ZYGOTE_VERSION, theirs=hello.version)


def _start_ticks(pid: int) -> int:
    """Field 22 of `/proc/PID/stat`, counted behind the last bracket: a name may hold brackets."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def _prepare(spec: ZygoteSpec) -> "Skeleton":
    """Import and build everything that engines share."""
    import gc

    import torch

    import engines.native.main
    from engines.native.skeleton import build_skeleton

    torch.set_num_threads(1)
    _ = engines.native.main
    skeleton = build_skeleton(spec.load)
    if spec.load.device != "cpu":
        warm_gpu_libraries(spec.load)
    # Everything so far is shared with every child: never let a collection write into those pages.
    gc.collect()
    gc.freeze()
    return skeleton


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m engines.zygote`; returns the exit status."""
    began_s = time.monotonic()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        if len(arguments) != 1:
            raise ProtocolError("usage: python -m engines.zygote SPECFILE")
        check_environment()
        spec: Any = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=ZygoteSpec)
        os.environ.update(GPU_ENVIRONMENT)
        skeleton = _prepare(spec)
        ready_ms = (time.monotonic() - began_s) * 1e3
        Zygote(spec, skeleton, ready_ms=ready_ms).serve()
    except UnderstudyError as error:
        os.write(2, f"error: {error.stable_code}: {error}\n".encode())
        return 1
    except (OSError, msgspec.MsgspecError) as error:
        os.write(2, f"error: bad_spec: {error}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
