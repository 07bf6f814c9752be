"""Both ends of what a supervisor holds of a process: control connection, exit watch, handle.

A connection keeps the order of what is sent, and its server handles one request after another, as
`cache.rpc` does.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from signal import SIGTERM, Signals
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cache.errors import ConnectionClosedError, DeadlineExceededError, ErrorBody, RemoteError
from cache.wire import Event
from engines.contract import Assume
from supervisor.gateway.protocol import Routes
from supervisor.process import EvidenceKind, ExitEvidence, Marker, ProcessId, ProcessTree
from supervisor.runtime.machine import OnEvent
from tests.sim.proc import Memory, Proc, ProcState

if TYPE_CHECKING:
    from tests.sim.machine import FakeMachine

__all__ = ["FakeClient", "FakeHandle", "FakeWatch"]

_WATCH_S: Final = 0.005
_WIRE_S: Final = (0.00005, 0.0004)


@dataclass(eq=False, slots=True)
class _Request:
    verb: str
    params: Any
    memories: list[Memory | None]
    future: "asyncio.Future[tuple[msgspec.Raw, list[int]]]"
    is_answered: bool = field(default=False)


class FakeClient:
    """A control connection. The server handles its requests one after another."""

    def __init__(self, machine: "FakeMachine", proc: Proc, on_event: OnEvent | None) -> None:
        self.machine = machine
        self.proc = proc
        self._is_closed = False
        self.last_routes: Routes | None = None
        self._on_event = on_event
        self._queue: deque[_Request] = deque()
        self._is_serving = False
        self._pending: set[asyncio.Future[tuple[msgspec.Raw, list[int]]]] = set()
        self._last_there_ns = self._last_back_ns = 0
        proc.connections.append(self)
        proc.was_connected = True

    async def call(
        self, verb: str, params: object = None, *, fds: Sequence[int] = (), timeout_s: float
    ) -> tuple[msgspec.Raw, list[int]]:
        """See the port."""
        self.machine.check()
        if self.is_closed:
            raise ConnectionClosedError("the connection is closed")
        if isinstance(params, Routes):
            self.last_routes = params
        elif isinstance(params, Assume) and params.role == "primary":
            self.machine.world.judge.ordered_primary(self.proc, params.epoch)
        world = self.machine.world
        request = _Request(
            verb, params, [world.memory_of(fd) for fd in fds],
            asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        self._pending.add(request.future)
        clock = world.clock
        due_ns = clock.now_ns + int(self.proc.random.uniform(*_WIRE_S) * 1e9)
        self._last_there_ns = max(due_ns, self._last_there_ns + 1)  # a socket keeps the order
        clock.after((self._last_there_ns - clock.now_ns) / 1e9, lambda: self._arrive(request))
        try:
            async with asyncio.timeout(timeout_s):
                return await request.future
        except TimeoutError as error:
            _discard(request.future)
            raise DeadlineExceededError(f"the answer to {verb}", timeout_s=timeout_s) from error
        except asyncio.CancelledError:
            _discard(request.future)
            raise
        finally:
            self._pending.discard(request.future)

    def _arrive(self, request: _Request) -> None:
        self._queue.append(request)
        self.proc.when_running(self._serve)

    def _serve(self) -> None:
        if self._is_serving or not self._queue:
            return
        self._is_serving = True
        request = self._queue.popleft()
        self.proc.world.spring("before", request.verb, self.proc)
        self.proc.when_running(lambda: self._handle(request))

    def _handle(self, request: _Request) -> None:
        def reply(
            result: object = None, fds: Sequence[Memory] = (), error: ErrorBody | None = None
        ) -> None:
            if request.is_answered:
                return
            request.is_answered = True
            self._back(lambda: self._send(request, result, fds, error))

        if self.proc.lose_answers > 0:
            self.proc.lose_answers -= 1  # its handler is stuck, and with it this connection
        elif request.verb == "hello":
            reply(self.proc.hello())
        else:
            self.proc.asked_over = self
            self.proc.handle(request.verb, request.params, request.memories, reply)

    def _back(self, deliver: Callable[[], None]) -> None:
        """Something travels to the supervisor, behind what was sent before."""
        clock = self.proc.world.clock
        due_ns = clock.now_ns + int(self.proc.between(*_WIRE_S) * 1e9)
        self._last_back_ns = max(due_ns, self._last_back_ns + 1)
        clock.after((self._last_back_ns - clock.now_ns) / 1e9, deliver)

    def _send(
        self, request: _Request, result: object, fds: Sequence[Memory], error: ErrorBody | None
    ) -> None:
        self._is_serving = False
        self.proc.world.spring("after", request.verb, self.proc)
        future = request.future
        if not future.done() and not self.is_closed and not self.machine.is_gone:
            if error is not None:
                future.set_exception(RemoteError(error))
            else:
                own = [self.machine.world.hand_out(memory, self.machine) for memory in fds]
                future.set_result((msgspec.Raw(msgspec.json.encode(result)), own))
        self.proc.when_running(self._serve)

    def deliver_event(self, name: str, params: object) -> None:
        """An event from the server; read by the loop when it has its turn."""
        event = Event(name, msgspec.Raw(msgspec.json.encode(params)))

        def read() -> None:
            if not self.is_closed and not self.machine.is_gone and self._on_event is not None:
                self._on_event(event, [])

        if not self.is_closed and not self.machine.is_gone:
            self._back(lambda: self.machine.call_soon(read))

    @property
    def is_closed(self) -> bool:
        """See the port."""
        return self._is_closed

    def lost(self) -> None:
        """End of file from the server."""
        self._end("the peer closed the connection")

    def close(self) -> None:
        """See the port."""
        self._end("closed by this side")

    def _end(self, why: str) -> None:
        if self.is_closed:
            return
        self._is_closed = True
        self.proc.connections.remove(self)
        for future in self._pending:
            if not future.done() and not self.machine.is_gone:
                future.set_exception(ConnectionClosedError(why))


def _discard(future: "asyncio.Future[tuple[msgspec.Raw, list[int]]]") -> None:
    """Close descriptors of an answer that came when nobody waited any more, as `RpcClient` does."""
    if future.done() and not future.cancelled() and future.exception() is None:
        for fd in future.result()[1]:
            os.close(fd)


class FakeWatch:
    """The exit watcher's eye: it looks every 5 ms, at a random phase."""

    def __init__(
        self,
        machine: "FakeMachine",
        proc: Proc,
        on_dead: Callable[[ExitEvidence], None],
        on_stop_change: Callable[[], None],
    ) -> None:
        self._machine = machine
        self._proc = proc
        self._on_dead = on_dead
        self._on_stop_change = on_stop_change
        self.last_alive_ns: int | None = None
        self.is_stopped = False
        self.is_cancelled = False
        proc.watches.append(self)
        if proc.state is ProcState.DEAD:
            self.dead()
        elif proc.state is ProcState.STOPPED:
            self.stop_changed()

    def cancel(self) -> None:
        """See the port."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._proc.watches.remove(self)

    def dead(self) -> None:
        """Evidence is there; the next look finds it."""
        self._machine.world.clock.after(
            self._proc.random.uniform(0, _WATCH_S), lambda: self._soon(self._see_death)
        )

    def stop_changed(self) -> None:
        """State `T` began or ended; the next look finds it."""
        self._machine.world.clock.after(
            self._proc.random.uniform(0, _WATCH_S), lambda: self._soon(self._see_stop)
        )

    def _soon(self, look: Callable[[], None]) -> None:
        if not self.is_cancelled and not self._machine.is_gone:
            self._machine.call_soon(look)

    def _see_death(self) -> None:
        if self.is_cancelled or self._machine.is_gone:
            return
        self.cancel()
        now_ns = self._machine.world.clock.now_ns
        self.last_alive_ns = (self._proc.died_ns or now_ns) - int(_WATCH_S * 1e9)
        self._on_dead(ExitEvidence(self._proc.process, EvidenceKind.FLAGS, now_ns))

    def _see_stop(self) -> None:
        is_stopped = self._proc.state is ProcState.STOPPED
        if self.is_cancelled or self._machine.is_gone or is_stopped == self.is_stopped:
            return
        self.is_stopped = is_stopped
        self._on_stop_change()


class FakeHandle:
    """One process that a unit owns."""

    def __init__(self, machine: "FakeMachine", process: ProcessId, marker: Marker) -> None:
        self.process = process
        self._reported: int | None = None
        self._machine = machine
        self._marker = marker

    @property
    def tree(self) -> ProcessTree:
        """See the port."""
        return ProcessTree(self.process, self._marker)

    def send_signal(self, sig: Signals) -> bool:
        """See the port."""
        return self._machine.signal(self.process, sig)

    def report_exit(self, exit_status: int) -> None:
        """The zygote has reaped it."""
        self._reported = exit_status

    async def wait_reaped(self, *, timeout_s: float) -> int | None:
        """See the port."""
        proc = self._machine.world.procs[self.process]
        if not proc.is_reaped:
            reaped: asyncio.Future[None] = self._machine.loop.create_future()
            proc.on_reaped.append(lambda: None if reaped.done() else reaped.set_result(None))
            await asyncio.wait([reaped], timeout=timeout_s)
        is_ours = proc.parent is None and proc.child_of is self._machine
        return os.waitstatus_to_exitcode(proc.wait_status) if is_ours else self._reported

    async def terminate(self, *, grace_s: float) -> bool:
        """See the port."""
        self.send_signal(SIGTERM)
        await asyncio.sleep(0.01)
        return True

    def close(self) -> None:
        """Nothing is held."""
