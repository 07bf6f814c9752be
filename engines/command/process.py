"""The server's process: started at a fresh address, reaped, ended.

Invariants
    1. The server dies with the adapter (PR_SET_PDEATHSIG), and the adapter with the server (see
       `main`): a fence that kills one has both, and its scan of the tree has the rest.
    2. A port is free when it is chosen. Who listens there afterwards must be the server: a
       stranger's answers are never used, and the server is started again at another port.
    3. Nobody but `reap` waits for children: `Popen` forgets the server at once.

WARNING: `preexec_fn` is only safe because this process has one thread when it starts a server.
"""

import asyncio
import ctypes
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engines.command.errors import ServerEndedError, ServerNotReadyError, StrangerListensError
from engines.command.processes import ServerTree

__all__ = ["Address", "ServerProcess", "become_subreaper", "how_it_ended", "use_all_descriptors"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PLACEHOLDER: Final = re.compile(r"(?<!\{)\{(port|socket)\}")
"""`{{port}}` belongs to a template, as `check` sees it too."""

_SUN_PATH_BYTES: Final = 107
_PORTS: Final = 5  # tried before the start fails
_LOOK_S: Final = 0.05
_PATIENCE_S: Final = 15.0
"""Large models take minutes until their server listens, and wrong commands take for ever."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make descendants that lose their parent ours, so that none leaves the tree."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is told to listen."""

    port: int
    socket: Path  # for a command that has `{socket}`
    is_unix: bool

    def fill(self, command: Sequence[str]) -> list[str]:
        """The command with its placeholders filled; other braces stay as they are."""
        values = {"port": str(self.port), "socket": str(self.socket)}
        return [_PLACEHOLDER.sub(lambda m: values[m[1]], word) for word in command]


def how_it_ended(exit_status: int) -> str:
    """`was ended by SIGSEGV`, or `left with status 1`."""
    if exit_status >= 0:
        return f"left with status {exit_status}"
    try:
        return f"was ended by {signal.Signals(-exit_status).name}"
    except ValueError:  # a realtime signal
        return f"was ended by signal {-exit_status}"


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServerProcess:
    """One server, from its start to its end. Used by the event loop of the main thread only."""

    def __init__(
        self,
        command: Sequence[str],
        socket_path: Path,
        *,
        python_path: str | None,
        descriptors: tuple[int, int] | None = None,
        on_delay: Callable[[str], None] = lambda _text: None,
        choose_port: Callable[[], int] = free_port,
    ) -> None:
        self._command = list(command)
        self._socket_path = _short(socket_path)
        self._is_unix = any("socket" in _PLACEHOLDER.findall(word) for word in command)
        self._python_path = python_path
        self._descriptors = descriptors
        self._on_delay = on_delay
        self._choose_port = choose_port
        self._pid = 0
        self.address = Address(0, self._socket_path, self._is_unix)
        self.tree = ServerTree(os.getpid())
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def text(self) -> str:
        """The command as a person would type it."""
        return shlex.join(self._command)

    async def start(self, *, deadline_s: float) -> None:
        """Start it and wait until it listens.

        Raises:
            ServerEndedError, ServerNotReadyError, StrangerListensError: it does not.
        """
        for _ in range(_PORTS):
            self._spawn()
            if await self._listens(deadline_s=deadline_s):
                return
            await self.end(grace_s=0.0)
        raise StrangerListensError(self.address.port)

    def _spawn(self) -> None:
        port = 0 if self._is_unix else self._choose_port()
        self.address = Address(port, self._socket_path, self._is_unix)
        self.ended = asyncio.get_running_loop().create_future()
        self._pid = 0  # a start that fails leaves none, and the last one's may be another's by now
        parent, descriptors = os.getpid(), self._descriptors

        def die_with_the_adapter() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)

        argv = self.address.fill(self._command)
        try:
            child = subprocess.Popen(
                argv,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                close_fds=True,
                preexec_fn=die_with_the_adapter,  # noqa: PLW1509 - see the warning above
            )
        except (OSError, ValueError) as error:  # a NUL among the arguments is a ValueError
            raise ServerEndedError(f"cannot be started: {error}", command=self.text) from error
        child.returncode = 0  # see invariant 3
        self._pid = child.pid

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        env.pop("PYTHONPATH", None)
        if self._python_path is not None:
            env["PYTHONPATH"] = self._python_path
        return env

    async def _listens(self, *, deadline_s: float) -> bool:
        """Wait for its socket; False when somebody else has taken the port."""
        told_s = time.monotonic() + _PATIENCE_S
        while True:
            is_ours = self._is_listening()
            if is_ours is not None:
                return is_ours
            if self.ended.done():
                status = self.ended.result()
                how = how_it_ended(status) + (
                    ": it must stay in the foreground" if not status else ""
                )
                raise ServerEndedError(how, command=self.text)
            if time.monotonic() > deadline_s:
                raise ServerNotReadyError(
                    self._silence(), hint="does its command say so? it was started as: " + self.text
                )
            if time.monotonic() > told_s:
                told_s = deadline_s
                self._on_delay(self._silence())
            await asyncio.wait([self.ended], timeout=_LOOK_S)

    def _silence(self) -> str:
        text = f"the server does not listen on {self.where}"
        if others := self.tree.ports():
            text += f", but on {', '.join(map(str, others))}: does it get its address from us?"
        return text

    @property
    def where(self) -> str:
        """Its address, for people."""
        return str(self.address.socket) if self._is_unix else f"port {self.address.port}"

    def _is_listening(self) -> bool | None:
        if self._is_unix:  # in a directory of ours: no stranger can be there
            return True if self._socket_path.is_socket() else None
        return self.tree.owns_listeners(self.address.port)

    def listens(self) -> bool | None:
        """Whether the server listens; None: nobody does, False: somebody else.

        Raises:
            OSError: we could not look.
        """
        if self._is_unix:
            return True if _accepts(self._socket_path) else None
        return self._is_listening()

    def reap(self) -> None:
        """Bury every child that has ended; the server's end is known from here."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid and not self.ended.done():
                self.ended.set_result(os.waitstatus_to_exitcode(status))

    async def end(self, *, grace_s: float) -> None:
        """Ask it to leave, then kill whatever of the tree is left."""
        if grace_s > 0 and not self.ended.done() and self._pid:
            os.kill(self._pid, signal.SIGTERM)  # our own child, and nobody has reaped it
            await asyncio.wait([self.ended], timeout=grace_s)
        self.tree.kill_all()
        if self._pid:
            await asyncio.wait([self.ended], timeout=1.0)
        self._socket_path.unlink(missing_ok=True)


def use_all_descriptors() -> tuple[int, int]:
    """Two per request, and the soft limit is low. Returns the limits before: the server's own."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


def _short(path: Path) -> Path:
    """A name of the same file that fits an address, also for the server, while we live."""
    if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
        return path
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return Path(f"/proc/{os.getpid()}/fd/{directory}/{path.name}")
