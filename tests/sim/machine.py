"""The machine of one supervisor life: the port `supervisor.runtime.machine.Machine` on the world.

When that supervisor crashes, `is_gone` turns everything it still tries into nothing: what its
clean-up code would do does not happen, as after a real SIGKILL.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

import msgspec

from cache.gpumemory import CardMemory, CardUnknownError
from cache.rpc import Hello
from engines.contract import EngineSpec, ZygoteSpec
from supervisor.gateway.protocol import GatewaySpec
from supervisor.process import (
    ExitEvidence,
    FenceEvidence,
    FenceNotProvenError,
    Marker,
    ProcessGoneError,
    ProcessId,
    ProcessNotReadableError,
    ProcessTree,
    SpawnError,
)
from supervisor.runtime.machine import (
    ControlClient,
    CpuLook,
    ExitWatch,
    Handle,
    LeftBehind,
    OnEvent,
)
from tests.sim.connections import FakeClient, FakeHandle, FakeWatch
from tests.sim.fakeengine import FakeEngine
from tests.sim.fakes import FakeCache, FakeGateway, FakeZygote
from tests.sim.proc import Proc, ProcState
from tests.sim.world import World

__all__ = ["FakeMachine"]


class FakeMachine:
    """What one supervisor can do to the world."""

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop) -> None:
        self.world = world
        self.loop = loop
        self.is_gone = False
        self.is_stopping: Callable[[], bool] = lambda: False
        self.owns: Callable[[Proc], bool] = lambda _: True
        self.is_right: Callable[[Proc], bool] = lambda _: True
        self._context = contextvars.copy_context()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Let the supervisor's loop do something, as part of that supervisor."""
        self.loop.call_soon(call, context=self._context)

    def check(self) -> None:
        """A dead supervisor does nothing."""
        if self.is_gone:
            raise asyncio.CancelledError

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, marker: Marker,
        cwd: Path, pass_fds: Sequence[int],
    ) -> Handle:  # fmt: skip
        """See the port."""
        self.check()
        if self.world.refused_starts > 0:
            self.world.refused_starts -= 1
            raise SpawnError(argv, log_path, OSError(11, "no room for a process"))
        if not self.world.has_descriptors:
            raise SpawnError(argv, log_path, OSError(24, "Too many open files"))
        module, rest = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]
        proc = self._new_process(module, rest, marker, pass_fds)
        assert proc.instance == marker.instance
        return FakeHandle(self, proc.process, marker)

    def _new_process(
        self, module: str, rest: Sequence[str], marker: Marker, pass_fds: Sequence[int]
    ) -> Proc:
        match module:
            case "supervisor.gateway":
                spec = msgspec.json.decode(Path(rest[0]).read_bytes(), type=GatewaySpec)
                return FakeGateway(self.world, spec, pass_fds[0])
            case "engines.zygote":
                zygote = msgspec.json.decode(Path(rest[0]).read_bytes(), type=ZygoteSpec)
                return FakeZygote(self.world, zygote)
            case "cache.daemon":
                return FakeCache(self.world, marker.instance, rest[rest.index("--socket") + 1])
            case "engines.native":
                engine = msgspec.json.decode(Path(rest[0]).read_bytes(), type=EngineSpec)
                return self.world.new_engine(engine, parent=None)
            case _:
                raise AssertionError(f"nobody knows {module}")

    def adopt(self, process: ProcessId, marker: Marker) -> Handle:
        """See the port."""
        self.check()
        if self.world.procs[process].is_reaped:
            raise ProcessGoneError(process)
        if not self.world.has_descriptors:
            self._blemish_unheard(self.world.procs[process].instance)
            raise ProcessNotReadableError(process.pid, OSError(24, "Too many open files"))
        return FakeHandle(self, process, marker)

    def age_s(self, process: ProcessId) -> float:
        """See the port."""
        return self.world.clock.now_ns / 1e9 - process.start_ticks / 100

    def watch(
        self,
        process: ProcessId,
        on_dead: Callable[[ExitEvidence], None],
        on_stop_change: Callable[[], None],
    ) -> ExitWatch:
        """See the port."""
        self.check()
        return FakeWatch(self, self.world.procs[process], on_dead, on_stop_change)

    async def fence(self, tree: ProcessTree, *, timeout_s: float) -> FenceEvidence:
        """See the port."""
        self.check()
        world, proc = self.world, self.world.procs[tree.root]
        started_ns = world.clock.now_ns
        world.spring("before", "fence", proc)
        if proc.state in (ProcState.RUNNING, ProcState.STOPPED):
            self._check_routes(proc)
            self.signal(tree.root, SIGKILL)
        if proc.state is not ProcState.DEAD:
            await self._evidence(proc, timeout_s, started_ns)
        world.spring("after", "fence", proc)
        self.check()
        return FenceEvidence(tree.root, (), 1, started_ns, world.clock.now_ns)

    async def _evidence(self, proc: Proc, timeout_s: float, started_ns: int) -> None:
        ended: asyncio.Future[None] = self.loop.create_future()
        proc.on_dead.append(lambda: None if ended.done() else ended.set_result(None))
        await asyncio.wait([ended], timeout=timeout_s)
        if proc.state is not ProcState.DEAD:
            waited_ms = (self.world.clock.now_ns - started_ns) / 1e6
            raise FenceNotProvenError(
                proc.process, waited_ms=waited_ms, alive=[proc.process], threads=1
            )

    def _check_routes(self, proc: Proc) -> None:
        """Before an engine is fenced, no gateway may be told to send to it."""
        if not isinstance(proc, FakeEngine) or self.is_stopping():
            return
        for worker in self.world.living():
            for client in worker.connections:
                table = client.last_routes
                if client.machine is not self or table is None:
                    continue
                for route in table.groups:
                    targets = (route.primary, route.batch)
                    if any(t and t.instance == proc.instance for t in targets):
                        self.world.judge.breach(
                            f"{proc.unit} is fenced while {worker.unit} is told to route to it"
                        )

    async def connect(
        self, path: Path, hello: Hello, *, timeout_s: float, on_event: OnEvent | None
    ) -> tuple[ControlClient, msgspec.Raw]:
        """See the port."""
        self.check()
        if not self.world.has_descriptors:
            self._blemish_unheard(path.stem)
            raise OSError(24, "Too many open files")
        proc = self.world.sockets.get(str(path))
        if proc is None:
            raise FileNotFoundError(str(path))
        if proc.is_reaped:
            raise ConnectionRefusedError(str(path))
        client = FakeClient(self, proc, on_event)
        try:
            raw, _ = await client.call("hello", hello, timeout_s=timeout_s)
        except BaseException:
            client.close()
            raise
        return client, raw

    def _blemish_unheard(self, stem: str) -> None:
        """A start of our own that nobody can hear of is a failed one; all else is to be kept."""
        for proc in self.world.living():
            has_no_role = isinstance(proc, FakeEngine) and proc.role == "none"
            is_new = proc.child_of is self and (not proc.was_connected or has_no_role)
            if stem in (proc.instance, proc.unit) and is_new:
                proc.is_blemished = "nobody could connect to it"

    async def probe_health(self, path: Path, *, timeout_s: float) -> bool | None:
        """See the port."""
        self.check()
        instance = path.name.removesuffix(".http")
        proc = next((p for p in self.world.living() if p.instance == instance), None)
        if not isinstance(proc, FakeEngine) or proc.state is not ProcState.RUNNING:
            await asyncio.sleep(timeout_s)
            return None
        took_s = proc.between(0.001, 0.004)
        await asyncio.sleep(min(took_s, timeout_s))
        return None if took_s > timeout_s else not proc.is_unhealthy

    def cpu(self, pid: int) -> CpuLook:
        """See the port."""
        proc = next(p for p in reversed(self.world.procs.values()) if p.process.pid == pid)
        return proc.look()

    async def card_memory(self, uuid: str, *, stop: threading.Event) -> CardMemory | None:
        """See the port: no simulated group is on a card."""
        raise CardUnknownError(f"nobody made {uuid}")

    async def left_behind(self, state_id: str) -> list[LeftBehind]:
        """See the port."""
        self.check()
        return [
            LeftBehind(p.process, p.instance, p.state is ProcState.STOPPED)
            for p in self.world.living()
        ]

    def signal(self, process: ProcessId, sig: Signals) -> bool:
        """See the port."""
        self.check()
        proc = self.world.procs[process]
        if proc.is_reaped:
            return False
        if proc.state in (ProcState.RUNNING, ProcState.STOPPED):
            expected = (
                bool(proc.is_blemished)
                or not self.is_right(proc)
                or not self.owns(proc)
                or self.is_stopping()
                or proc.unit in self.world.judge.operator_touched
            )
            self.world.judge.signalled(proc, sig.name, expected=expected)
        if sig is SIGSTOP:
            proc.stop()
        elif sig is SIGCONT:
            proc.wake()
        elif sig in (SIGKILL, SIGTERM):
            proc.kill()
        return True

    def reap_orphans(self, owned_pids: set[int]) -> None:
        """See the port."""
        self.check()
