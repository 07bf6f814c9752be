"""Errors of the control plane: one tree, each class says when it is raised.

The same object becomes the log line, the CLI exit code and the HTTP problem document.
"""

from cache.errors import (
    ConnectionClosedError,
    DeadlineExceededError,
    ProtocolError,
    RemoteError,
    UnderstudyError,
    VersionMismatchError,
)

__all__ = [
    "AlreadyRunningError",
    "ConfigurationError",
    "ConflictError",
    "ConnectionClosedError",
    "DeadlineExceededError",
    "MachineRefusedError",
    "NotFoundError",
    "NotReachableError",
    "PreconditionError",
    "ProtocolError",
    "RemoteError",
    "StartFailedError",
    "SupervisorError",
    "UnderstudyError",
    "VersionMismatchError",
]


class SupervisorError(UnderstudyError):
    """Base of the control plane's own errors."""

    code = "supervisor"


class ConfigurationError(SupervisorError):
    """The topology is wrong, or something that it names is not there."""

    code = "configuration"
    exit_code = 2
    http_status = 400


class NotReachableError(SupervisorError):
    """No supervisor answers where one should be."""

    code = "not_reachable"
    exit_code = 3
    http_status = 503


class PreconditionError(SupervisorError):
    """The request is understood, but the state of the system does not allow it now."""

    code = "precondition"
    exit_code = 4
    http_status = 412


class ConflictError(SupervisorError):
    """Another operation is under way, or the caller's view of the epoch is old."""

    code = "conflict"
    exit_code = 4
    http_status = 409


class NotFoundError(SupervisorError):
    """The request names something that does not exist."""

    code = "not_found"
    exit_code = 4
    http_status = 404


class AlreadyRunningError(SupervisorError):
    """Another supervisor holds the lock of this state directory."""

    code = "already_running"
    exit_code = 4
    http_status = 409


class StartFailedError(SupervisorError):
    """A process that the topology needs did not come up; everything started was stopped again.

    `cause` is the stable code that the process itself gave for its end, where it gave one.
    """

    code = "start_failed"
    exit_code = 1
    http_status = 500

    def __init__(self, message: str, *, hint: str = "", cause: str = "") -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class MachineRefusedError(StartFailedError):
    """The machine refused a start: no descriptor, no room for a process, a disk that takes nothing.

    It says nothing about the program, so it is tried again for ever.
    """

    code = "machine_refused"

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"the machine refused to start {what}: {why}",
            hint="make room on the disk of state_dir, or raise the limits of descriptors and "
            "processes; it is tried again by itself",
        )
