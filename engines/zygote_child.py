"""From a fresh fork of the zygote to an engine: what must change before any engine code runs.

Invariants
    1. The child is a session of its own: the zygote's death or terminal does not reach it, and a
       stopped engine is not hung up when its parent dies.
    2. It holds no descriptor but 0, 1 and 2. An inherited arena, log or socket would keep alive
       what others believe gone.
    3. Python objects of the zygote that own descriptors are disarmed first: collected later, they
       would close numbers that belong to the engine by then.
    4. The marker is overwritten in place, in the block that `/proc/PID/environ` shows; `setenv`
       would put it elsewhere.
"""

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

from cache.errors import UnderstudyError

__all__ = ["MARKER_VARIABLE", "MarkerError", "become_child", "check_marker", "padded_marker"]

MARKER_VARIABLE: Final = "UNDERSTUDY_INSTANCE"

_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_void_p
_libc.getenv.argtypes = (ctypes.c_char_p,)

_COMM_BYTES: Final = 15


class MarkerError(UnderstudyError):
    """The zygote's environment has no room for the marker of a child."""

    code = "marker"

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem, hint=f"start the zygote with {MARKER_VARIABLE} padded with spaces"
        )


def _marker_address() -> tuple[int, int]:
    """Address and length of the marker's value in the original environment."""
    address = _libc.getenv(MARKER_VARIABLE.encode())
    if not address:
        raise MarkerError(f"{MARKER_VARIABLE} is not set")
    return address, len(ctypes.string_at(address))


def padded_marker(marker: str, size_bytes: int) -> bytes:
    """The marker, filled up with spaces to exactly `size_bytes`.

    Raises:
        MarkerError: it is too long, or not plain text.
    """
    value = marker.rstrip().encode()
    if len(value) > size_bytes or b"\0" in value:
        raise MarkerError(f"a marker of {len(value)} bytes does not fit {size_bytes}")
    return value.ljust(size_bytes)


def check_marker(marker: str) -> None:
    """Whether a child could be marked so; asked before forking.

    Raises:
        MarkerError: it could not.
    """
    padded_marker(marker, _marker_address()[1])


def become_child(log_fd: int, marker: str, name: str) -> None:
    """Turn a fork into a process of its own. Called once, first thing in the child."""
    os.setsid()
    _reset_signals()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    _close_all_from(3)
    address, size_bytes = _marker_address()
    value = padded_marker(marker, size_bytes)
    ctypes.memmove(address, value, size_bytes)
    os.environ[MARKER_VARIABLE] = value.decode()  # for children of our own
    with contextlib.suppress(OSError):  # a name for `ps` is a courtesy
        Path("/proc/self/comm").write_bytes(name.encode()[:_COMM_BYTES])


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _close_all_from(first: int) -> None:
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    os.closerange(first, highest + 1)
