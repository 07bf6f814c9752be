"""One load as the daemon sees it: the loader process and what became of it.

The daemon starts the loader, watches it through a pidfd and reaps it. A load settles exactly
once: by `commit`, by `abort`, by the loader's death, by the loss of its connection or by time.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from cache.errors import LoadFailedError, UnderstudyError
from cache.protocol import Fingerprint, LoadSpec, Manifest, Progress

if TYPE_CHECKING:
    from cache.arena import Arena

__all__ = ["LoadRun", "LoaderProcess"]

log = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 1.0
"""A loader whose connection broke gets this long to show its exit status: it says more."""


class LoaderProcess:
    """A child process, reaped as soon as it ends. `exited` holds its return code."""

    def __init__(self, child: "subprocess.Popen[bytes]", pidfd: int) -> None:
        self._child = child
        self._pidfd = pidfd
        loop = asyncio.get_running_loop()
        self.pid: Final = child.pid
        self.exited: asyncio.Future[int] = loop.create_future()
        loop.add_reader(pidfd, self._ended)

    @classmethod
    async def start(cls, argv: Sequence[str], socket_path: Path, spec: LoadSpec) -> Self:
        """Start it, in a thread.

        Until the child's exec is done the starting thread stands still, for as long as a slow
        disk, or a signal that stops the child that early, may take.

        Raises:
            LoadFailedError: it cannot be started.
        """
        full = [*argv, "--socket", str(socket_path), "--spec", msgspec.json.encode(spec).decode()]
        starting = asyncio.get_running_loop().run_in_executor(None, _start, full)
        try:
            return cls(*await asyncio.shield(starting))
        except asyncio.CancelledError:
            starting.add_done_callback(_discard)
            raise

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set_result(self._child.wait())

    def kill(self) -> None:
        """SIGKILL; harmless once it has ended."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def ensure_gone(self, *, grace_s: float, kill_s: float = 10.0) -> bool:
        """Let it end within `grace_s`, else kill it; whether its end was seen."""
        await asyncio.wait({self.exited}, timeout=grace_s)
        if not self.exited.done():
            self.kill()
            await asyncio.wait({self.exited}, timeout=kill_s)
        return self.exited.done()


class LoadRun:
    """A load in progress. Fields are filled in the order in which it proceeds."""

    def __init__(self, spec: LoadSpec, fingerprint: Fingerprint) -> None:
        loop = asyncio.get_running_loop()
        self.spec: Final = spec
        self.fingerprint: Final = fingerprint
        self.process: LoaderProcess | None = None
        self.manifest: Manifest | None = None
        self.arena: Arena | None = None
        self.progress: Progress | None = None
        self.committed: asyncio.Future[None] = loop.create_future()
        self.connection_lost: asyncio.Future[None] = loop.create_future()

    def fail(self, error: UnderstudyError) -> None:
        """Settle the load with an error; the first settlement counts."""
        if not self.committed.done():
            self.committed.set_exception(error)
            self.committed.exception()  # the load may be given up before anyone awaits it

    def lose_connection(self) -> None:
        """The loader's connection ended."""
        if not self.connection_lost.done():
            self.connection_lost.set_result(None)

    async def wait_committed(self, *, timeout_s: float) -> None:
        """Wait until the load settles.

        Raises:
            UnderstudyError: what `abort` carried, or `LoadFailedError`.
        """
        assert self.process is not None  # noqa: S101 - called once it was started
        exited = self.process.exited
        waits: set[asyncio.Future[Any]] = {self.committed, exited, self.connection_lost}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.connection_lost.done() and not self.committed.done():
            await asyncio.wait({exited}, timeout=_LAST_WORDS_S)
        if self.committed.done():
            self.committed.result()
        elif exited.done():
            raise LoadFailedError(
                f"the loader (pid {self.process.pid}) {_how(exited.result())}",
                hint="see the cache daemon's log and the kernel's (out of memory?)",
                details={"returncode": exited.result()},
            )
        elif self.connection_lost.done():
            raise LoadFailedError("the loader closed its connection before it had finished")
        else:
            raise LoadFailedError(
                f"loading took longer than {timeout_s:g} s",
                hint="raise cache.load_timeout, or look at the disk",
            )


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode} before it had finished"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    return f"was killed by {name} before it had finished"


def _start(argv: list[str]) -> tuple["subprocess.Popen[bytes]", int]:
    try:
        # No session of its own: a kill of the daemon's process group reaches the loader too.
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, close_fds=True)
    except OSError as error:
        raise LoadFailedError(f"the loader cannot be started: {error.strerror}") from error
    try:
        return child, os.pidfd_open(child.pid)
    except OSError as error:
        child.kill()
        child.wait()
        raise LoadFailedError(f"the loader cannot be watched: {error.strerror}") from error


def _discard(starting: "asyncio.Future[tuple[subprocess.Popen[bytes], int]]") -> None:
    """End a loader that came up when nobody wanted it any more."""
    if not starting.cancelled() and starting.exception() is None:
        child, pidfd = starting.result()
        os.close(pidfd)
        child.kill()
        child.wait()
