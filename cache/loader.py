"""The loader: a short-lived process that fills the weight arena and exits.

Started by the cache daemon as `python -m cache.loader --socket PATH --spec JSON`. It plans from
headers, asks the daemon for memory (`publish`), fills it, and says `commit` with a checksum for
each tensor. What goes wrong travels as `abort` with a typed error, which every client that waits
will get.

Invariants
    1. It never outlives its daemon: a connection that breaks ends it at once, also in the middle
       of a read, so that half-filled memory is not kept alive by a process nobody knows.
    2. Quantisation and model are checked before any memory is asked for.
    3. It holds the only writable descriptors; the last seals are set once its exit was seen.
"""

import argparse
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cache.arena import Arena, backend_for
from cache.checkpoint import Checkpoint, read_checkpoint
from cache.errors import ConnectionClosedError, LoadFailedError, ProtocolError, UnderstudyError
from cache.families import tensors_of_family
from cache.filling import HostWriter, fill
from cache.fingerprint import fingerprint_of_checkpoint
from cache.manifest import completed
from cache.plan import LoadPlan, plan_load
from cache.protocol import (
    PROTOCOL,
    VERSION,
    Abort,
    Commit,
    LoadSpec,
    Manifest,
    Progress,
    Published,
)
from cache.rpc import Hello
from cache.wire import Connection, close_all

__all__ = ["EXIT_DAEMON_GONE", "load_into_private_arena", "main", "plan_of"]

log = logging.getLogger("cache.loader")

EXIT_DAEMON_GONE: Final = 3
_CALL_TIMEOUT_S: Final = 60.0


def plan_of(spec: LoadSpec, checkpoint: Checkpoint) -> LoadPlan:
    """The plan for `spec`: everything that can be refused is refused here, before any memory.

    Raises:
        UnsupportedQuantizationError, UnsupportedModelError, MissingTensorError,
        UnexpectedDtypeError: why this checkpoint cannot be loaded as `spec` says.
    """
    fingerprint = fingerprint_of_checkpoint(spec, checkpoint)
    model = tensors_of_family(fingerprint.model_arch, checkpoint.config)
    if model is None:
        from cache.skeleton import tensors_of_skeleton

        model = tensors_of_skeleton(checkpoint.path, fingerprint.model_arch)
    return plan_load(spec, fingerprint, model, checkpoint)


def load_into_private_arena(spec: LoadSpec) -> tuple[Arena, Manifest]:
    """Load into new memory of this process and seal it: mode `off`.

    Raises:
        As `plan_of` and `fill`; nothing is left behind.
    """
    backend = backend_for(spec.device)
    plan = plan_of(spec, read_checkpoint(Path(spec.model_path)))
    arena = backend.create("weights", plan.manifest.total_bytes)
    try:
        checksums = _fill(spec, plan, arena.fds, arena.extent_bytes)
        backend.seal_after_publish(arena)
        backend.seal_after_commit(arena)
    except BaseException:
        arena.close()
        raise
    return arena, completed(plan.manifest, checksums, list(arena.extent_bytes))


def _fill(
    spec: LoadSpec,
    plan: LoadPlan,
    fds: Sequence[int],
    sizes: Sequence[int],
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, str]:
    """Fill the arena by the way that suits its memory; checksums by tensor name."""
    if spec.device == "cpu":
        return fill(plan, HostWriter(fds, sizes), on_progress=on_progress)
    from cache.cudadriver import device_ordinal
    from cache.cudamapping import CudaMapping
    from cache.devicefilling import fill_device

    with CudaMapping(device_ordinal(spec.device), fds, sizes, writable=True) as mapping:
        return fill_device(plan, mapping, on_progress=on_progress)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: committed. 1: aborted with a typed error. 3: the daemon went away."""
    parser = argparse.ArgumentParser(prog="cache.loader", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--spec", required=True, help="LoadSpec as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    spec = msgspec.json.decode(arguments.spec, type=LoadSpec)
    try:
        connection = Connection.open(arguments.socket)
        connection.call(
            "hello",
            Hello(PROTOCOL, VERSION, f"loader-{os.getpid()}", 0, "loader"),
            timeout_s=_CALL_TIMEOUT_S,
        )
    except (OSError, UnderstudyError) as error:
        log.error("no cache daemon at %s: %s", arguments.socket, error)  # noqa: TRY400
        return EXIT_DAEMON_GONE
    threading.Thread(target=_exit_with_daemon, args=(connection.fileno(),), daemon=True).start()
    try:
        _load(connection, spec)
    except ConnectionClosedError as error:
        log.error("%s", error)  # noqa: TRY400
        return EXIT_DAEMON_GONE
    except UnderstudyError as error:
        return _abort(connection, error)
    except Exception as error:
        log.exception("loading failed")
        hint = "see the cache daemon's log"
        return _abort(connection, LoadFailedError(f"the loader failed: {error!r}", hint=hint))
    return 0


def _load(connection: Connection, spec: LoadSpec) -> None:
    started_s = time.monotonic()
    plan = plan_of(spec, read_checkpoint(Path(spec.model_path)))
    raw, fds = connection.call("publish", plan.manifest, timeout_s=_CALL_TIMEOUT_S)
    sizes = msgspec.json.decode(raw, type=Published).extent_bytes
    if len(fds) != len(sizes) or sum(sizes) < plan.manifest.total_bytes:
        raise ProtocolError("the daemon published other memory than was asked for")
    reporter = _Reporter(connection)
    checksums = _fill(spec, plan, fds, sizes, on_progress=reporter.report)
    close_all(fds)
    load_s = time.monotonic() - started_s
    connection.call("commit", Commit(checksums, load_s), timeout_s=_CALL_TIMEOUT_S)
    log.info(
        "loaded %s: %d bytes in %.2f s (%.2f GiB/s)",
        spec.model_path, plan.source_bytes, load_s, plan.source_bytes / load_s / (1 << 30),
    )  # fmt: skip


class _Reporter:
    """Sends progress, at most ten times a second."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last_s = 0.0

    def report(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= 0.1:
            self._last_s = now_s
            self._connection.call("progress", progress, timeout_s=_CALL_TIMEOUT_S)


def _abort(connection: Connection, error: UnderstudyError) -> int:
    log.error("aborting: %s", error)
    try:
        connection.call("abort", Abort(error.to_body()), timeout_s=_CALL_TIMEOUT_S)
    except UnderstudyError as second:  # the daemon will see our exit status instead
        log.error("the daemon did not take the abort: %s", second)  # noqa: TRY400
    return 1


def _exit_with_daemon(fd: int) -> None:
    """Wait for the end of the connection without reading from it, then end this process."""
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(EXIT_DAEMON_GONE)


if __name__ == "__main__":
    sys.exit(main())
