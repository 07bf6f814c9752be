"""What can go wrong with a server that is run as an engine, by what the reader should do."""

from typing import ClassVar

from cache.errors import UnderstudyError

__all__ = [
    "CommandEngineError",
    "NotPossibleError",
    "NotReadyError",
    "ServerEndedError",
    "ServerNotReadyError",
    "ServerUnusableError",
    "StaleOrderError",
    "StrangerListensError",
]


class CommandEngineError(UnderstudyError):
    """Base of the command engine's own errors."""

    code: ClassVar[str] = "command_engine"


class NotReadyError(CommandEngineError):
    """The server is still starting, or has ended."""

    code = "not_ready"


class NotPossibleError(CommandEngineError):
    """An order that only makes sense for an engine whose memory we share."""

    code = "role_not_possible"
    http_status = 412


class StaleOrderError(CommandEngineError):
    """Someone who does not know about a later promotion gives orders."""

    code = "stale_epoch"
    http_status = 409

    def __init__(self, *, ours: int, theirs: int) -> None:
        super().__init__(
            f"epoch {theirs} is older than this engine's epoch {ours}",
            hint="ask the supervisor who is primary",
        )


class ServerEndedError(CommandEngineError):
    """The server's process has ended; what it said itself is above in the same log."""

    code = "server_ended"

    def __init__(self, how: str, *, command: str) -> None:
        super().__init__(
            f"the server {how}", hint=f"its own last words are above; it was started as: {command}"
        )


class ServerNotReadyError(CommandEngineError):
    """The server's process lives, but nothing useful answers in time."""

    code = "server_not_ready"


class ServerUnusableError(CommandEngineError):
    """The server answers, but not as an engine must."""

    code = "server_unusable"


class StrangerListensError(CommandEngineError):
    """Another process listens on the port that was meant for the server."""

    code = "port_taken"

    def __init__(self, port: int) -> None:
        super().__init__(
            f"a process that is not the server's listens on port {port}",
            hint="if the server can listen on a Unix socket, give it {socket} instead of {port}",
        )
