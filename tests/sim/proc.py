"""What every fake process has in common.

A process here is what the kernel and the other end of a control socket would show: it runs, is
stopped, is killed (evidence outstanding) or dead. What it does while it runs is in `fakes`.

Every random draw comes from a generator of the process that it concerns (seed, unit, birth), so a
schedule keeps most of its behaviour when the shrinker takes other events out of it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from supervisor.runtime.machine import CpuLook

if TYPE_CHECKING:
    from tests.sim.connections import FakeClient, FakeWatch
    from tests.sim.world import World

__all__ = ["Memory", "Proc", "ProcState", "Reply"]

Reply = Callable[..., None]
"""`reply(result=None, fds=(), error=None)`: the answer to one request."""


class ProcState(Enum):
    """What the kernel shows."""

    RUNNING = auto()
    STOPPED = auto()
    KILLED = auto()  # condemned; some thread may still run
    DEAD = auto()  # evidence is there


@dataclass(eq=False, slots=True)
class Memory:
    """One piece of shared memory; lives as long as anybody holds it."""

    kind: str  # weights | kv | page | socket
    owner: str  # the unit that made it
    number: int
    source_fd: int  # the simulation's own


class Proc:
    """One process. Subclasses answer verbs (`handle`)."""

    kind = "process"
    group = ""  # engines belong to one
    is_forked = False

    def __init__(
        self, world: "World", instance: str, *, parent: "Proc | None" = None, is_stray: bool = False
    ) -> None:
        self.world = world
        self.process = world.new_id()
        self.instance = instance
        self.unit = instance.rpartition("-")[0]
        self.parent = parent
        self.state = ProcState.RUNNING
        self.born_ns = world.clock.now_ns
        self.died_ns: int | None = None
        self.is_reaped = False
        self.wait_status = SIGKILL.value
        self.child_of = world.machine  # reaps it, unless a zygote does
        self.is_blemished = ""  # the fault that touched it: a supervisor may end it now
        self.evidence_delay_s: float | None = None  # unkillable for so long
        self.slow_s = 0.0
        self.asked_over: FakeClient | None = None  # the connection of its newest request
        self.starved_since_ns: int | None = None  # waits for a CPU since then
        self.delay_ns = 0  # on run queues, before that
        self.lose_answers = 0  # so many requests are read and never answered
        self.connections: list[FakeClient] = []
        self.was_connected = False
        self.watches: list[FakeWatch] = []
        self.on_dead: list[Callable[[], None]] = []
        self.on_reaped: list[Callable[[], None]] = []
        self._deferred: list[Callable[[], None]] = []
        world.births[self.unit] += 1
        self.random = random.Random(f"{world.seed}:{self.unit}:{world.births[self.unit]}")
        world.procs[self.process] = self
        world.judge.born(self, is_stray=is_stray)

    def __str__(self) -> str:
        return self.instance

    # ------------------------------------------------------------- what it does

    def handle(
        self, verb: str, params: Any, memories: Sequence[Memory | None], reply: Reply
    ) -> None:
        """Answer one request of a supervisor."""
        raise AssertionError(f"{self.unit} has no verb {verb}")

    def hello(self) -> object:
        """The answer to hello."""
        raise AssertionError(f"{self.unit} cannot be connected to")

    def notify(self, name: str, params: object) -> None:
        """An event to every supervisor that is connected."""
        for client in tuple(self.connections):
            client.deliver_event(name, params)

    def between(self, low_s: float, high_s: float) -> float:
        """A random time, longer while the process is slow."""
        return self.random.uniform(low_s, high_s) + self.slow_s

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Do something after a time, if it lives then; a stopped process does it once woken."""
        self.world.clock.after(delay_s, lambda: self.when_running(call))

    def when_running(self, call: Callable[[], None]) -> None:
        """Now, or when it is continued."""
        if self.state is ProcState.RUNNING:
            call()
        elif self.state is ProcState.STOPPED:
            self._deferred.append(call)

    def listen(self, path: str) -> None:
        """Bind the control socket."""
        self.world.sockets[path] = self

    def look(self) -> CpuLook:
        """The scheduler's account."""
        since_ns = self.starved_since_ns
        delay_ns = self.world.clock.now_ns - since_ns if since_ns is not None else 0
        return CpuLook(0, self.delay_ns + delay_ns, is_runnable=since_ns is not None)

    # ------------------------------------------------------------------ signals

    def stop(self) -> None:
        """SIGSTOP."""
        if self.state is ProcState.RUNNING:
            self.state = ProcState.STOPPED
            self._tell_watches()

    def wake(self) -> None:
        """SIGCONT."""
        if self.state is ProcState.STOPPED:
            self.state = ProcState.RUNNING
            self._tell_watches()
            deferred, self._deferred = self._deferred, []
            for call in deferred:
                self.when_running(call)

    def _tell_watches(self) -> None:
        for watch in tuple(self.watches):
            watch.stop_changed()

    def kill(self) -> None:
        """SIGKILL, or death by itself: the evidence follows in a moment, memory and EOF later."""
        if self.state in (ProcState.KILLED, ProcState.DEAD):
            return
        self.state = ProcState.KILLED
        if self.evidence_delay_s is None:
            self.world.clock.after(self.random.uniform(0.0003, 0.0015), self.end)
        elif self.evidence_delay_s >= 0:
            self.world.clock.after(self.evidence_delay_s, self.end)

    def end(self) -> None:
        """Every thread carries its exit flag now."""
        if self.state is ProcState.DEAD:
            return
        self.state = ProcState.DEAD
        self.died_ns = self.world.clock.now_ns
        self.world.judge.ended(self)
        for watch in tuple(self.watches):
            watch.dead()
        callbacks, self.on_dead = self.on_dead, []
        for callback in callbacks:
            callback()
        self.world.clock.after(self.random.uniform(0.005, 0.4), self._tear_down)

    def vanish(self) -> None:
        """The machine restarts: it is gone, and nobody is left to be told."""
        self.evidence_delay_s = None
        self.kill()
        self.end()
        self.is_reaped = True

    def _tear_down(self) -> None:
        """The kernel has freed everything: end of file on sockets, the parent reaps."""
        self.is_reaped = True
        for callback in self.on_reaped:
            callback()
        self.discard()
        for client in tuple(self.connections):
            client.lost()
        if isinstance(self.parent, Proc):
            self.parent.child_reaped(self)

    def child_reaped(self, child: "Proc") -> None:
        """Hook of the zygote."""

    def discard(self) -> None:
        """Give back what the simulation itself holds for it."""
