"""The control socket: answered by the event loop within milliseconds while the model computes.

Orders that concern rows and memory are handed to the model thread and run between two steps; the
answer waits for them. Everything else is read from words that other threads keep up to date.
"""

import asyncio
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from cache.errors import DeadlineExceededError
from cache.rpc import Handler, RpcPeer
from engines.contract import (
    Assume,
    Assumed,
    CanaryResult,
    Descriptors,
    EngineStatus,
    ReleaseGateway,
)
from engines.control import Answer, ControlSocket, decoded
from engines.errors import NotReadyError
from engines.native.commands import AssumeRole, BreakDevice, Pause, RunCanary
from engines.native.commands import ReleaseGateway as ReleaseGatewayCommand
from engines.native.faults import Faults, InjectFault
from engines.native.startup import StartedEngine

__all__ = ["ControlServer", "EngineHost"]

_ASSUME_TIMEOUT_S: Final = 30.0
_CANARY_TIMEOUT_S: Final = 30.0

T = TypeVar("T")


class EngineHost(Protocol):
    """The engine process, as the control socket needs it."""

    started: StartedEngine | None
    progress_fd: int
    faults: Faults

    def status(self) -> EngineStatus:
        """The engine as it sees itself; cheap."""

    def role_taken(self, assumed: Assumed) -> None:
        """The model thread has taken a role."""

    def rejoin_cache(self) -> None:
        """The cache daemon was restarted."""

    def descriptors(self) -> tuple[Descriptors, list[int]]:
        """What a donation needs."""

    def tear_streams(self) -> None:
        """A fault on order: end every stream's connection in the middle of a frame."""

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
            "shutdown": self._shutdown,
        }
        if host.faults.is_enabled:
            handlers["fault"] = self._fault
        super().__init__(path, host.status, handlers)

    def _started(self) -> StartedEngine:
        if self._host.started is None:
            raise NotReadyError("the engine is still starting")
        return self._host.started

    async def _assume(self, _peer: RpcPeer, raw: msgspec.Raw, _fds: list[int]) -> Answer:
        assume = decoded(raw, Assume)
        future: Future[Assumed] = Future()
        self._started().scheduler.post(AssumeRole(assume, future))
        assumed = await _wait(future, what="the role change", timeout_s=_ASSUME_TIMEOUT_S)
        self._host.role_taken(assumed)
        return assumed, ()

    async def _canary(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        future: Future[CanaryResult] = Future()
        self._started().scheduler.post(RunCanary(future))
        result = await _wait(future, what="the canary", timeout_s=_CANARY_TIMEOUT_S)
        return self._host.faults.answer(result), ()

    async def _progress(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        return None, (self._host.progress_fd,)

    async def _release_gateway(self, _peer: RpcPeer, raw: msgspec.Raw, _fds: list[int]) -> Answer:
        gateway = decoded(raw, ReleaseGateway).gateway
        self._started().scheduler.post(ReleaseGatewayCommand(gateway))
        return None, ()

    async def _descriptors(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        self._started()
        return self._host.descriptors()

    async def _rejoin(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        self._started()
        self._host.rejoin_cache()
        return None, ()

    async def _fault(self, _peer: RpcPeer, raw: msgspec.Raw, _fds: list[int]) -> Answer:
        order = decoded(raw, InjectFault)
        pause_s = self._host.faults.inject(order)
        match order.action:
            case "device_error" | "device_write" | "device_memory" as action:
                self._started().scheduler.post(BreakDevice(action))
            case "tear_streams":
                self._host.tear_streams()
        if pause_s:
            self._started().scheduler.post(Pause(pause_s))
        return None, ()

    async def _shutdown(self, _peer: RpcPeer, _raw: msgspec.Raw, _fds: list[int]) -> Answer:
        self._host.request_shutdown()
        return None, ()


async def _wait(future: "Future[T]", *, what: str, timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise DeadlineExceededError(what, timeout_s=timeout_s) from error
    except CancelledError as error:
        raise NotReadyError("the engine is stopping") from error
