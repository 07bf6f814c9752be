"""A cache daemon as a real process, and what tests want to know about it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from cache.client import AttachedWeights, OnMismatch, attach
from cache.errors import ConnectionClosedError
from cache.protocol import PROTOCOL, VERSION, CacheStatus, Load, LoadSpec
from cache.rpc import Hello
from cache.wire import Connection, close_all

__all__ = ["DaemonProcess", "open_fds", "wait_until"]

ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 10.0) -> None:
    """Look until it holds; every wait of these tests has this deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for: {what}"
        time.sleep(0.002)


def open_fds(pid: int | str = "self") -> int:
    """Number of descriptors that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class DaemonProcess:
    """`python -m cache.daemon`, started and, at the end, stopped in order or killed."""

    def __init__(self, socket: Path, *arguments: str, instance: str = "cache-test-1") -> None:
        self.socket = socket
        self.log = socket.with_name(f"{instance}.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cache.daemon", "--socket", str(socket)),
                    *("--instance", instance, *arguments),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid
        wait_until(self._is_ours, "the daemon listens")
        self.control = self.connect("test-control", "supervisor")
        self._own_sockets = self._sockets()

    def _is_ours(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            connection = Connection.open(self.socket, timeout_s=2)
            raw, _ = connection.call(
                "hello", Hello(PROTOCOL, VERSION, role="supervisor"), timeout_s=2
            )
            connection.close()
        except (OSError, ConnectionClosedError):
            return False
        return bool(msgspec.json.decode(raw)["pid"] == self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.control.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                assert self.process.wait(10) == 0, self.log.read_text()
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(10)

    def connect(self, instance: str, role: str = "none", epoch: int = 0) -> Connection:
        """A raw connection that has said hello."""
        connection = Connection.open(self.socket, timeout_s=10)
        connection.call("hello", Hello(PROTOCOL, VERSION, instance, epoch, role), timeout_s=10)
        return connection

    def status(self) -> CacheStatus:
        """Asked anew."""
        raw, fds = self.control.call("status", timeout_s=10)
        close_all(fds)
        return msgspec.json.decode(raw, type=CacheStatus)

    def load(self, spec: LoadSpec) -> CacheStatus:
        """Start a load."""
        raw, _ = self.control.call("load", Load(spec), timeout_s=10)
        return msgspec.json.decode(raw, type=CacheStatus)

    def wait_state(self, state: str, *, timeout_s: float = 30.0) -> CacheStatus:
        """Until the daemon is in `state`."""
        wait_until(lambda: self.status().state == state, f"state {state}", timeout_s=timeout_s)
        return self.status()

    def serve(self, spec: LoadSpec) -> CacheStatus:
        """Load and wait until it is served."""
        self.load(spec)
        return self.wait_state("serving")

    def attach(
        self,
        spec: LoadSpec,
        instance: str = "engine-1",
        *,
        timeout_s: float = 20.0,
        on_mismatch: OnMismatch = "fail",
    ) -> AttachedWeights:
        """As an engine does."""
        return attach(
            self.socket, spec, instance=instance, timeout_s=timeout_s, on_mismatch=on_mismatch
        )

    def _sockets(self) -> int:
        links = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except FileNotFoundError:  # closed while we looked
                continue
        return sum(link.startswith("socket:") for link in links)

    def peers(self) -> int:
        """How many connections it has accepted besides `control`."""
        return self._sockets() - self._own_sockets

    def loader_pid(self) -> int | None:
        """Pid of the loader, while there is one."""
        children: list[str] = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():  # a thread of the daemon starts it
            with contextlib.suppress(FileNotFoundError):
                children += (task / "children").read_text().split()
        return int(children[0]) if children else None

    def _loader_runs(self) -> bool:
        """Past its exec: stopped before that, it would hold the thread that starts it."""
        pid = self.loader_pid()
        return pid is not None and b"cache.loader" in Path(f"/proc/{pid}/cmdline").read_bytes()

    def stop_loader(self) -> int:
        """SIGSTOP the loader of the load that was just started: loading lasts until further."""
        wait_until(self._loader_runs, "the loader started")
        pid = self.loader_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        return pid
