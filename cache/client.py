"""The cache as an engine sees it: blocking, deadline on every wait, no asyncio.

`attach` waits for weights and keeps the connection: open, it is the engine's registration at the
daemon. The memory does not depend on it: when the daemon dies the engine goes on, and `rejoin`
registers it with the daemon that comes after.

Invariants
    1. A client never loads a copy of its own because the daemon is slow or absent. It waits until
       its deadline and then fails; only mode `off` (`load_private`) loads privately.
    2. Sizes and the manifest are checked against the files before anything is mapped.
    3. On every error path all descriptors are closed.

WARNING: one thread at a time. An engine calls `poll` now and then (or when the connection turns
readable): it reads the daemon's events away and says whether the registration still stands.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from cache.arena import ArenaMapping, backend_for
from cache.errors import (
    CacheNotReadyError,
    ConnectionClosedError,
    ProtocolError,
    UnderstudyError,
)
from cache.fingerprint import fingerprint_of
from cache.protocol import (
    PROTOCOL,
    VERSION,
    Attach,
    Attached,
    KvGeometry,
    KvOpen,
    KvOpened,
    LoadSpec,
    Manifest,
)
from cache.received import are_same_memory, check_attached, check_opened
from cache.rpc import Hello
from cache.wire import Connection, close_all

__all__ = [
    "AttachedWeights",
    "KvMemory",
    "OnMismatch",
    "attach",
    "load_private",
    "open_kv",
]

OnMismatch = Literal["reload", "fail"]

_RETRY_S: Final = 0.02
_GRACE_S: Final = 2.0
"""The daemon answers a wait at its deadline; this long after it the client gives up by itself."""


@dataclass(slots=True)
class KvMemory:
    """The KV arena and slot table of the serving pair; the caller maps them."""

    fds: list[int]
    table_fd: int
    opened: KvOpened

    def close(self) -> None:
        """Close the descriptors; idempotent. Mappings live on."""
        while self.fds:
            os.close(self.fds.pop())
        if self.table_fd >= 0:
            os.close(self.table_fd)
            self.table_fd = -1


@dataclass(slots=True)
class AttachedWeights:
    """The weights, their table of contents, and the registration (None in mode `off`)."""

    manifest: Manifest
    fds: list[int]
    spec: LoadSpec
    connection: Connection | None = None
    socket_path: Path | None = None
    hello: Hello = field(default_factory=lambda: Hello(PROTOCOL, VERSION))

    def map(self) -> ArenaMapping:
        """Map the weights, read-only."""
        return backend_for(self.spec.device).map(self.fds, self.manifest.extent_bytes)

    def poll(self) -> bool:
        """Read pending events away; whether the daemon still knows us. Never waits."""
        if self.connection is None:
            return False
        try:
            self.connection.drain()
        except UnderstudyError:  # the daemon is gone or confused: `rejoin` starts afresh
            self._disconnect()
            return False
        return True

    def announce(self, role: str, epoch: int, *, timeout_s: float = 2.0) -> None:
        """Tell the daemon our new role and epoch. Not on the promotion path: call it after.

        Raises:
            ConnectionClosedError, DeadlineExceededError: the registration is gone; `rejoin`
                carries the new role and epoch.
        """
        self.hello = msgspec.structs.replace(self.hello, role=role, epoch=epoch)
        if self.connection is None:
            raise ConnectionClosedError("not registered at a cache daemon")
        _discard(self.connection.call("hello", self.hello, timeout_s=timeout_s))

    def rejoin(self, *, timeout_s: float) -> bool:
        """Register at the daemon that followed a dead one; keeps mapping and descriptors.

        Returns:
            True if it serves the very memory we map. False if it holds another copy (the first
            was not donated): then ours lives as long as its holders.

        Raises:
            FingerprintMismatchError: it serves other weights.
            CacheNotReadyError: it had none before the deadline.
            ConnectionClosedError: mode `off`, there is no daemon.
        """
        if self.socket_path is None:
            raise ConnectionClosedError("loaded privately: there is no cache daemon to rejoin")
        self._disconnect()
        fingerprint = self.manifest.fingerprint
        connection, _, fds = _attach(
            self.socket_path, Attach(self.spec, fingerprint, timeout_s), self.hello
        )
        try:
            same = are_same_memory(fds, self.fds)
        finally:
            close_all(fds)
        self.connection = connection
        return same

    def open_kv(self, geometry: KvGeometry, *, timeout_s: float) -> KvMemory:
        """The KV of the serving pair; where the daemon dies meanwhile, from the one that follows.

        Raises:
            CacheNotReadyError: none followed before the deadline, or one with another copy of the
                weights: whoever starts now must map that one.
            ConnectionClosedError: mode `off`, there is no daemon.
            RemoteError, ProtocolError: as `open_kv`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            with suppress(ConnectionClosedError):  # it died: so may the next one
                if self.connection is not None:
                    return open_kv(self.connection, geometry, timeout_s=left_s)
            if not self.rejoin(timeout_s=left_s):
                raise CacheNotReadyError(
                    "the cache daemon was followed by one with another copy of the weights",
                    hint="start the engine again",
                )

    def close(self) -> None:
        """End the registration and close the descriptors; mappings live on."""
        self._disconnect()
        while self.fds:
            os.close(self.fds.pop())

    def _disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def attach(
    socket_path: Path | str,
    spec: LoadSpec,
    *,
    instance: str,
    role: str = "none",
    epoch: int = 0,
    timeout_s: float,
    on_mismatch: OnMismatch = "fail",
) -> AttachedWeights:
    """Wait for the weights of `spec` and register as `instance`.

    Waits for the socket to appear, for a restarted daemon, and for a load in progress; all of it
    within `timeout_s`.

    Raises:
        FingerprintMismatchError, CacheInUseError, load errors (as `RemoteError` with the code).
        CacheNotReadyError, DeadlineExceededError: the deadline passed first.
        UnsupportedQuantizationError, CheckpointMissingError, ...: `spec` itself is unusable.
    """
    hello = Hello(PROTOCOL, VERSION, instance, epoch, role)
    request = Attach(spec, fingerprint_of(spec), timeout_s, on_mismatch)
    path = Path(socket_path)
    connection, manifest, fds = _attach(path, request, hello)
    return AttachedWeights(manifest, fds, spec, connection, path, hello)


