"""One question to a child process, with a bound on everything: time, output, and its end.

`subprocess.run(timeout=...)` kills a late child and then waits for it, and for its end of the
pipe, as long as that takes. A child inside a sick driver does not end when it is killed, and a
grandchild may keep the pipe open: the thread that asked would be gone for ever. Here it is not.

Invariants
    1. `ask_child` returns or raises within `timeout_s` and `END_S`, whatever the child does once
       it runs. That it runs is waited for: a program on a file system that hangs is not started.
    2. No descriptor stays open, also when the child is left behind.
    3. A child that does not end is logged, kept, and buried at a later question; while one lives,
       `alone` refuses to start another of its kind.
"""

import contextlib
import logging
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cache.errors import CacheError, DeadlineExceededError, ProtocolError

__all__ = ["END_S", "ChildLeftError", "Ended", "ask_child"]

log = logging.getLogger(__name__)

END_S: Final = 1.0
"""Between SIGKILL and the end of a process, milliseconds pass unless the kernel holds it."""

_POLL_S: Final = 0.02
_CHUNK_BYTES: Final = 64 << 10

_left: list[tuple[str, "subprocess.Popen[bytes]"]] = []  # what they were for; guarded by _lock
_lock = threading.Lock()


class ChildLeftError(CacheError):
    """A process does not end although it was killed, so no other of its kind is started."""

    code = "child_left"

    def __init__(self, what: str, pid: int) -> None:
        super().__init__(
            f"{what}: pid {pid} was killed and has not ended",
            hint=f"the kernel holds it: see /proc/{pid}/stack and dmesg",
            details={"pid": pid},
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended by itself, and what it had said."""

    returncode: int
    output: bytes


def ask_child(
    argv: Sequence[str],
    *,
    what: str,
    timeout_s: float,
    max_output_bytes: int,
    data: bytes = b"",
    pass_fds: Sequence[int] = (),
    stderr: int | None = None,
    niceness: int = 0,
    stop: threading.Event | None = None,
    alone: bool = False,
) -> Ended | None:
    """Start a child, give it `data`, and wait for its end; None when `stop` was set. Blocking.

    `what` names the work in errors and logs. What the child has written when it ends counts; a
    grandchild that still holds the pipe is not waited for.

    Raises:
        OSError: it cannot be started.
        DeadlineExceededError: it took too long.
        ChildLeftError: an earlier one has not ended, and this one was to be `alone`.
        ProtocolError: it wrote more than `max_output_bytes`.
    """
    left = _bury(what)
    if left and alone:
        raise ChildLeftError(what, left[0])
    deadline = time.monotonic() + timeout_s
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0,
        pass_fds=pass_fds, close_fds=True,
    )  # fmt: skip
    try:
        if niceness:
            with contextlib.suppress(OSError):  # it has ended, or we may not: no reason to fail
                os.setpriority(os.PRIO_PROCESS, child.pid, niceness)
        with _Conversation(child, data, what, max_output_bytes) as talk:
            while not talk.has_ended():
                if stop is not None and stop.is_set():
                    return None
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(what, timeout_s=timeout_s)
            return Ended(child.returncode, bytes(talk.output))
    finally:
        _end(child, what)


class _Conversation:
    """Both pipes of one child, without blocking on either."""

    def __init__(
        self, child: "subprocess.Popen[bytes]", data: bytes, what: str, max_output_bytes: int
    ) -> None:
        assert child.stdin is not None  # noqa: S101 - both are pipes
        assert child.stdout is not None  # noqa: S101
        self.output = bytearray()
        self._child, self._what, self._max_output_bytes = child, what, max_output_bytes
        self._unsent = memoryview(data)
        self._stdin, self._stdout = child.stdin, child.stdout
        self._selector = selectors.DefaultSelector()
        for pipe, event in (
            (self._stdin, selectors.EVENT_WRITE),
            (self._stdout, selectors.EVENT_READ),
        ):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, event)

    def __enter__(self) -> "_Conversation":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._selector.close()

    def has_ended(self) -> bool:
        """Pass on what there is, wait a moment at most; whether the child has ended."""
        has_ended = self._child.poll() is not None  # before the last look at what it wrote
        for key, _ in self._selector.select(0.0 if has_ended else _POLL_S):
            if key.fileobj is self._stdin:
                self._write()
            else:
                self._read()
        return has_ended

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended without reading all: its answer says why
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self._selector.unregister(self._stdout)
                return
            self.output += chunk
            if len(self.output) > self._max_output_bytes:
                raise ProtocolError(f"{self._what}: more than {self._max_output_bytes} bytes came")


def _end(child: "subprocess.Popen[bytes]", what: str) -> None:
    """Kill it, give it a moment to end, and let go of it either way."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    if child.poll() is not None:
        return
    child.kill()
    try:
        child.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        log.error("%s: pid %d does not end when it is killed; it is left behind", what, child.pid)  # noqa: TRY400 - the sentence says it all
        with _lock:
            _left.append((what, child))


def _bury(what: str) -> list[int]:
    """Reap those that have ended meanwhile; the pids of those of this kind that have not."""
    with _lock:
        _left[:] = [(kind, child) for kind, child in _left if child.poll() is None]
        return [child.pid for kind, child in _left if kind == what]
