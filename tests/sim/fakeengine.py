"""The fake engine: role, epoch, model thread, progress page, and its hold on memory.

Roles are checked by the engines' own table (`engines.native.roles`). Orders that concern rows wait
for the model thread; when that hangs they wait with it, and take effect when it goes on, as in the
real engine.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from cache.errors import ErrorBody, UnderstudyError
from engines.contract import (
    Assume,
    Assumed,
    CanaryResult,
    Descriptors,
    EngineSpec,
    EngineStatus,
    ProgressPage,
    Role,
)
from engines.native.roles import RoleFacts, check_assume
from supervisor.runtime.machine import CpuLook
from tests.sim.fakes import GEOMETRY, MANIFEST, FakeCache, FakeGateway
from tests.sim.proc import Memory, Proc, ProcState, Reply
from tests.sim.world import World

__all__ = ["RIGHT", "WRONG", "FakeEngine"]

_STEPS_PER_S: Final = 100
_MODEL_WAIT_S: Final = 30.0  # the engine's own limit for orders to its model thread
_ATTACH_RETRY_S: Final = 0.05
RIGHT: Final = [1, 2, 3]
WRONG: Final = [6, 6, 6]


class FakeEngine(Proc):
    """One instance of an engine."""

    kind = "engine"

    def __init__(
        self, world: World, spec: EngineSpec, *, parent: Proc | None, is_stray: bool = False
    ) -> None:
        super().__init__(world, spec.instance, parent=parent, is_stray=is_stray)
        if is_stray:
            self.is_blemished = "nobody waits for it"
        self.spec, self.group = spec, spec.group
        self.role: Role = "none"
        self.epoch = 0
        self.status_name = "starting"
        self.error = ""
        self.is_hung = False
        self.is_starved = False
        self.answers_wrong = world.born_wrong[self.unit] > 0
        if self.answers_wrong:
            world.born_wrong[self.unit] -= 1
            self.is_blemished = "born wrong"
        self.is_unhealthy = False
        self.weights: Memory | None = None
        self.kv: list[Memory] = []
        self._inbox: deque[tuple[float, float, Callable[[], None]]] = deque()  # of the model thread
        self._is_at_work = False
        self._page_fd = os.memfd_create("page")
        os.ftruncate(self._page_fd, ProgressPage.SIZE_BYTES)
        self._page_map = mmap.mmap(self._page_fd, ProgressPage.SIZE_BYTES)
        self._page = ProgressPage(memoryview(self._page_map))
        self._page.format()
        self._page_memory = world.new_memory("page", self, self._page_fd)
        self._steps = 0.0
        self._posted = self._handled = 0  # orders for the model thread
        self._on_cpu_ns = self._delay_ns = 0
        self._looked_ns = self.born_ns
        self._attach_until_ns = self.born_ns + int(spec.attach_timeout_s * 1e9)
        boot = (0.02, 0.06) if parent is not None else (1.5, 3.0)
        self.later(self.between(*boot), self._bind)

    # ------------------------------------------------------------------- start

    def _bind(self) -> None:
        self.listen(f"{self.spec.run_dir}/{self.instance}.sock")
        if not self.world.take_doom(self):
            self.later(self.between(0.001, 0.02), self._attach)

    def _attach(self) -> None:
        socket = self.spec.cache_socket
        if socket is None:
            self.weights = self.world.new_memory("weights", self)
            self.later(self.between(0.2, 0.5), self._ready)
            return
        cache = self.world.sockets.get(socket)
        if isinstance(cache, FakeCache) and cache.is_serving:
            self._register(cache)
            self.later(self.between(0.02, 0.1), self._ready)
        elif self.world.clock.now_ns > self._attach_until_ns:
            self.error, self.status_name = "the cache did not answer", "failed"
            self.notify("state", self.hello())
        else:
            self.later(_ATTACH_RETRY_S, self._attach)

    def _register(self, cache: FakeCache) -> None:
        cache.attached[self.instance] = self
        self.on_dead.append(lambda: cache.forget(self.instance))
        if self.weights is None:
            self.weights = cache.weights
        if not self.kv and not self.spec.private_kv:
            self.kv = cache.open_kv()

    def _ready(self) -> None:
        self.status_name = "ready"
        self.notify("state", self.hello())

    # ----------------------------------------------------------------- control

    def hello(self) -> EngineStatus:
        """See the contract."""
        return EngineStatus(
            name=self.spec.name, instance=self.instance, pid=self.process.pid,
            state=self.status_name, role=self.role, epoch=self.epoch, exact=True,  # type: ignore[arg-type]
            slots=4, error=self.error,
        )  # fmt: skip

    def handle(
        self, verb: str, params: Any, memories: Sequence[Memory | None], reply: Reply
    ) -> None:
        """See the contract."""
        match verb:
            case "status":
                reply(self.hello())
            case "assume" if self.status_name == "starting":
                reply(error=ErrorBody("not_ready", "the engine is still starting"))
            case "assume":
                self._on_model(0.0005, 0.006, lambda: self._assume(params, reply), reply)
            case "canary":
                self._on_model(0.004, 0.02, lambda: self._canary(reply), reply)
            case "progress.open":
                reply(None, [self._page_memory])
            case "release_gateway":
                reply(None)
            case "descriptors":
                self._descriptors(reply)
            case "cache.rejoin":
                self._rejoin(reply)
            case _:
                super().handle(verb, params, memories, reply)

    def _on_model(
        self, low_s: float, high_s: float, call: Callable[[], None], reply: Reply
    ) -> None:
        """Let the model thread do something; its own deadline answers while it hangs."""
        self._posted += 1

        def done() -> None:
            self._handled += 1
            call()

        late = ErrorBody("deadline_exceeded", "the model thread did not answer")
        self.later(_MODEL_WAIT_S, lambda: reply(error=late))
        self._inbox.append((low_s, high_s, done))
        self._take_next()

    def _take_next(self) -> None:
        """One after another, as from the one queue of the real model thread."""
        if self._is_at_work or self.is_hung or self.is_starved or not self._inbox:
            return
        self._is_at_work = True
        low_s, high_s, _ = self._inbox[0]
        self.later(self.between(low_s, high_s), self._finish)

    def _finish(self) -> None:
        self._is_at_work = False
        if not self.is_hung:  # else it waits with the thread, at the head of the queue
            self._inbox.popleft()[2]()
        self._take_next()

    def _assume(self, wanted: Assume, reply: Reply) -> None:
        facts = RoleFacts(self.role, self.epoch, has_shared_memory=bool(self.kv))
        try:
            check_assume(facts, wanted.role, wanted.epoch)
        except UnderstudyError as error:
            reply(error=error.to_body())
            return
        was, self.role, self.epoch = self.role, wanted.role, wanted.epoch
        self.status_name = "standby" if wanted.role == "standby" else "serving"
        if wanted.role == "primary":
            self.world.judge.acts(self, wanted.epoch)
        elif was == "primary":
            self.world.judge.rests(self)
        self.notify("state", self.hello())
        reply(Assumed(wanted.role, wanted.epoch))

    def _canary(self, reply: Reply) -> None:
        reply(CanaryResult(self.answer, 5.0, self.world.clock.now_ns))

    @property
    def answer(self) -> list[int]:
        """What it says to the built-in question."""
        return WRONG if self.answers_wrong else RIGHT

    def _descriptors(self, reply: Reply) -> None:
        if self.weights is None:
            reply(error=ErrorBody("not_ready", "nothing is attached yet"))
            return
        from cache.protocol import KvOpened

        kv = KvOpened(GEOMETRY, [4096], 4096) if self.kv else None
        reply(Descriptors(MANIFEST, self.spec.load, kv), [self.weights, *self.kv])

    def _rejoin(self, reply: Reply) -> None:
        socket = self.spec.cache_socket
        cache = self.world.sockets.get(socket) if socket is not None else None
        if isinstance(cache, FakeCache) and cache.is_serving and self.weights is not None:
            self._register(cache)
        reply(None)

    # ---------------------------------------------------------------- progress

    def hang(self) -> None:
        """The model thread deadlocks; everything else answers."""
        self.is_hung = True

    def go_on(self) -> None:
        """The model thread works again: first what has waited."""
        self.is_hung = self.is_starved = False
        self._take_next()

    @property
    def serves(self) -> bool:
        """Whether it is a primary that nothing is wrong with."""
        is_well = self.state is ProcState.RUNNING and not self.is_blemished
        return is_well and self.role == "primary"

    @property
    def has_work(self) -> bool:
        """Whether rows decode or wait."""
        if not self.world.has_load or self.role not in ("primary", "batch"):
            return False
        workers = (p for p in self.world.living() if isinstance(p, FakeGateway))
        return any(w.routes_to(self.instance, self.epoch) for w in workers)

    def look(self) -> CpuLook:
        """Bring the page up to date, as the model thread would; answers the scheduler's account."""
        now_ns = self.world.clock.now_ns
        passed_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        has_work = self.has_work
        moves = self.state is ProcState.RUNNING and not (self.is_hung or self.is_starved)
        if has_work and moves:
            self._steps += passed_ns / 1e9 * _STEPS_PER_S
            self._on_cpu_ns += passed_ns
        elif self.is_starved:
            self._delay_ns += passed_ns
        if self.state is not ProcState.DEAD:
            self._page.set("steps", int(self._steps))
            self._page.set("active", 3 if has_work else 0)
            self._page.set("runnable", 3 if has_work else 0)
            self._page.set("posted", self._posted)
            self._page.set("handled", self._handled)
            self._page.set("runnable", 3 if has_work else 0)
            is_pressed = has_work and self.role == "primary"
            self._page.set("queued", self.world.pressure if is_pressed else 0)
        return CpuLook(self._on_cpu_ns, self._delay_ns, is_runnable=self.is_starved)

    def discard(self) -> None:
        """Its own descriptor and mapping."""
        if self._page_fd >= 0:
            self._page.release()
            self._page_map.close()
            os.close(self._page_fd)
            self._page_fd = -1
