"""The machine under the runtime: processes, control sockets, clock. A port, and the real one.

Everything that units ask of the operating system goes through `Machine`. What the runtime does
with the answers depends on nothing else, so the simulator (`tests/sim`) runs the same code on a
virtual clock with processes that die, hang and answer late as a seed says.

Invariant: nothing in `supervisor.runtime` reads a clock, looks at a process or opens a control
connection by another way.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Protocol

import msgspec

from cache.gpumemory import CardMemory
from cache.rpc import Hello, RpcClient
from cache.wire import Event
from supervisor.health.http import probe_health
from supervisor.observe.cardasker import CardAsker
from supervisor.process import (
    ExitEvidence,
    ExitWatcher,
    FenceEvidence,
    Marker,
    ProcessHandle,
    ProcessId,
    ProcessNotReadableError,
    ProcessTree,
    age_s,
    fence,
    find_marked,
    read_sched,
    read_stat,
    read_threads,
    reap_orphans,
    signal_process,
    spawn,
)

__all__ = [
    "Clock",
    "ControlClient",
    "CpuLook",
    "ExitWatch",
    "Handle",
    "LeftBehind",
    "LocalMachine",
    "Machine",
    "OnEvent",
]

OnEvent = Callable[[Event, list[int]], None]


class Clock(Protocol):
    """The `time` module, or what stands in for it."""

    def monotonic(self) -> float:
        """CLOCK_MONOTONIC in seconds; the time base of the event loop too."""

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""

    def time(self) -> float:
        """Seconds since 1970: for people, never for decisions."""


class Handle(Protocol):
    """One process that a unit owns: `supervisor.process.ProcessHandle`."""

    process: ProcessId

    @property
    def tree(self) -> ProcessTree:
        """What a fence kills."""

    def send_signal(self, sig: Signals) -> bool:
        """Signal exactly this process; False: it is gone."""

    def report_exit(self, exit_status: int) -> None:
        """The zygote reaped it."""

    async def wait_reaped(self, *, timeout_s: float) -> int | None:
        """Wait until the kernel has freed everything. Never on a path."""

    async def terminate(self, *, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL; True when it went by itself."""

    def close(self) -> None:
        """Give the descriptors back; kills nothing."""


class ExitWatch(Protocol):
    """The eye on one process: `supervisor.process.Watch`."""

    last_alive_ns: int | None

    @property
    def is_stopped(self) -> bool:
        """Whether it is in state `T`."""

    def cancel(self) -> None:
        """Look away; no callback runs afterwards."""


class ControlClient(Protocol):
    """A control connection: `cache.rpc.RpcClient`."""

    @property
    def is_closed(self) -> bool:
        """Whether it is gone, by whomever."""

    def close(self) -> None:
        """Close it; calls in flight fail."""

    async def call(
        self, verb: str, params: object = None, *, fds: Sequence[int] = (), timeout_s: float
    ) -> tuple[msgspec.Raw, list[int]]:
        """One request; the caller owns the descriptors that come back."""


@dataclass(frozen=True, slots=True)
class CpuLook:
    """What the scheduler says about a process, all threads together, since their start."""

    on_cpu_ns: int
    run_delay_ns: int
    is_runnable: bool  # some thread is in state R


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A session leader that carries the marker of this state directory."""

    process: ProcessId
    instance: str
    is_stopped: bool


class Machine(Protocol):
    """What the runtime asks of the operating system. Nothing here blocks the loop."""

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, marker: Marker,
        cwd: Path, pass_fds: Sequence[int],
    ) -> Handle:  # fmt: skip
        """Start a child.

        Raises:
            SpawnError: it could not be started at all.
        """

    def adopt(self, process: ProcessId, marker: Marker) -> Handle:
        """Own a process that exists.

        Raises:
            ProcessGoneError: it is gone already.
        """

    def age_s(self, process: ProcessId) -> float:
        """How long ago it was started."""

    def watch(
        self,
        process: ProcessId,
        on_dead: Callable[[ExitEvidence], None],
        on_stop_change: Callable[[], None],
    ) -> ExitWatch:
        """Report its death once, and every stop and continuation, on the loop."""

    async def fence(self, tree: ProcessTree, *, timeout_s: float) -> FenceEvidence:
        """Kill a whole tree and prove that none of it runs again.

        Raises:
            FenceNotProvenError: somebody may still run.
        """

    async def connect(
        self, path: Path, hello: Hello, *, timeout_s: float, on_event: OnEvent | None
    ) -> tuple[ControlClient, msgspec.Raw]:
        """Connect to a control socket; returns the answer to hello too.

        Raises:
            OSError: nobody listens there.
            UnderstudyError: it refused us, or did not answer in time.
        """

    async def probe_health(self, path: Path, *, timeout_s: float) -> bool | None:
        """`GET /health`: True for 200, False for another status, None without an answer."""

    def cpu(self, pid: int) -> CpuLook:
        """The scheduler's account of a process that lives."""

    async def card_memory(self, uuid: str, *, stop: threading.Event) -> CardMemory | None:
        """How the memory of a card is used, as the driver reports it; None once `stop` is set.

        Raises:
            CardUnknownError: no answer in time, or none that can be understood.
        """

    async def left_behind(self, state_id: str) -> list[LeftBehind]:
        """Every process that a former supervisor of this state directory left."""

    def signal(self, process: ProcessId, sig: Signals) -> bool:
        """Signal a process that no handle owns; False: it is gone."""

    def reap_orphans(self, owned_pids: set[int]) -> None:
        """Bury dead children that nobody owns."""


