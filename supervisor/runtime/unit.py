"""`Unit`: one supervised process (its name) and its successive instances (its lives).

Engine, zygote, cache daemon and gateway worker share this: instance names, spawn or take over,
the exit watch, and the burial of the dead. One life of a process is one story, so it is told in
one class; what has a rule of its own lies beside it: `ControlLine`, `Starts`, `Background`.

Invariants
    1. `died` belongs to the current instance; whoever awaits anything of an instance also awaits
       its death, so a wait never outlives the process.
    2. Waiting for the kernel to free memory happens in a background task, never on a path.
"""

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from cache.rpc import Hello
from cache.wire import close_all
from supervisor.core.restart import RestartPolicy
from supervisor.errors import MachineRefusedError, ProtocolError, StartFailedError
from supervisor.process import (
    ExitEvidence,
    FenceEvidence,
    FenceNotProvenError,
    Marker,
    ProcessId,
)
from supervisor.runtime.background import Background
from supervisor.runtime.control import ControlLine, T, understood
from supervisor.runtime.lastwords import code_of, log_bytes, log_tail
from supervisor.runtime.launch import child_environment, python_module, specification
from supervisor.runtime.machine import ExitWatch, Handle, OnEvent
from supervisor.runtime.services import Services
from supervisor.runtime.starts import Starts

__all__ = ["Unit"]

_BURIAL_S: Final = 60.0