def open_kv(connection: Connection, geometry: KvGeometry, *, timeout_s: float) -> KvMemory:
    """The KV arena and slot table of the serving pair; created when absent.

    Raises:
        RemoteError: the daemon refused (`cache_in_use`, `out_of_memory`).
        ProtocolError: what came does not fit what was asked.
    """
    raw, fds = connection.call("kv.open", KvOpen(geometry), timeout_s=timeout_s)
    try:
        opened = msgspec.json.decode(raw, type=KvOpened)
        check_opened(opened, fds, geometry)
    except BaseException:
        close_all(fds)
        raise
    return KvMemory(fds[:-1], fds[-1], opened)


def load_private(spec: LoadSpec) -> AttachedWeights:
    """Mode `off`: load into memory of this process, with the loader's own code and seals.

    Raises:
        The loader's errors, directly.
    """
    from cache.loader import load_into_private_arena

    arena, manifest = load_into_private_arena(spec)
    return AttachedWeights(manifest, arena.fds, spec)


def _attach(path: Path, request: Attach, hello: Hello) -> tuple[Connection, Manifest, list[int]]:
    """One attach that survives restarts of the daemon until the deadline."""
    deadline = time.monotonic() + request.timeout_s
    problem = f"nobody listens at {path}"
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise CacheNotReadyError(
                f"no weights after {request.timeout_s:g} s: {problem}",
                hint="look at the cache daemon's log",
            )
        try:
            return _attach_once(path, msgspec.structs.replace(request, timeout_s=left_s), hello)
        except OSError as error:
            problem = f"nobody listens at {path} ({error.strerror or error})"
        except ConnectionClosedError as error:
            problem = f"the daemon went away ({error.message})"
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))


def _attach_once(
    path: Path, request: Attach, hello: Hello
) -> tuple[Connection, Manifest, list[int]]:
    connection = Connection.open(path, timeout_s=request.timeout_s)
    fds: list[int] = []
    try:
        _discard(connection.call("hello", hello, timeout_s=request.timeout_s + _GRACE_S))
        raw, fds = connection.call("attach", request, timeout_s=request.timeout_s + _GRACE_S)
        manifest = msgspec.json.decode(raw, type=Attached).manifest
        check_attached(manifest, fds, request.fingerprint)
    except msgspec.MsgspecError as error:
        close_all(fds)
        connection.close()
        raise ProtocolError(f"the daemon's answer cannot be understood: {error}") from error
    except BaseException:
        close_all(fds)
        connection.close()
        raise
    return connection, manifest, fds


def _discard(answer: tuple[object, list[int]]) -> None:
    close_all(answer[1])
