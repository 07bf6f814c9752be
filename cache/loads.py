"""Loads: starting them, the loader's verbs, and what happens when one fails."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cache.arena import Arena
from cache.errors import (
    ArenaMemoryError,
    CacheBusyError,
    CacheInUseError,
    LoadFailedError,
    ProtocolError,
    RemoteError,
    UnderstudyError,
)
from cache.fingerprint import fingerprint_of
from cache.holdings import Holdings, Weights
from cache.loading import LoaderProcess, LoadRun
from cache.manifest import check_checksums, check_manifest, completed
from cache.protocol import (
    Abort,
    CacheStatus,
    Commit,
    Fingerprint,
    Load,
    LoadSpec,
    Manifest,
    Progress,
    Published,
)
from cache.received import mismatch
from cache.rpc import RpcPeer

__all__ = ["Loads"]

log = logging.getLogger(__name__)

_EXIT_GRACE_S: Final = 30.0
"""A loader that has committed has nothing left to do; then it is killed, so we can seal."""

_ABORT_GRACE_S: Final = 2.0


class Loads:
    """The part of the daemon that fills the arena. One load at a time."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        socket_path: Path,
        loader_argv: Sequence[str],
        load_timeout_s: float,
        notify_progress: Callable[[Progress], None],
    ) -> None:
        self._held = holdings
        self._socket_path = socket_path
        self._argv = tuple(loader_argv)
        self._timeout_s = load_timeout_s
        self._notify_progress = notify_progress

    async def load(self, _peer: RpcPeer, request: Load) -> CacheStatus:
        """Verb `load`: start a load unless the same weights are here or on their way.

        Raises:
            CacheBusyError: another model is being loaded.
            CacheInUseError: another model is here and engines are attached to it.
            The errors of `fingerprint_of`: the checkpoint cannot be loaded at all.
        """
        held = self._held
        try:
            wanted = await self.fingerprint(request.spec)
        except UnderstudyError as error:
            if held.state in ("empty", "failed"):  # clients may be waiting for this load
                held.error = error.to_body()
                held.changed()
            raise
        if held.run is not None:
            if held.run.fingerprint != wanted:
                raise CacheBusyError(f"{held.run.spec.model_path} is being loaded")
            return held.status()
        if held.state == "serving" and held.status().fingerprint == wanted:
            return held.status()
        if held.weights is not None and (holders := held.holders()):
            raise CacheInUseError("the weights cannot be replaced", holders)
        self.begin(request.spec, wanted)
        return held.status()

    async def fingerprint(self, spec: LoadSpec) -> Fingerprint:
        """The fingerprint of `spec` as the files are now, computed in a thread."""
        if spec.device != self._held.device:
            raise ProtocolError(f"this daemon serves {self._held.device}, not {spec.device}")
        return await asyncio.to_thread(fingerprint_of, spec)

    def begin(self, spec: LoadSpec, fingerprint: Fingerprint) -> None:
        """Let the old weights go and start a loader. Nobody may be attached any more."""
        self._held.release_weights()
        run = LoadRun(spec, fingerprint)
        self._held.run = run
        self._held.changed()
        log.info("loading %s", spec.model_path)
        self._held.spawn(self._drive(run))

    async def cancel(self) -> None:
        """End a load in progress and wait until its memory is free."""
        run = self._held.run
        if run is not None:
            run.fail(LoadFailedError("the load was dropped"))
            while self._held.run is run:
                await self._held.wait_change(until_s=asyncio.get_running_loop().time() + 1.0)

    # ------------------------------------------------------- verbs of the loader

    async def publish(self, peer: RpcPeer, manifest: Manifest) -> tuple[Published, Sequence[int]]:
        """Verb `publish`: memory for what the manifest lists.

        Raises:
            ManifestError, FingerprintMismatchError, ArenaMemoryError: the load fails with it.
        """
        run = self._run_of(peer)
        if run.arena is not None:
            raise ProtocolError("this loader has published already")
        try:
            check_manifest(manifest)
            if manifest.fingerprint != run.fingerprint:
                raise mismatch(manifest.fingerprint, run.fingerprint)
            creation = self._held.spawn(self._create(run, manifest))
            arena = await asyncio.shield(creation)
        except UnderstudyError as error:
            run.fail(error)
            raise
        return Published(list(arena.extent_bytes)), arena.fds

    async def _create(self, run: LoadRun, manifest: Manifest) -> Arena:
        """Memory for a run; given back if the run has ended meanwhile."""
        try:
            backend = self._held.backend
            arena = await asyncio.to_thread(backend.create, "weights", manifest.total_bytes)
        except ArenaMemoryError as error:
            raise self._held.explained(error) from None
        if run.committed.done() or run.arena is not None:
            arena.close()
            raise ProtocolError("this load has ended already")
        run.manifest, run.arena = manifest, arena
        return arena

    async def progress(self, peer: RpcPeer, progress: Progress) -> None:
        """Verb `progress`."""
        self._run_of(peer).progress = progress
        self._notify_progress(progress)

    async def commit(self, peer: RpcPeer, request: Commit) -> None:
        """Verb `commit`: check, seal, serve.

        Raises:
            ManifestError, SealError: the load fails with it.
        """
        run = self._run_of(peer)
        if run.manifest is None or run.arena is None:
            raise ProtocolError("commit before publish")
        held = self._held
        try:
            check_checksums(run.manifest, request.checksums)
            held.backend.seal_after_publish(run.arena)
        except UnderstudyError as error:
            run.fail(error)
            raise
        manifest = completed(run.manifest, request.checksums, list(run.arena.extent_bytes))
        held.weights = Weights(manifest, run.spec, run.arena)
        held.load_s = request.load_s
        held.loads += 1
        held.run = None
        run.arena = None  # it belongs to the weights now
        run.committed.set_result(None)
        held.changed()

    async def abort(self, peer: RpcPeer, request: Abort) -> None:
        """Verb `abort`: the load failed; every client that waits gets the loader's error."""
        run = self._run_of(peer)
        run.fail(await self._held.explained_remote(RemoteError(request.error)))

    def peer_gone(self, peer: RpcPeer) -> None:
        """A connection ended: if it was the loader's, its load cannot finish."""
        run = self._held.run
        if run is not None and run.process is not None and run.process.pid == peer.pid:
            run.lose_connection()

    def _run_of(self, peer: RpcPeer) -> LoadRun:
        run = self._held.run
        if run is None or run.process is None or run.process.pid != peer.pid:
            raise ProtocolError("only the loader that this daemon has started may do this")
        if run.committed.done():
            raise ProtocolError("this load has ended already")
        return run

    # ------------------------------------------------------------------ the run

    async def _drive(self, run: LoadRun) -> None:
        try:
            run.process = await LoaderProcess.start(self._argv, self._socket_path, run.spec)
            await run.wait_committed(timeout_s=self._timeout_s)
        except UnderstudyError as error:
            await self._give_up(run, error)
        except Exception as error:
            log.exception("the load of %s broke", run.spec.model_path)
            await self._give_up(run, LoadFailedError(f"the cache daemon failed: {error!r}"))
        except asyncio.CancelledError:
            await self._give_up(run, LoadFailedError("the cache daemon stops"))
            raise
        else:
            await self._seal(run)

    async def _give_up(self, run: LoadRun, error: UnderstudyError) -> None:
        """Free the memory first, then tell: whoever hears of the failure may load again."""
        log.error("loading %s failed: %s", run.spec.model_path, error)
        if run.process is not None:
            grace_s = _ABORT_GRACE_S if isinstance(error, RemoteError) else 0.0
            if not await run.process.ensure_gone(grace_s=grace_s):
                log.error("the loader (pid %d) does not die; its memory stays", run.process.pid)
        if run.arena is not None:
            run.arena.close()
        self._held.run = None
        self._held.error = error.to_body()
        self._held.changed()

    async def _seal(self, run: LoadRun) -> None:
        """Set the last seals once the loader's exit was seen."""
        held, weights = self._held, self._held.weights
        assert run.process is not None  # noqa: S101 - it has committed
        try:
            await run.process.ensure_gone(grace_s=_EXIT_GRACE_S)
        except asyncio.CancelledError:  # the daemon stops: leave no child behind
            await run.process.ensure_gone(grace_s=0.0)
            raise
        if weights is None or weights is not held.weights:
            return  # dropped meanwhile
        try:
            held.backend.seal_after_commit(weights.arena)
        except UnderstudyError as error:
            log.error("fencing the cache: %s", error)  # noqa: TRY400
            held.fence = error.to_body()
            held.changed()
