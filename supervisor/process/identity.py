"""Who a process is: (pid, start time, boot), and which instance it says it belongs to.

Invariants
    1. A pid alone is never signalled. The kernel hands pids out again; a start time in clock
       ticks since boot, together with the boot id, tells the old owner from the new one.
    2. A signal goes through a pidfd that was open *before* the start time was compared, so
       nothing can take the pid's place between the look and the kill.
    3. Every child carries `UNDERSTUDY_INSTANCE=<state_id>:<instance>` in its environment, and so
       does everything it starts: that finds what escaped by `setsid`, and what a crashed
       supervisor left behind.

WARNING: the marker is a claim of the process itself (same user, so no security boundary). It
adds processes of ours to a kill; it never makes a process of another user one of ours.
"""

import functools
import hashlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NewType

from supervisor.process.errors import ProcessGoneError, ProcessNotReadableError
from supervisor.process.reserve import spare
from supervisor.process.stat import read_stat

__all__ = [
    "MARKER_VARIABLE",
    "MARKER_WIDTH",
    "BootId",
    "Marker",
    "ProcessId",
    "age_s",
    "find_marked",
    "is_same",
    "open_pidfd",
    "own_boot_id",
    "parse_marker",
    "read_marker",
    "read_process_id",
    "signal_process",
    "state_id_of",
]

BootId = NewType("BootId", str)

MARKER_VARIABLE: Final = "UNDERSTUDY_INSTANCE"
MARKER_WIDTH: Final = 96
"""Every value is padded to this, so that the zygote's forks can overwrite theirs in place."""

_MARKER_KEY: Final = MARKER_VARIABLE.encode() + b"="
_ENVIRON_LIMIT_BYTES: Final = 4 << 20  # ARG_MAX leaves 2 MiB to an environment on common systems


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of one boot, fit for `state.json`; never equal to a later owner of the pid."""

    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat: clock ticks after boot
    boot_id: BootId

    def __str__(self) -> str:
        return f"pid {self.pid} (started {self.start_ticks})"


@dataclass(frozen=True, slots=True)
class Marker:
    """The claim of a process: the state directory and the instance that it belongs to.

    An instance names one life of one process (a respawn has a new one), else a fence of the
    old life would take the new one with it.
    """

    state_id: str
    instance: str

    def value(self) -> str:
        """The environment value, padded with spaces on the right."""
        return f"{self.state_id}:{self.instance}".ljust(MARKER_WIDTH)


@functools.cache
def own_boot_id() -> BootId:
    """The random id that the kernel chose for this boot."""
    return BootId(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())


def state_id_of(state_dir: Path) -> str:
    """8 hex digits that stand for a state directory: two supervisors never mix their children."""
    resolved = os.fsencode(state_dir.resolve())
    return hashlib.blake2b(resolved, digest_size=4).hexdigest()


def read_process_id(pid: int) -> ProcessId:
    """The identity of the process that holds `pid` now (also of a zombie).

    Raises:
        ProcessGoneError: nobody holds it.
    """
    stat = read_stat(pid)
    if stat is None:
        raise ProcessGoneError(pid)
    return ProcessId(pid, stat.start_ticks, own_boot_id())


def is_same(process: ProcessId) -> bool:
    """True while the pid still belongs to this very process; a zombie still owns its pid."""
    if process.boot_id != own_boot_id():
        return False
    stat = read_stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks


def age_s(process: ProcessId) -> float:
    """How long ago it was started, to a clock tick. Time that the machine slept counts."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / ticks_per_s


def open_pidfd(process: ProcessId) -> int:
    """A pidfd of exactly this process; the caller closes it.

    Raises:
        ProcessGoneError: the process is gone, or its pid has a new owner.
        ProcessNotReadableError: the system has no descriptor left, or refuses.
    """
    try:
        pidfd = spare(lambda: os.pidfd_open(process.pid))
    except ProcessLookupError:
        raise ProcessGoneError(process) from None
    except OSError as error:
        raise ProcessNotReadableError(process.pid, error) from error
    try:
        same = is_same(process)  # after the open: the pidfd can not change its owner any more
    except BaseException:
        os.close(pidfd)
        raise
    if not same:
        os.close(pidfd)
        raise ProcessGoneError(process)
    return pidfd


def signal_process(process: ProcessId, sig: signal.Signals) -> bool:
    """Signal this very process. False: it is gone, or the pid is another's; nobody was signalled.

    Raises:
        PermissionError: the process belongs to another user.
    """
    try:
        pidfd = open_pidfd(process)
    except ProcessGoneError:
        return False
    try:
        signal.pidfd_send_signal(pidfd, sig)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def parse_marker(environ: bytes) -> Marker | None:
    """The marker in the raw bytes of /proc/P/environ, without its padding."""
    for entry in environ.split(b"\0"):
        if entry.startswith(_MARKER_KEY):
            text = entry[len(_MARKER_KEY) :].decode("utf-8", "backslashreplace")
            state_id, colon, instance = text.rstrip(" ").partition(":")
            return Marker(state_id, instance) if colon and state_id and instance else None
    return None


def read_marker(pid: int) -> Marker | None:
    """The marker that a process carries. None: no marker, gone, a zombie, or not ours to read."""
    try:
        fd = spare(lambda: os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return None
    environ = bytearray()
    try:
        while len(environ) < _ENVIRON_LIMIT_BYTES and (chunk := os.read(fd, 1 << 17)):
            environ += chunk
    except OSError:
        return None  # it ended, or changed its user, while we read
    finally:
        os.close(fd)
    return parse_marker(bytes(environ))


def find_marked(state_id: str) -> list[tuple[ProcessId, str]]:
    """Every live process of this user that carries a marker of this state directory.

    Called at start (what did the last supervisor leave behind?) and by the janitor. Costs some
    30 us for each process of this user, so keep it off the promotion path.
    """
    found: list[tuple[ProcessId, str]] = []
    for name in spare(lambda: os.listdir("/proc")):  # noqa: PTH208 -- names only, thousands
        if not name.isdigit():
            continue
        pid = int(name)
        try:
            before = read_process_id(pid)
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():  # noqa: PTH116 -- see above
                continue
        except (ProcessGoneError, OSError):
            continue
        marker = read_marker(pid)
        if marker is not None and marker.state_id == state_id and is_same(before):
            found.append((before, marker.instance))
    return found
