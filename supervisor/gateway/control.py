"""The supervisor's end of a worker: the verbs of `protocol`, and the events that go back.

The worker does not need its supervisor: it serves with the last table for as long as nobody sends
another. Several connections may be open while one supervisor replaces another; epochs decide.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cache.rpc import RpcPeer, RpcServer
from supervisor.errors import ProtocolError
from supervisor.gateway.protocol import (
    PROTOCOL,
    VERSION,
    FirstToken,
    GatewayStatus,
    Routes,
    RoutesAck,
)

__all__ = ["ControlServer", "Controlled"]

log = logging.getLogger(__name__)

_Answer = tuple[object, Sequence[int]]


class Controlled(Protocol):
    """What the supervisor may do to a worker."""

    def status(self) -> GatewayStatus:
        """The worker as it sees itself."""

    def apply_routes(self, routes: Routes) -> RoutesAck:
        """Put a table in force before returning; returns which one is, and what it cut.

        An older one than what is in force is ignored: then the answer has another sequence.

        Raises:
            StaleEpochError: an epoch went down; nothing was changed.
        """

    def drain(self) -> None:
        """Accept nothing new, finish what runs, then exit; returns at once."""


class ControlServer:
    """Serves the control socket."""

    def __init__(
        self, path: Path, worker: Controlled, *, listener: Callable[[], socket.socket]
    ) -> None:
        self._worker = worker
        self._listener = listener
        self._server = RpcServer(
            path,
            PROTOCOL,
            VERSION,
            {
                "hello": self._status,
                "status": self._status,
                "routes": self._routes,
                "listener": self._hand_out_listener,
                "drain": self._drain,
            },
            max_peers=16,
        )

    async def start(self) -> None:
        """Bind and serve."""
        await self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def send_first_token(self, event: FirstToken) -> None:
        """Tell that a cut stream goes on."""
        self._server.notify_all("first_token", event)

    def send_stats(self) -> None:
        """Tell the counters, if anybody listens."""
        if self._server.peers:
            self._server.notify_all("stats", self._worker.status())

    async def _status(self, _peer: RpcPeer, _raw: msgspec.Raw, fds: list[int]) -> _Answer:
        _refuse_descriptors(fds)
        return self._worker.status(), ()

    async def _routes(self, _peer: RpcPeer, raw: msgspec.Raw, fds: list[int]) -> _Answer:
        _refuse_descriptors(fds)
        try:
            routes = msgspec.json.decode(raw, type=Routes)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"bad routing table: {error}") from error
        ack = self._worker.apply_routes(routes)
        if ack.sequence == routes.sequence:
            log.info(
                "a routing table is in force sequence=%d groups=%d streams_cut=%d",
                ack.sequence, len(routes.groups), ack.streams_cut,
            )  # fmt: skip
        return ack, ()

    async def _hand_out_listener(
        self, _peer: RpcPeer, _raw: msgspec.Raw, fds: list[int]
    ) -> _Answer:
        _refuse_descriptors(fds)
        return None, (self._listener().fileno(),)

    async def _drain(self, _peer: RpcPeer, _raw: msgspec.Raw, fds: list[int]) -> _Answer:
        _refuse_descriptors(fds)
        self._worker.drain()
        return None, ()


def _refuse_descriptors(fds: list[int]) -> None:
    """No verb takes descriptors; a peer that sends some must not fill our table with them."""
    for fd in fds:
        socket.close(fd)
    if fds:
        raise ProtocolError("no verb of this protocol takes descriptors")