class Unit:
    """One supervised process and its successive instances."""

    kind: ClassVar[str] = "process"

    def __init__(
        self,
        services: Services,
        *,
        name: str,
        group: str,
        policy: RestartPolicy,
        on_change: Callable[[], None],
    ) -> None:
        self.services = services
        self.name = name
        self.group = group
        self.starts = Starts(services, policy, name=name, on_refused=self._note_refusal)
        self.instance = ""
        self.handle: Handle | None = None
        self.started_s = 0.0
        self.is_lost = False  # its death was seen, or it was given up as unkillable
        self.has_served = False  # the current instance, as primary
        self.is_forking = False  # somebody was asked for the current instance, and has not answered
        self.last_alive_ns: int | None = None  # the last look before the death was seen
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_change = on_change
        self._log_begin_bytes = 0  # where the log of the current instance begins
        self._watch: ExitWatch | None = None
        self._stop_changed = asyncio.Event()
        self._line = ControlLine(name, services)
        self._background = Background(name)
        self._buried: set[str] = set()  # instances that the kernel still tears down

    # ------------------------------------------------------------------ facts

    @property
    def pid(self) -> int | None:
        """Pid of the current instance."""
        return self.handle.process.pid if self.handle is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether an instance exists whose death was not seen."""
        return self.handle is not None and not self.is_lost

    def owns(self, process: ProcessId, instance: str) -> bool:
        """Whether that process is the current instance, or one that is being buried."""
        if instance in self._buried:
            return True
        if instance != self.instance:
            return False
        if self.handle is None:  # who it will be is not known yet
            return self.is_forking and not self.services.is_stopping
        return self.handle.process == process

    @property
    def is_stopped_by_signal(self) -> bool:
        """Whether the process is in state `T`."""
        return self._watch is not None and self._watch.is_stopped

    @property
    def uptime_s(self) -> float:
        """Age of the current instance."""
        return self.services.clock.monotonic() - self.started_s if self.is_alive else 0.0

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.services.paths.log(self.name)

    @property
    def is_connected(self) -> bool:
        """Whether the current instance can be asked."""
        return self._line.is_open

    # ------------------------------------------------------------- start, take

    def begin(self) -> str:
        """Name the next instance; forget everything about the last one."""
        self.release()
        self.instance = f"{self.name}-{secrets.token_hex(4)}"
        self.starts.begin()
        self.is_lost = self.has_served = False
        self.died = asyncio.get_running_loop().create_future()
        self.started_s = self.services.clock.monotonic()
        self._log_begin_bytes = log_bytes(self.log_path)
        return self.instance

    def marker(self) -> Marker:
        """The claim that the current instance carries in its environment."""
        return Marker(self.services.state_id, self.instance)

    def spawn_process(
        self, argv: Sequence[str], *, pass_fds: Sequence[int] = (), with_model: bool
    ) -> None:
        """Start a child for the instance named by `begin`.

        Raises:
            SpawnError: it could not be started at all.
        """
        handle = self.services.machine.spawn(
            argv,
            env=child_environment(with_model=with_model),
            log_path=self.log_path,
            marker=self.marker(),
            cwd=self.services.cwd,
            pass_fds=pass_fds,
        )
        self._own(handle)

    def spawn_module(
        self, module: str, spec: msgspec.Struct, *, pass_fds: Sequence[int] = (), with_model: bool
    ) -> None:
        """Start one of our own modules; its specification goes through a pipe, not over a disk.

        Raises:
            SpawnError, OSError: it could not be started at all.
        """
        with specification(spec, of=self.name) as spec_fd:
            argv = python_module(module, f"/proc/self/fd/{spec_fd}")
            self.spawn_process(argv, pass_fds=[*pass_fds, spec_fd], with_model=with_model)

    def _note_refusal(self, error: MachineRefusedError, is_news: bool) -> None:
        self.services.metrics.start_refused(kind=self.kind, group=self.group, name=self.name)
        if is_news:
            self.emit("start_refused", error.message)

    def take(self, process: ProcessId, instance: str) -> None:
        """Take over a process that exists: a fork of the zygote, or one left by a dead supervisor.

        May be repeated when the machine refused a part of it.

        Raises:
            ProcessGoneError: it is gone already.
            ProcessNotReadableError: no descriptor is left.
        """
        if self.instance != instance:  # not begun by us
            self.started_s = self.services.clock.monotonic() - self.services.machine.age_s(process)
        self.instance = instance
        handle = self.handle
        if handle is None or handle.process != process:
            handle = self.services.machine.adopt(process, self.marker())
        self._own(handle)

    def _own(self, handle: Handle) -> None:
        self.handle = handle
        self.services.owned_pids.add(handle.process.pid)
        self._stop_changed.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._watch = self.services.machine.watch(
            handle.process, self._on_dead, self._stop_changed.set
        )

    async def join(self, *, timeout_s: float) -> None:
        """Connect to the current instance, whoever started it."""
        raise AssertionError(f"{type(self).__name__} cannot be joined within {timeout_s} s")

    async def rejoin(self, *, timeout_s: float) -> None:
        """Connect to an instance that did not answer in time before."""
        await self.join(timeout_s=timeout_s)
        self.note_joined()

    def note_joined(self) -> None:
        """Say that it answers after all."""
        self.emit("joined", f"{self.name} answers now", pid=self.pid, instance=self.instance)
        self._on_change()

    async def connect(
        self,
        path: Path,
        protocol: str,
        version: int,
        *,
        timeout_s: float,
        on_event: OnEvent | None = None,
    ) -> msgspec.Raw:
        """Connect to the instance's control socket, as soon as it is there; returns its hello.

        Raises:
            StartFailedError: the process died first.
            DeadlineExceededError: no socket, or no answer, in time.
        """
        hello = Hello(protocol, version, instance="supervisor", role="supervisor")
        return await self._line.open(
            path, hello, died=self.died, death=self.start_failure,
            timeout_s=timeout_s, on_event=on_event,
        )  # fmt: skip

    def start_failure(self) -> StartFailedError:
        """The error that says how the instance died while starting."""
        tail = log_tail(self.log_path, since_bytes=self._log_begin_bytes)
        return StartFailedError(
            f"{self.name} died while starting" + (f": {tail}" if tail else ""),
            hint=f"see {self.log_path}",
            cause=code_of(tail),
        )

    # ------------------------------------------------------------------- death

    def _on_dead(self, evidence: ExitEvidence) -> None:
        self.last_alive_ns = self._watch.last_alive_ns if self._watch is not None else None
        self._lose(evidence.process)

    def _lose(self, process: ProcessId) -> None:
        self.is_lost = True
        if not self.died.done():
            self.died.set_result(None)
        self.disconnect()
        self.on_death(process)
        self._on_change()

    def on_death(self, process: ProcessId) -> None:
        """Hook: the instance is dead. Must not block."""

    def note_death(self, process: ProcessId) -> None:
        """Event, metric and record of a death that nobody decided about: gateway, zygote, cache."""
        if not self.services.is_stopping:
            self.emit(f"{self.kind}_died", f"{self.name} died", pid=process.pid)
            self.services.metrics.restart(kind=self.kind, group=self.group, name=self.name)
        self.after_death(was_ours=self.services.is_stopping)

    async def fence(self, *, timeout_s: float) -> FenceEvidence | None:
        """Kill the instance's whole tree and return the evidence; None when there is nobody.

        Raises:
            FenceNotProvenError: somebody may still run.
        """
        if self.handle is None:
            return None
        return await self.services.machine.fence(self.handle.tree, timeout_s=timeout_s)

    def after_death(self, *, was_ours: bool) -> None:
        """Keep the record and bury the instance in the background."""
        age_s = self.services.clock.monotonic() - self.started_s
        self.starts.ended(age_s=age_s, was_ours=was_ours, has_served=self.has_served)
        self.release()

    def release(self) -> None:
        """Let go of the current instance: its watch, connection, files; it is buried aside."""
        self._look_away()
        if not self.died.done():
            self.died.set_result(None)  # the fence may prove a death before the watcher sees it
        handle, self.handle = self.handle, None
        if handle is not None:
            self._buried.add(self.instance)
            self.in_background(self._bury(handle, self.instance))

    def let_go(self) -> None:
        """Close what we hold of a process that goes on without us."""
        self._look_away()
        if self.handle is not None:
            self.handle.close()
        self._background.cancel()

    def _look_away(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.disconnect()

    def disconnect(self) -> None:
        """Close the control connection, if there is one."""
        self._line.close()

    async def _bury(self, handle: Handle, instance: str) -> None:
        try:
            exit_status = await handle.wait_reaped(timeout_s=_BURIAL_S)
        finally:
            handle.close()
            self._buried.discard(instance)
            self.services.owned_pids.discard(handle.process.pid)
        if exit_status is not None:
            self.on_exit_status(instance, exit_status)
        self.services.paths.forget(instance)

    def on_exit_status(self, instance: str, exit_status: int) -> None:
        """Hook: how one of its instances ended is known, perhaps a second after its death."""

    async def end(self, *, timeout_s: float) -> None:
        """Kill a helper that is of no use; one that cannot be killed is left behind.

        Its death is then noted like any other, and the next instance is started.
        """
        handle = self.handle
        try:
            await self.fence(timeout_s=timeout_s)
        except FenceNotProvenError as error:
            self.emit("fence_not_proven", str(error))
        if handle is not None and self.handle is handle:  # the watcher has not seen it yet
            self._lose(handle.process)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine beside everything else; its failure is logged, never lost."""
        return self._background.run(work)

    async def change_or_death(self, changed: asyncio.Event, *, timeout_s: float) -> None:
        """Wait until `changed` is set, the instance dies, or time runs out."""
        waiter = asyncio.ensure_future(changed.wait())
        waits: list[asyncio.Future[Any]] = [waiter, self.died]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()

    async def wait_stopped(self, *, timeout_s: float) -> bool:
        """Wait until the process is seen in state `T`; False when time runs out or it dies."""
        deadline = self.services.patience.deadline(timeout_s)
        while not self.is_stopped_by_signal and self.is_alive and not deadline.has_passed:
            self._stop_changed.clear()
            await self.change_or_death(self._stop_changed, timeout_s=deadline.wait_s)
        return self.is_stopped_by_signal

    async def settle(self, *, timeout_s: float) -> None:
        """Wait until the background work (burials) is done; what takes longer is given up."""
        await self._background.settle(timeout_s=timeout_s)

    # ---------------------------------------------------------------- requests

    async def call(self, verb: str, params: object = None, *, timeout_s: float) -> msgspec.Raw:
        """One control request; descriptors that come back are closed.

        Raises:
            ConnectionClosedError: not connected, or the process died meanwhile.
            DeadlineExceededError, RemoteError: as the peer behaved.
        """
        raw, fds = await self.call_with_fds(verb, params, timeout_s=timeout_s)
        for fd in fds:
            os.close(fd)
        return raw

    async def ask(
        self, verb: str, answer: type[T], params: object = None, *, timeout_s: float
    ) -> T:
        """One control request whose answer matters.

        Raises:
            ConnectionClosedError, DeadlineExceededError, RemoteError: as `call`.
            ProtocolError: the answer makes no sense.
        """
        return self.understood(await self.call(verb, params, timeout_s=timeout_s), answer)

    async def given(
        self, verb: str, answer: type[T], params: object = None, *, timeout_s: float
    ) -> tuple[T, list[int]]:
        """Like `ask`, for what comes with descriptors: they are the caller's."""
        raw, fds = await self.call_with_fds(verb, params, timeout_s=timeout_s)
        try:
            return self.understood(raw, answer), fds
        except ProtocolError:
            close_all(fds)
            raise

    def understood(self, raw: msgspec.Raw, answer: type[T]) -> T:
        """What the instance sent, as what it should be; else a `ProtocolError`."""
        return understood(raw, answer, of=self.name)

    async def call_with_fds(
        self, verb: str, params: object = None, *, fds: Sequence[int] = (), timeout_s: float
    ) -> tuple[msgspec.Raw, list[int]]:
        """Like `call`; `fds` go with it, and the caller owns the descriptors that come back."""
        return await self._line.call(verb, params, fds=fds, timeout_s=timeout_s)

    def emit(self, kind: str, text: str, **fields: object) -> None:
        """One event about this unit."""
        self.services.events.append(kind, text, group=self.group, engine=self.name, **fields)
