"""The cache daemon's verbs: who gets which memory, when, and why not.

States and moves (everything runs on the event loop, so a move is never seen half done):

    empty, failed      --load-->                                loading
    loading            --commit-->                              serving
    loading            --abort, death of the loader, time-->    failed
    empty, failed      --donate-->                              serving
    serving            --scrub finds damage, seal refused-->    fenced
    serving, fenced    --load, attach(reload) of another model, nobody attached-->  loading
    any                --drop, nobody attached-->               empty

Invariants
    1. Weights are replaced only while no engine is attached.
    2. A request that waits is woken at every change and looks again; it ends at its deadline.
    3. Operations that own memory (a load, a donation, making KV) belong to the daemon, not to the
       connection that asked: a client that vanishes leaves nothing half owned.
    4. A failed load frees its memory before anyone hears of it; the next `load` finds it free.

WARNING: nothing here may block. Files are read, pages taken and checksums computed in threads.
"""

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from cache.arena import backend_for
from cache.donation import Donation, KvArena, check_geometry, make_kv, take_donation
from cache.errors import (
    ArenaMemoryError,
    CacheBusyError,
    CacheFencedError,
    CacheInUseError,
    CacheNotReadyError,
    DonationRefusedError,
    ProtocolError,
    RemoteError,
    UnderstudyError,
)
from cache.holdings import Holdings, Weights
from cache.loads import Loads
from cache.protocol import (
    PROTOCOL,
    VERSION,
    Abort,
    Attach,
    Attached,
    CacheStatus,
    Commit,
    Donate,
    HelloReply,
    KvGeometry,
    KvOpen,
    KvOpened,
    Load,
    Manifest,
    Progress,
    Scrubbed,
)
from cache.received import are_same_memory, mismatch
from cache.rpc import Handler, RpcPeer, RpcServer
from cache.scrubbing import ScrubStopped, scrub, spot_sample
from cache.wire import close_all

__all__ = ["CacheService"]

log = logging.getLogger(__name__)

P = TypeVar("P")


class _Nothing(msgspec.Struct, frozen=True):
    """Parameters of verbs that have none; unknown fields are ignored."""


_MAX_WAIT_S: Final = 7 * 24 * 3600.0
_EVENT_BACKLOG_BYTES: Final = 64 << 10
"""Engines may be frozen, or never read events: those with a backlog are passed over. Whoever
needs the state for certain asks for `status`."""

_SPOT_CHECK_BYTES: Final = 32 << 20


