"""The control connection of a unit to its current instance.

Invariants
    1. Who waits for an answer waits in running time (`Patience`): an answer that came while the
       supervisor itself did not run counts.
    2. Who waits for a socket to appear waits for the death of its process too.
    3. A connection that broke is not open any more: it is made again by the unit's pulse, and says
       nothing about a process that lives.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cache.rpc import Hello
from supervisor.errors import ConnectionClosedError, DeadlineExceededError, ProtocolError
from supervisor.runtime.machine import ControlClient, OnEvent
from supervisor.runtime.services import Services

__all__ = ["ControlLine", "understood"]

_CONNECT_RETRY_S: Final = 0.02
_HELLO_S: Final = 2.0  # servers answer hello within milliseconds once they accept
_FAR_S: Final = 3600.0  # a deadline that another one comes before
_NOT_THERE_YET: Final = (
    FileNotFoundError,
    ConnectionRefusedError,
    ConnectionClosedError,
    DeadlineExceededError,  # of a predecessor that cannot be killed, perhaps
)

T = TypeVar("T")


def understood(raw: msgspec.Raw, answer: type[T], *, of: str) -> T:
    """What somebody sent, as what it should be.

    Raises:
        ProtocolError: it makes no sense; to whoever asked that is as good as no answer.
    """
    try:
        return msgspec.json.decode(raw, type=answer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"what {of} says makes no sense: {error}") from error


class ControlLine:
    """Opened, used and closed again and again; at most one connection at a time."""

    def __init__(self, name: str, services: Services) -> None:
        self._name = name
        self._services = services
        self._client: ControlClient | None = None

    @property
    def is_open(self) -> bool:
        """Whether we are connected; one that the other side has closed is found out at once."""
        return self._client is not None and not self._client.is_closed

    async def open(
        self,
        path: Path,
        hello: Hello,
        *,
        died: "asyncio.Future[None]",
        death: Callable[[], Exception],
        timeout_s: float,
        on_event: OnEvent | None = None,
    ) -> msgspec.Raw:
        """Connect as soon as the socket is there; returns the answer to hello.

        Raises:
            Exception: the one that `death` makes, when the process died first.
            DeadlineExceededError: no socket, or no answer, in time.
        """
        self.close()  # from an attempt that was cut short
        try:
            async with self._services.patience.within(timeout_s):
                while True:
                    try:
                        self._client, raw = await self._services.machine.connect(
                            path, hello, timeout_s=_HELLO_S, on_event=on_event
                        )
                    except _NOT_THERE_YET:
                        await asyncio.wait([died], timeout=_CONNECT_RETRY_S)
                    else:
                        return raw
                    if died.done():
                        raise death()
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self._name} answering", timeout_s=timeout_s) from error

    def close(self) -> None:
        """Close the connection, if there is one; calls in flight fail."""
        if self._client is not None:
            self._client.close()
            self._client = None

    async def call(
        self, verb: str, params: object = None, *, fds: Sequence[int] = (), timeout_s: float
    ) -> tuple[msgspec.Raw, list[int]]:
        """One request; the caller owns the descriptors that come back.

        Raises:
            ConnectionClosedError: not connected, or the process died meanwhile.
            DeadlineExceededError, RemoteError: as the peer behaved.
        """
        client = self._client
        if client is None:
            raise ConnectionClosedError(f"{self._name} is not connected")
        try:
            async with self._services.patience.within(timeout_s):
                return await client.call(verb, params, fds=fds, timeout_s=_FAR_S)
        except ConnectionClosedError:
            if self._client is client:
                self.close()
            raise
        except TimeoutError as error:
            raise DeadlineExceededError(f"the answer to {verb}", timeout_s=timeout_s) from error
