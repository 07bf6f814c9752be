"""Errors of the process layer. Each class says when it is raised."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.errors import PreconditionError, StartFailedError, SupervisorError

if TYPE_CHECKING:
    from supervisor.process.identity import ProcessId

__all__ = [
    "FenceNotProvenError",
    "ProcParseError",
    "ProcessGoneError",
    "ProcessNotReadableError",
    "SpawnError",
]


class ProcParseError(SupervisorError):
    """A file under /proc does not look like proc(5) says: a kernel we do not understand."""

    code = "proc_parse"

    def __init__(self, what: str, data: bytes) -> None:
        super().__init__(
            f"{what} is not in the format of proc(5): {data[:120]!r}",
            hint="report the kernel version (uname -r); nothing was signalled",
        )


class ProcessGoneError(SupervisorError):
    """The process that was asked for has ended, or its pid belongs to somebody else now."""

    code = "process_gone"
    exit_code = 4
    http_status = 410

    def __init__(self, process: "ProcessId | int") -> None:
        named = f"pid {process}" if isinstance(process, int) else str(process)
        super().__init__(f"{named} is gone", hint="start it again, or drop it from the record")
        self.process = process


class ProcessNotReadableError(SupervisorError):
    """The system refuses to show or to hold a process, so nothing can be said about it."""

    code = "process_not_readable"

    def __init__(self, pid: int, cause: OSError) -> None:
        super().__init__(
            f"pid {pid} can not be watched: {cause}",
            hint="run as the user that owns it; check hidepid of /proc and the descriptor limit",
        )
        self.pid = pid
        self.cause_errno = cause.errno


class SpawnError(StartFailedError):
    """The program could not be started at all: no such file, no permission, no memory."""

    code = "spawn_failed"

    def __init__(self, argv: Sequence[str], log_path: Path, cause: OSError) -> None:
        super().__init__(
            f"could not start {argv[0] if argv else '(nothing)'!r}: {cause}",
            hint=f"check the command, and that {log_path} can be written",
        )


class FenceNotProvenError(PreconditionError):
    """Some thread of the old process tree may still run, so promotion must not go on."""

    code = "fence_not_proven"

    def __init__(
        self, victim: "ProcessId", *, waited_ms: float, alive: Sequence["ProcessId"], threads: int
    ) -> None:
        others = f" in {len(alive)} processes" if len(alive) > 1 else ""
        blocker = alive[0] if alive else victim
        super().__init__(
            f"{victim} has {threads} live threads{others} {waited_ms:.0f} ms after SIGKILL",
            hint=f"see /proc/{blocker.pid}/wchan; 'supervisor fence NAME' says what to do",
            details={"pid": victim.pid, "alive_pids": [p.pid for p in alive], "threads": threads},
        )
        self.victim = victim
        self.alive = tuple(alive)
