"""`run`: wiring only. Makes the parts, connects them, waits for a reason to stop, stops them."""

import asyncio
import gc
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from cache.descriptors import reserve_descriptors
from supervisor import __version__
from supervisor.admin.server import AdminServer
from supervisor.errors import ConfigurationError
from supervisor.observe.events import EventLog
from supervisor.observe.journal import Journal, JournalState
from supervisor.observe.lock import StateLock
from supervisor.observe.logs import setup_logging
from supervisor.observe.looplag import LoopLag
from supervisor.observe.metrics import Metrics
from supervisor.observe.observer import RunObserver
from supervisor.process import (
    RESERVE,
    ExitWatcher,
    become_subreaper,
    find_marked,
    state_id_of,
)
from supervisor.runtime.controller import RuntimeController
from supervisor.runtime.listening import listen_tcp
from supervisor.runtime.machine import LocalMachine
from supervisor.runtime.paths import StatePaths
from supervisor.runtime.services import Services
from supervisor.runtime.supervisor import SupervisorRuntime
from supervisor.topology.schema import Topology

__all__ = ["run"]

_FLUSH_S: Final = 2.0
_PORT_RETRY_S: Final = 1.0


def run(topology: Topology, path: Path, *, observer: RunObserver) -> int:
    """Be the supervisor of `topology` until stopped; returns the exit code.

    Raises:
        UnderstudyError: it could not start; everything that was started is stopped again.
    """
    setup_logging()
    reserve_descriptors()
    RESERVE.open()
    paths = StatePaths(topology.state_dir.absolute())
    with StateLock(paths.root, topology.name):
        paths.make()
        events, journal = EventLog(paths.root), Journal(paths.root)
        try:
            state = journal.load()
            if journal.note:
                events.append("journal_set_aside", journal.note)
            events.append("supervisor_started", f"{topology.name} from {path}", version=__version__)
            become_subreaper()
            disk = Disk(events, journal, state)
            return uvloop.run(_main(topology, paths, disk, observer))
        finally:
            journal.close(timeout_s=_FLUSH_S)
            events.close(timeout_s=_FLUSH_S)


@dataclass(frozen=True, slots=True)
class Disk:
    """What was opened on disk before the loop runs."""

    events: EventLog
    journal: Journal
    state: JournalState


async def _main(topology: Topology, paths: StatePaths, disk: Disk, observer: RunObserver) -> int:
    events = disk.events
    watcher, lag = ExitWatcher(), LoopLag()
    metrics = Metrics(topology, version=__version__)
    services = Services(
        topology,
        paths,
        state_id_of(paths.root),
        LocalMachine(watcher, running_ns=lag.running_ns, core_dumps=topology.core_dumps),
        events,
        metrics,
        observer,
    )
    runtime = SupervisorRuntime(services, disk.journal, disk.state, lag)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(sig, runtime.stop_requested.set)
    lag.start()
    told = asyncio.create_task(_tell(events, observer))
    listener = _admin_listener(topology, runtime)
    admin = AdminServer(
        RuntimeController(runtime), events, metrics, paths.root, listener, topology.admin.auth
    )
    late = None
    try:
        await admin.start()
        if listener is None:
            late = asyncio.create_task(_listen_later(topology, runtime, admin))
        await runtime.start()
        gc.collect()
        gc.freeze()  # what lives now lives long: later collections stay short
        await runtime.stop_requested.wait()
    finally:
        await runtime.shut_down()
        if late is not None:
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
        await admin.stop()
        told.cancel()
        watcher.close()
        lag.stop()
    events.append("stopped", f"{topology.name} has stopped")
    return 0


def _admin_listener(topology: Topology, runtime: SupervisorRuntime) -> socket.socket | None:
    """The socket for TCP; None while a stranger has the port and processes of ours need us.

    Raises:
        ConfigurationError: the address is taken or not ours, and nobody would miss us.
    """
    try:
        listener = listen_tcp(topology.admin.listen.host, topology.admin.listen.port)
    except ConfigurationError as error:
        if not find_marked(runtime.services.state_id):
            raise
        runtime.admin_trouble = error.message
        return None
    runtime.admin_address, runtime.admin_trouble = _address(listener), ""
    return listener


async def _listen_later(topology: Topology, runtime: SupervisorRuntime, admin: AdminServer) -> None:
    """Try again until the port is free, and we have a descriptor for it."""
    where = topology.admin.listen
    while True:
        await asyncio.sleep(_PORT_RETRY_S)
        try:
            listener = listen_tcp(where.host, where.port)
            address = _address(listener)
            await admin.listen(listener)
        except (ConfigurationError, OSError) as error:
            runtime.admin_trouble = str(error)
            continue
        runtime.admin_address, runtime.admin_trouble = address, ""
        return


async def _tell(events: EventLog, observer: RunObserver) -> None:
    """Show every event to whoever watches this run."""
    async for event in events.subscribe():
        observer.event(event)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