class LocalMachine:
    """This machine. `running_ns` is the clock of fences: it stands still while we do not run."""

    def __init__(
        self,
        watcher: ExitWatcher,
        *,
        running_ns: Callable[[], int] = time.monotonic_ns,
        core_dumps: bool = False,
    ) -> None:
        self._watcher = watcher
        self._running_ns = running_ns
        self._core_dumps = core_dumps
        self._cards = CardAsker()

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, marker: Marker,
        cwd: Path, pass_fds: Sequence[int],
    ) -> Handle:  # fmt: skip
        """See `Machine`."""
        child = spawn(
            argv, env=env, log_path=log_path, marker=marker, cwd=cwd, pass_fds=pass_fds,
            core_dumps=self._core_dumps,
        )  # fmt: skip
        try:
            return ProcessHandle.of_child(child)
        except ProcessNotReadableError:  # nobody would own it: it is ended, and reaped as an orphan
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            os.close(child.pidfd)
            raise

    def adopt(self, process: ProcessId, marker: Marker) -> Handle:
        """See `Machine`."""
        return ProcessHandle.adopt(process, marker)

    def age_s(self, process: ProcessId) -> float:
        """See `Machine`."""
        return age_s(process)

    def watch(
        self,
        process: ProcessId,
        on_dead: Callable[[ExitEvidence], None],
        on_stop_change: Callable[[], None],
    ) -> ExitWatch:
        """See `Machine`."""
        return self._watcher.watch(process, on_dead, on_stopped=lambda _: on_stop_change())

    async def fence(self, tree: ProcessTree, *, timeout_s: float) -> FenceEvidence:
        """See `Machine`."""
        return await fence(tree, timeout_s=timeout_s, running_ns=self._running_ns)

    async def connect(
        self, path: Path, hello: Hello, *, timeout_s: float, on_event: OnEvent | None
    ) -> tuple[ControlClient, msgspec.Raw]:
        """See `Machine`."""
        client, raw = await RpcClient.connect(path, hello, timeout_s=timeout_s, on_event=on_event)
        return client, msgspec.Raw(raw)

    async def probe_health(self, path: Path, *, timeout_s: float) -> bool | None:
        """See `Machine`."""
        return await probe_health(path, timeout_s=timeout_s)

    def cpu(self, pid: int) -> CpuLook:
        """See `Machine`."""
        sched = read_sched(pid).values()
        return CpuLook(
            on_cpu_ns=sum(s.on_cpu_ns for s in sched),
            run_delay_ns=sum(s.run_delay_ns for s in sched),
            is_runnable=any(t.state == "R" for t in read_threads(pid).values()),
        )

    async def card_memory(self, uuid: str, *, stop: threading.Event) -> CardMemory | None:
        """See `Machine`."""
        return await self._cards.ask(uuid, stop=stop)

    async def left_behind(self, state_id: str) -> list[LeftBehind]:
        """See `Machine`."""
        found = await asyncio.to_thread(find_marked, state_id)
        # Workers inside an engine's own tree carry its marker too; only leaders are units.
        looks = ((process, instance, read_stat(process.pid)) for process, instance in found)
        leaders = [
            LeftBehind(process, instance, stat.state == "T")
            for process, instance, stat in looks
            if stat is not None and stat.session == process.pid
        ]
        # A worker may have left the session and lead one of its own: the oldest is the unit.
        oldest: dict[str, LeftBehind] = {}
        for left in sorted(leaders, key=lambda one: one.process.start_ticks, reverse=True):
            oldest[left.instance] = left
        return list(oldest.values())

    def signal(self, process: ProcessId, sig: Signals) -> bool:
        """See `Machine`."""
        return signal_process(process, sig)

    def reap_orphans(self, owned_pids: set[int]) -> None:
        """See `Machine`."""
        reap_orphans(owned_pids)
