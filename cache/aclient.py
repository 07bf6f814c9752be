"""The cache as the supervisor sees it: asyncio, torch-free.

One `CacheClient` is one connection. The supervisor keeps it open, listens to events, and holds
duplicates of every descriptor, so that memory outlives the daemon and can be donated to the next.

WARNING: held descriptors keep memory alive. When the daemon drops or replaces its weights (event
`state`, another fingerprint or none) they must be closed, or the old copy stays beside the new.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeVar

import msgspec

from cache.errors import ProtocolError
from cache.fingerprint import fingerprint_of
from cache.protocol import (
    PROTOCOL,
    VERSION,
    Attach,
    Attached,
    CacheStatus,
    Donate,
    HelloReply,
    KvGeometry,
    KvOpen,
    KvOpened,
    Load,
    LoadSpec,
    Manifest,
    Progress,
    Scrubbed,
)
from cache.received import check_attached, check_opened
from cache.rpc import Hello, RpcClient
from cache.wire import Event, close_all

__all__ = ["CacheClient", "HeldKv", "HeldWeights"]

R = TypeVar("R")

_GRACE_S: Final = 2.0


@dataclass(slots=True)
class HeldWeights:
    """Duplicates of the weight descriptors; `close` is idempotent."""

    manifest: Manifest
    spec: LoadSpec
    fds: list[int]

    def close(self) -> None:
        """Let the memory go, as far as we are concerned."""
        while self.fds:
            os.close(self.fds.pop())


@dataclass(slots=True)
class HeldKv:
    """Duplicates of the KV descriptors, the slot table last; `close` is idempotent."""

    opened: KvOpened
    fds: list[int]

    @property
    def table_fd(self) -> int:
        """The slot table."""
        return self.fds[-1]

    def close(self) -> None:
        """Let the memory go, as far as we are concerned."""
        while self.fds:
            os.close(self.fds.pop())


class CacheClient:
    """Verbs of `cache.protocol` with deadlines. Calls on one client run one after another."""

    def __init__(self, rpc: RpcClient, path: Path, hello: Hello, reply: HelloReply) -> None:
        self._rpc = rpc
        self._path = path
        self._hello = hello
        self.reply: Final = reply

    @classmethod
    async def connect(
        cls,
        path: Path,
        *,
        instance: str,
        role: str = "supervisor",
        epoch: int = 0,
        timeout_s: float = 5.0,
        on_state: Callable[[CacheStatus], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Self:
        """Connect and say hello.

        Raises:
            OSError: nobody listens at `path`.
            RemoteError, DeadlineExceededError, ConnectionClosedError: it did not take us.
        """

        def on_event(event: Event, fds: list[int]) -> None:
            close_all(fds)
            # An event of a newer daemon that we cannot read is no reason to lose the connection.
            with contextlib.suppress(msgspec.MsgspecError):
                if event.name == "state" and on_state is not None:
                    on_state(msgspec.json.decode(event.params, type=CacheStatus))
                elif event.name == "progress" and on_progress is not None:
                    on_progress(msgspec.json.decode(event.params, type=Progress))

        hello = Hello(PROTOCOL, VERSION, instance, epoch, role)
        rpc, raw = await RpcClient.connect(path, hello, timeout_s=timeout_s, on_event=on_event)
        try:
            return cls(rpc, path, hello, _decode(raw, HelloReply))
        except ProtocolError:
            rpc.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the connection is gone."""
        return self._rpc.is_closed

    async def wait_closed(self) -> None:
        """Return once the daemon has gone away or `close` was called."""
        await asyncio.shield(self._rpc.closed)

    def close(self) -> None:
        """Close the connection; held descriptors stay open."""
        self._rpc.close()

    async def status(self, *, timeout_s: float = 2.0) -> CacheStatus:
        """What the daemon holds."""
        return await self._call("status", None, CacheStatus, timeout_s)

    async def load(self, spec: LoadSpec, *, timeout_s: float = 30.0) -> CacheStatus:
        """Start a load; returns once it is under way. Progress and end come as events."""
        return await self._call("load", Load(spec), CacheStatus, timeout_s)

    async def attach(
        self, spec: LoadSpec, *, timeout_s: float, on_mismatch: Literal["reload", "fail"] = "fail"
    ) -> HeldWeights:
        """Wait for the weights and hold their descriptors. Nothing is mapped."""
        fingerprint = await asyncio.to_thread(fingerprint_of, spec)
        request = Attach(spec, fingerprint, timeout_s, on_mismatch)
        raw, fds = await self._rpc.call("attach", request, timeout_s=timeout_s + _GRACE_S)
        try:
            manifest = _decode(raw, Attached).manifest
            check_attached(manifest, fds, fingerprint)
        except BaseException:
            close_all(fds)
            raise
        return HeldWeights(manifest, spec, fds)

    async def kv_open(self, geometry: KvGeometry, *, timeout_s: float = 30.0) -> HeldKv:
        """Hold the KV arena and slot table; made when absent."""
        raw, fds = await self._rpc.call("kv.open", KvOpen(geometry), timeout_s=timeout_s)
        try:
            opened = _decode(raw, KvOpened)
            check_opened(opened, fds, geometry)
        except BaseException:
            close_all(fds)
            raise
        return HeldKv(opened, fds)

    async def donate(
        self, weights: HeldWeights, kv: HeldKv | None, *, timeout_s: float = 10.0
    ) -> CacheStatus:
        """Hand a restarted daemon what its predecessor held; ours stays ours."""
        request = Donate(weights.manifest, weights.spec, kv.opened if kv is not None else None)
        fds = [*weights.fds, *(kv.fds if kv is not None else [])]
        return await self._call("donate", request, CacheStatus, timeout_s, fds=fds)

    async def scrub(self, *, timeout_s: float) -> Scrubbed:
        """Re-compute every checksum. On a connection of its own: it may take minutes."""
        rpc, _ = await RpcClient.connect(self._path, self._hello, timeout_s=5.0)
        try:
            raw, fds = await rpc.call("scrub", timeout_s=timeout_s)
        finally:
            rpc.close()
        close_all(fds)
        return _decode(raw, Scrubbed)

    async def drop(self, *, timeout_s: float = 15.0) -> None:
        """Make the daemon let everything go; refused while engines are attached."""
        _, fds = await self._rpc.call("drop", timeout_s=timeout_s)
        close_all(fds)

    async def _call(
        self,
        verb: str,
        params: object,
        kind: type[R],
        timeout_s: float,
        *,
        fds: list[int] | None = None,
    ) -> R:
        raw, received = await self._rpc.call(verb, params, fds=fds or (), timeout_s=timeout_s)
        close_all(received)
        return _decode(raw, kind)


def _decode(raw: msgspec.Raw, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the daemon's answer cannot be understood: {error}") from error
