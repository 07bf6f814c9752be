"""The control socket: role and epoch are kept here, nothing of them reaches the server.

Handlers of one connection run one after another, so none of them waits long for the server.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from cache.rpc import Handler, RpcPeer
from engines.contract import (
    Assume,
    Assumed,
    CanaryResult,
    Drained,
    EngineStatus,
    ReleaseGateway,
)
from engines.control import Answer, ControlSocket, decoded
from engines.errors import RoleNotPossibleError

__all__ = ["ControlServer", "EngineHost"]


class EngineHost(Protocol):
    """The adapter, as the control socket needs it."""

    @property
    def progress_fd(self) -> int:
        """The progress page."""

    def status(self) -> EngineStatus:
        """The engine as it sees itself."""

    def assume(self, order: Assume) -> Assumed:
        """Take a role.

        Raises:
            StaleEpochError, RoleNotPossibleError, NotReadyError: it is not taken.
        """

    async def canary(self) -> CanaryResult:
        """The known answer, asked now.

        Raises:
            UnderstudyError: none came in time.
        """

    def drain(self) -> Drained:
        """Take no new request."""

    def request_shutdown(self) -> None:
        """Leave in order."""


class ControlServer(ControlSocket):
    """Verbs of `engines.contract`, one handler each."""

    def __init__(self, path: Path, host: EngineHost) -> None:
        self._host = host
        handlers: dict[str, Handler] = {
            "assume": self._assume,
            "canary": self._canary,
            "progress.open": self._progress,
            "release_gateway": self._release_gateway,
            "descriptors": self._descriptors,
            "cache.rejoin": self._rejoin,
            "drain": self._drain,
            "shutdown": self._shutdown,
        }
        super().__init__(path, host.status, handlers)

    async def _assume(self, _peer: RpcPeer, raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return self._host.assume(decoded(raw, Assume)), ()

    async def _canary(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return await self._host.canary(), ()

    async def _progress(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return None, (self._host.progress_fd,)

    async def _release_gateway(self, _peer: RpcPeer, raw: msgspec.Raw, _fds: list[int]) -> Answer:
        decoded(raw, ReleaseGateway)  # its requests ended with its connections
        return None, ()

    async def _descriptors(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        raise RoleNotPossibleError("a server keeps its own weights: there is nothing to donate")

    async def _rejoin(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return None, ()  # no cache holds anything of ours

    async def _drain(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return self._host.drain(), ()

    async def _shutdown(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        self._host.request_shutdown()
        return None, ()
