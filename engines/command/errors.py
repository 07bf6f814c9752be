"""What can go wrong with a server that is run as an engine, by what the reader should do."""

from typing import ClassVar

from cache.errors import UnderstudyError

__all__ = [
    "CommandEngineError",
    "ServerEndedError",
    "ServerNotReadyError",
    "ServerUnusableError",
    "StrangerListensError",
]


class CommandEngineError(UnderstudyError):
    """Base of the command engine's own errors."""

    code: ClassVar[str] = "command_engine"


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
