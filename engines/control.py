"""What the control socket of every engine has in common; verbs are in `engines.contract`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from cache.errors import ProtocolError
from cache.rpc import Handler, RpcPeer, RpcServer
from engines.contract import CONTROL_PROTOCOL, CONTROL_VERSION, EngineStatus

__all__ = ["Answer", "ControlSocket", "decoded"]

T = TypeVar("T")
Answer = tuple[object, Sequence[int]]


class ControlSocket:
    """Answers `hello` and `status` itself, the other verbs by the handlers it is given."""

    def __init__(
        self, path: Path, status: Callable[[], EngineStatus], handlers: Mapping[str, Handler]
    ) -> None:
        self._status = status
        own: dict[str, Handler] = {"hello": self._answer_status, "status": self._answer_status}
        self._server = RpcServer(path, CONTROL_PROTOCOL, CONTROL_VERSION, {**own, **handlers})

    async def start(self) -> None:
        """Bind and serve."""
        await self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def notify_state(self) -> None:
        """Tell every supervisor that state, role or epoch changed."""
        self._server.notify_all("state", self._status())

    async def _answer_status(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return self._status(), ()


def decoded(raw: msgspec.Raw, wanted: type[T]) -> T:
    """Parameters of a verb.

    Raises:
        ProtocolError: they are not what the contract says.
    """
    try:
        return msgspec.json.decode(raw, type=wanted)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"bad parameters: {error}") from error