class CacheService:
    """The daemon without its process: everything behind the socket."""

    def __init__(
        self,
        socket_path: Path,
        *,
        instance: str,
        device: str,
        loader_argv: Sequence[str],
        load_timeout_s: float,
        scrub_rate_bytes_per_s: float,
    ) -> None:
        self.held: Final = Holdings(instance, device, backend_for(device))
        self._scrub_rate = scrub_rate_bytes_per_s
        self._scrubbing: asyncio.Task[Scrubbed] | None = None
        self._stop_threads = threading.Event()
        self._kv_lock = asyncio.Lock()
        self.loads: Final = Loads(
            self.held,
            socket_path=socket_path,
            loader_argv=loader_argv,
            load_timeout_s=load_timeout_s,
            notify_progress=self._notify_progress,
        )
        self._server = RpcServer(
            socket_path, PROTOCOL, VERSION, self.handlers(), on_peer_gone=self._peer_gone
        )
        self.held.on_change = self._notify_state

    async def start(self) -> None:
        """Listen."""
        await self._server.start()

    async def stop(self) -> None:
        """Stop in order: no new clients, no loader, no threads, then the memory."""
        self._stop_threads.set()
        self._server.close()
        await self.held.stop_tasks()
        self.held.release_weights()
        self.held.release_kv()

    def handlers(self) -> dict[str, Handler]:
        """The verbs, as the protocol lists them."""
        loads = self.loads
        return {
            "hello": _verb(_Nothing, self._hello),
            "status": _verb(_Nothing, self._status),
            "load": _verb(Load, loads.load),
            "attach": _verb_with_fds(Attach, self._attach),
            "publish": _verb_with_fds(Manifest, loads.publish),
            "progress": _verb(Progress, loads.progress),
            "commit": _verb(Commit, loads.commit),
            "abort": _verb(Abort, loads.abort),
            "kv.open": _verb_with_fds(KvOpen, self._kv_open),
            "donate": self._donate,
            "scrub": _verb(_Nothing, self._scrub),
            "drop": _verb(_Nothing, self._drop),
        }

    # ------------------------------------------------------------------ looking

    async def _hello(self, peer: RpcPeer, _none: _Nothing) -> HelloReply:
        if peer in self.held.attached:  # a known engine with a new role or epoch
            self.held.changed()
        return HelloReply(self.held.instance, os.getpid(), self.held.state)

    async def _status(self, _peer: RpcPeer, _none: _Nothing) -> CacheStatus:
        return self.held.status()

    # ---------------------------------------------------------------- attaching

    async def _attach(self, peer: RpcPeer, request: Attach) -> tuple[Attached, Sequence[int]]:
        """Wait until the weights are there, then hand them out.

        Raises:
            FingerprintMismatchError, CacheInUseError, CacheFencedError: they never will be.
            RemoteError: the load failed, with the loader's own error.
            CacheNotReadyError: the deadline passed.
        """
        held, loop = self.held, asyncio.get_running_loop()
        until_s = loop.time() + min(max(request.timeout_s, 0.0), _MAX_WAIT_S)
        has_reloaded = False
        while (step := self._next_step(peer, request)) != "serve":
            if step == "reload":
                assert held.weights is not None  # noqa: S101 - reload means: others are here
                if has_reloaded:
                    raise mismatch(held.weights.manifest.fingerprint, request.fingerprint)
                has_reloaded = await self._reload(peer, request)
            elif not await held.wait_change(until_s=until_s):
                raise CacheNotReadyError(
                    f"no weights after {request.timeout_s:g} s: the cache is {held.state}",
                    hint="is a load under way? see the cache's status",
                )
        assert held.weights is not None  # noqa: S101 - serve means: they are here
        if peer not in held.attached:
            held.attached.add(peer)
            held.changed()
        return Attached(held.weights.manifest), held.weights.arena.fds

    def _next_step(self, peer: RpcPeer, request: Attach) -> Literal["serve", "wait", "reload"]:
        held = self.held
        if held.run is not None:
            if request.on_mismatch == "fail" and held.run.fingerprint != request.fingerprint:
                raise mismatch(held.run.fingerprint, request.fingerprint)
            return "wait"
        if held.fence is not None:
            raise RemoteError(held.fence)
        if held.weights is None:
            if held.error is not None:
                raise RemoteError(held.error)
            return "wait"
        if held.weights.manifest.fingerprint == request.fingerprint:
            return "serve"
        if request.on_mismatch == "fail":
            raise mismatch(held.weights.manifest.fingerprint, request.fingerprint)
        if holders := held.holders(besides=peer):
            raise CacheInUseError("the weights cannot be replaced", holders)
        return "reload"

    async def _reload(self, peer: RpcPeer, request: Attach) -> bool:
        """Replace the weights by those of the request; False when things changed meanwhile."""
        wanted = await self.loads.fingerprint(request.spec)
        if wanted != request.fingerprint:
            raise mismatch(wanted, request.fingerprint)
        if self._next_step(peer, request) != "reload":
            return False
        self.held.attached.discard(peer)  # it lets its old weights go with this request
        self.loads.begin(request.spec, wanted)
        return True

    async def _kv_open(self, peer: RpcPeer, request: KvOpen) -> tuple[KvOpened, Sequence[int]]:
        """The KV arena, made when absent.

        Raises:
            SlotTableError: no such geometry.
            CacheNotReadyError: no weights are served; a donation may still bring the KV.
            CacheInUseError: another geometry, and others are attached.
            ArenaMemoryError: no memory for it.
        """
        check_geometry(request.geometry)
        kv = await asyncio.shield(self.held.spawn(self._ensure_kv(peer, request.geometry)))
        opened = KvOpened(kv.geometry, list(kv.arena.extent_bytes), kv.table.total_bytes)
        return opened, kv.fds

    async def _ensure_kv(self, peer: RpcPeer, geometry: KvGeometry) -> KvArena:
        held = self.held
        async with self._kv_lock:
            if held.weights is None:
                raise CacheNotReadyError("no KV without weights: attach first")
            if held.kv is not None:
                if held.kv.geometry == geometry:
                    return held.kv
                if holders := held.holders(besides=peer):
                    raise CacheInUseError("the KV arena cannot be replaced", holders)
                held.release_kv()
            try:
                held.kv = await asyncio.to_thread(make_kv, held.backend, geometry)
            except ArenaMemoryError as error:
                raise held.explained(error) from None
            held.changed()
            return held.kv

    # ----------------------------------------------------------------- donation

    async def _donate(
        self, _peer: RpcPeer, raw: msgspec.Raw, fds: list[int]
    ) -> tuple[CacheStatus, Sequence[int]]:
        """Serve a predecessor's memory again. Idempotent for the memory that is served already.

        Raises:
            DonationRefusedError, SealError: it does not fit, or is damaged.
            CacheBusyError: a load is under way.
        """
        try:
            request = _decode(raw, Donate)
        except ProtocolError:
            close_all(fds)
            raise
        return await asyncio.shield(self.held.spawn(self._adopt(request, fds))), ()

    async def _adopt(self, request: Donate, fds: list[int]) -> CacheStatus:
        held = self.held
        try:
            if self._is_served(request, fds):
                close_all(fds)
                return held.status()
            self._check_room()
        except UnderstudyError:
            close_all(fds)
            raise
        donation = take_donation(held.backend, request, fds)
        try:
            await self._spot_check(donation)
            self._check_room()  # again: it took a moment
        except BaseException:
            donation.close()
            raise
        held.release_weights()
        held.weights = Weights(donation.manifest, donation.spec, donation.weights)
        if donation.kv is not None:
            held.release_kv()
            held.kv = donation.kv
        held.donations += 1
        log.info("took %d donated bytes of weights", donation.weights.total_bytes)
        held.changed()
        return held.status()

    def _is_served(self, request: Donate, fds: list[int]) -> bool:
        weights = self.held.weights
        given = fds[: len(request.manifest.extent_bytes)]
        return weights is not None and are_same_memory(given, weights.arena.fds)

    def _check_room(self) -> None:
        if self.held.run is not None:
            raise CacheBusyError("a load is under way; the donation would be a second copy")
        if self.held.weights is not None:
            raise DonationRefusedError("other memory is served here already")

    async def _spot_check(self, donation: Donation) -> None:
        result = await self._scrub_thread(
            donation.weights.fds,
            donation.manifest,
            sample_bytes=_SPOT_CHECK_BYTES,
            rate_bytes_per_s=float("inf"),
        )
        if result.mismatches:
            raise DonationRefusedError(f"donated weights are damaged: {result.mismatches[0]}")

    # --------------------------------------------------------------- operations

    async def _scrub(self, _peer: RpcPeer, _none: _Nothing) -> Scrubbed:
        """Re-compute every checksum; a mismatch fences the cache. One scrub at a time.

        Raises:
            CacheNotReadyError: no weights, or they were dropped meanwhile.
        """
        if self._scrubbing is None or self._scrubbing.done():
            self._scrubbing = self.held.spawn(self._scrub_all())
        return await asyncio.shield(self._scrubbing)

    async def _scrub_all(self) -> Scrubbed:
        held, weights = self.held, self.held.weights
        if weights is None:
            raise CacheNotReadyError("there are no weights to scrub")
        result = await self._scrub_thread(
            weights.arena.fds, weights.manifest, rate_bytes_per_s=self._scrub_rate
        )
        if result.mismatches and weights is held.weights:
            error = CacheFencedError(result.mismatches)
            log.error("fencing the cache: %s", error)
            held.fence = error.to_body()
            held.changed()
        return result

    async def _scrub_thread(
        self,
        fds: Sequence[int],
        manifest: Manifest,
        *,
        rate_bytes_per_s: float,
        sample_bytes: int | None = None,
    ) -> Scrubbed:
        entries = None if sample_bytes is None else spot_sample(manifest, sample_bytes)
        own = [os.dup(fd) for fd in fds]  # the thread's: ours may be closed while it runs
        work = functools.partial(
            scrub,
            self.held.backend,
            own,
            manifest,
            entries=entries,
            rate_bytes_per_s=rate_bytes_per_s,
            stop=self._stop_threads,
        )
        # A thread of its own: it lowers its priority, which nobody may raise again.
        with ThreadPoolExecutor(1, thread_name_prefix="scrub") as pool:
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, work)
            except ScrubStopped:
                raise CacheNotReadyError("the cache daemon stops") from None

    async def _drop(self, _peer: RpcPeer, _none: _Nothing) -> None:
        """Let everything go, a load in progress too.

        Raises:
            CacheInUseError: engines are attached.
        """
        if holders := self.held.holders():
            raise CacheInUseError("nothing can be dropped", holders)
        await self.loads.cancel()
        await asyncio.sleep(0)  # clients that waited for the load see its error before it is gone
        self.held.release_weights()
        self.held.release_kv()
        self.held.changed()

    # ------------------------------------------------------------------- events

    def _peer_gone(self, peer: RpcPeer) -> None:
        self.loads.peer_gone(peer)
        if peer in self.held.attached:
            self.held.attached.discard(peer)
            self.held.changed()

    def _notify_state(self) -> None:
        self._server.notify_all("state", self.held.status(), max_unsent_bytes=_EVENT_BACKLOG_BYTES)

    def _notify_progress(self, progress: Progress) -> None:
        self._server.notify_all("progress", progress, max_unsent_bytes=_EVENT_BACKLOG_BYTES)


def _decode(raw: msgspec.Raw, kind: type[P]) -> P:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"bad parameters: {error}") from error


def _verb_with_fds(
    kind: type[P], method: Callable[[RpcPeer, P], Awaitable[tuple[object, Sequence[int]]]]
) -> Handler:
    """A handler that decodes parameters of `kind` and takes no descriptors."""

    async def handle(
        peer: RpcPeer, raw: msgspec.Raw, fds: list[int]
    ) -> tuple[object, Sequence[int]]:
        close_all(fds)
        return await method(peer, _decode(raw, kind))

    return handle


def _verb(kind: type[P], method: Callable[[RpcPeer, P], Awaitable[object]]) -> Handler:
    """The same for a verb whose answer brings no descriptors."""

    async def answer(peer: RpcPeer, request: P) -> tuple[object, Sequence[int]]:
        return await method(peer, request), ()

    return _verb_with_fds(kind, answer)
