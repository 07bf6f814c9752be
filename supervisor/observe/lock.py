"""One supervisor per state directory: an flock, and the name of its holder beside it.

The kernel frees the lock when the holder dies, however it dies; what the file says is only for
people, and for `read_holder`. The descriptor is close-on-exec: a child that kept it would hold
the lock beyond its supervisor.
"""

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from supervisor.errors import AlreadyRunningError, ConfigurationError
from supervisor.observe.files import PRIVATE_FILE_MODE, ensure_private_dir, write_all

__all__ = ["FILE_NAME", "Holder", "StateLock", "read_holder"]

FILE_NAME: Final = "lock"
_NAMING_S: Final = 0.2
"""How long a lock may be held by nobody who has written who it is."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds, or held, the lock."""

    pid: int
    start_ticks: int  # clock ticks after boot: tells the holder from a later owner of its pid
    name: str  # of the topology

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"supervisor '{self.name}', pid {self.pid}" if self.name else f"pid {self.pid}"


class StateLock:
    """The lock of a state directory; a context manager. Blocks for at most 0.2 s."""

    def __init__(self, state_dir: Path, name: str = "") -> None:
        self._state_dir = state_dir
        self._name = name
        self._fd: int | None = None

    def acquire(self) -> Self:
        """Take the lock, making the directory (mode 0700) when it is missing. Idempotent.

        Raises:
            AlreadyRunningError: another process holds it; the message names it.
            ConfigurationError: the directory cannot be used.
        """
        if self._fd is not None:
            return self
        ensure_private_dir(self._state_dir)
        path = self._state_dir / FILE_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, PRIVATE_FILE_MODE)
        except OSError as error:
            raise ConfigurationError(
                f"the lock {path} cannot be opened: {error.strerror}",
                hint="name another state_dir, or make it writable for this user",
            ) from error
        try:
            self._flock(fd)
            self._sign(fd)
        except AlreadyRunningError:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            raise ConfigurationError(
                f"the lock {path} cannot be taken: {error.strerror}"
            ) from error
        self._fd = fd
        return self

    def release(self) -> None:
        """Give the lock back. Idempotent; the file stays, else two could hold "the" lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _sign(self, fd: int) -> None:
        """Say who holds it. A full disk leaves the lock unsigned, and held all the same."""
        holder = Holder(os.getpid(), _start_ticks(os.getpid()) or 0, self._name)
        os.fchmod(fd, PRIVATE_FILE_MODE)
        try:
            os.ftruncate(fd, 0)
            write_all(fd, json.dumps(asdict(holder)).encode() + b"\n")
        except OSError:
            return

    def _flock(self, fd: int) -> None:
        """Take the lock, or learn who has it.

        A lock without a living holder is either being signed at this moment, or is held by a
        child between fork and exec of a supervisor that has just died: both pass.
        """
        deadline = time.monotonic() + _NAMING_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _read(self._state_dir)
                if (holder is not None and holder.is_alive) or time.monotonic() > deadline:
                    raise self._already_running(holder) from None
                time.sleep(0.01)
            else:
                return

    def _already_running(self, holder: Holder | None) -> AlreadyRunningError:
        who = "a process that has not written its name" if holder is None else str(holder)
        return AlreadyRunningError(
            f"the state directory {self._state_dir} is in use by {who}",
            hint="use 'supervisor status' to see it, or 'supervisor stop' to end it",
            details={} if holder is None else asdict(holder),
        )


def read_holder(state_dir: Path) -> Holder | None:
    """The living supervisor of a state directory, or None. Does not touch the lock.

    Called by the command line, to find the one that runs.
    """
    holder = _read(state_dir)
    return holder if holder is not None and holder.is_alive else None


def _read(state_dir: Path) -> Holder | None:
    try:
        found = json.loads((state_dir / FILE_NAME).read_bytes())
        return Holder(int(found["pid"]), int(found["start_ticks"]), str(found["name"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never locked, unsigned, or being signed at this moment


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, counted behind the last `)`; None when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *rest = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(rest[18])
