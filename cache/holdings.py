"""What the daemon holds, and everything derived from it: state, status, who is attached.

The state is never stored: it follows from which fields are set, so the two cannot disagree.
Whoever changes a field calls `changed`, which wakes all waiters and sends one `state` event.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from cache.arena import Arena, ArenaBackend
from cache.cudadriver import OUT_OF_MEMORY
from cache.errors import ArenaMemoryError, RemoteError, UnderstudyError
from cache.gpumemory import describe_use, name_holders
from cache.protocol import CacheState, CacheStatus, Client, LoadSpec, Manifest
from cache.rpc import RpcPeer

if TYPE_CHECKING:
    from cache.donation import KvArena
    from cache.errors import ErrorBody
    from cache.loading import LoadRun

__all__ = ["Holdings", "Weights"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_ENGINES: Final = frozenset({"supervisor", "loader"})
"""Roles whose connection holds nothing back: the supervisor keeps duplicates, and is told."""


@dataclass(slots=True)
class Weights:
    """Published weights: readable by everybody, writable by nobody."""

    manifest: Manifest
    spec: LoadSpec
    arena: Arena


class Holdings:
    """All mutable state of the daemon. Touched on the event loop only."""

    def __init__(self, instance: str, device: str, backend: ArenaBackend) -> None:
        self.instance: Final = instance
        self.device: Final = device
        self.backend: Final = backend
        self.run: LoadRun | None = None
        self.weights: Weights | None = None
        self.kv: KvArena | None = None
        self.fence: ErrorBody | None = None  # why nothing attaches any more
        self.error: ErrorBody | None = None  # why the last load failed
        self.loads = 0
        self.donations = 0
        self.load_s: float | None = None
        self.attached: set[RpcPeer] = set()
        self.on_change: Callable[[], None] = lambda: None
        self._waiters: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._event_due = False

    # ------------------------------------------------------------------- views

    @property
    def state(self) -> CacheState:
        """See `CacheState`."""
        if self.run is not None:
            return "loading"
        if self.fence is not None:
            return "fenced"
        if self.weights is not None:
            return "serving"
        return "failed" if self.error is not None else "empty"

    def engines(self) -> list[Client]:
        """Engines that hold our memory, in order of their names."""
        hellos = [peer.hello for peer in self.attached if peer.hello is not None]
        clients = [
            Client(h.instance, h.role, h.epoch) for h in hellos if h.role not in _NOT_ENGINES
        ]
        return sorted(clients, key=lambda client: client.instance)

    def holders(self, *, besides: RpcPeer | None = None) -> list[str]:
        """Names of the attached engines, one connection left out."""
        own = besides.hello.instance if besides is not None and besides.hello is not None else None
        return [client.instance for client in self.engines() if client.instance != own]

    def status(self) -> CacheStatus:
        """Everything at a glance."""
        run, weights, kv = self.run, self.weights, self.kv
        fingerprint = weights.manifest.fingerprint if weights else None
        return CacheStatus(
            state=self.state,
            instance=self.instance,
            pid=os.getpid(),
            device=self.device,
            weights_bytes=weights.arena.total_bytes if weights else 0,
            kv_bytes=kv.arena.total_bytes if kv else 0,
            loads=self.loads,
            donations=self.donations,
            load_s=self.load_s,
            attached=self.engines(),
            progress=run.progress if run else None,
            fingerprint=run.fingerprint if run else fingerprint,
            kv=kv.geometry if kv else None,
            error=self.fence or self.error,
            device_uuid=self.backend.device_uuid,
        )

    def explained(self, error: ArenaMemoryError) -> ArenaMemoryError:
        """An out-of-memory error that says what we hold ourselves, and which pid is which engine.

        The backend knows what the driver says of a pid; who that is, only our connections tell.
        """
        error.message = name_holders(error.message, self._names())
        return error.with_holdings(
            weights_bytes=self.weights.arena.total_bytes if self.weights else 0,
            kv_bytes=self.kv.arena.total_bytes if self.kv else 0,
            attached=self.holders(),
        )

    async def explained_remote(self, error: RemoteError) -> UnderstudyError:
        """A child's own error; where it found no memory on our card, who holds what."""
        if error.details.get("error") != OUT_OF_MEMORY or not self.backend.device_uuid:
            return error
        use = await asyncio.to_thread(describe_use, self.backend.device_uuid)
        text = name_holders(f"{error.message} ({use.text})", self._names())
        body = msgspec.structs.replace(
            error.body, message=text, details={**error.details, **use.details}
        )
        return RemoteError(body)

    def _names(self) -> dict[int, str]:
        """Whose pids we know: attached engines, the loader, ourselves."""
        names = {peer.pid: peer.hello.instance for peer in self.attached if peer.hello is not None}
        if self.run is not None and self.run.process is not None:
            names[self.run.process.pid] = "the loader"
        return names | {os.getpid(): self.instance}

    # ------------------------------------------------------------------- moves

    def release_weights(self) -> None:
        """Let the weights go; their memory goes with the last holder."""
        if self.weights is not None:
            self.weights.arena.close()
            self.weights = None
        self.fence = None
        self.error = None
        self.load_s = None

    def release_kv(self) -> None:
        """Let KV arena and slot table go."""
        if self.kv is not None:
            self.kv.close()
            self.kv = None

    def changed(self) -> None:
        """Wake every waiter now and tell clients soon, once for all changes of this moment."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if not self._event_due:
            self._event_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._event_due = False
        self.on_change()

    async def wait_change(self, *, until_s: float) -> bool:
        """Wait for the next change; False when loop time `until_s` came first."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout_at(until_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    # ------------------------------------------------------------------- tasks

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something that must finish though the client that asked may vanish."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("an operation ended with an error: %s", error)

    async def stop_tasks(self) -> None:
        """Cancel what is still running and wait until it has let go."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)
