"""The world outside the supervisor: processes, sockets, descriptors, memory, and its history."""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.contract import EngineSpec
from supervisor.process import ProcessId, own_boot_id
from tests.sim.clock import VirtualTime
from tests.sim.invariants import Judge
from tests.sim.proc import Memory, Proc, ProcState

if TYPE_CHECKING:
    from tests.sim.machine import FakeMachine

__all__ = ["Trap", "World"]


@dataclass(slots=True)
class Trap:
    """Do something when a verb reaches (`before`) or leaves (`after`) a process of that unit."""

    verb: str
    phase: str
    unit: str  # empty: any
    action: Callable[[Proc], None]


@dataclass(slots=True)
class _Descriptor:
    memory: Memory
    inode: int
    machine: "FakeMachine"


class World:
    """Everything that outlives a supervisor."""

    def __init__(self, seed: int, clock: VirtualTime) -> None:
        self.seed = seed
        self.clock = clock
        self.judge = Judge(clock)
        self.procs: dict[ProcessId, Proc] = {}
        self.sockets: dict[str, Proc] = {}
        self.traps: list[Trap] = []
        self.births: dict[str, int] = defaultdict(int)
        self.doomed: dict[str, int] = defaultdict(int)  # unit -> instances that die while starting
        self.born_wrong: dict[str, int] = defaultdict(int)  # unit -> instances that answer wrongly
        self.failing_forks = 0
        self.failing_loads = 0
        self.refused_starts = 0  # so often the machine has no room for a process
        self.has_descriptors = True  # to open something new; deaths and fences have a reserve
        self.takes_sockets = True  # the state directory; else who starts dies of it
        self.has_load = True
        self.pressure = 0
        self.source_fd = os.memfd_create("sim")
        self.machine: FakeMachine | None = None  # of the supervisor that lives now
        self._descriptors: dict[int, _Descriptor] = {}
        self._next_pid = 1000
        self._next_memory = 0

    # -------------------------------------------------------------- processes

    def new_id(self) -> ProcessId:
        """Pid and start time of the next process."""
        self._next_pid += 1
        return ProcessId(self._next_pid, self.clock.now_ns // 10_000_000, own_boot_id())

    def living(self, unit: str = "") -> list[Proc]:
        """Processes without evidence of death, oldest first."""
        return [
            p for p in self.procs.values() if p.state is not ProcState.DEAD and unit in ("", p.unit)
        ]

    def find(self, unit: str) -> Proc | None:
        """The newest process of a unit that is not condemned."""
        fit = [p for p in self.living(unit) if p.state is not ProcState.KILLED]
        return fit[-1] if fit else None

    def spring(self, phase: str, verb: str, proc: Proc) -> None:
        """A verb reaches or leaves a process: the first trap that fits acts, once."""
        for trap in self.traps:
            if (trap.verb, trap.phase) == (verb, phase) and trap.unit in ("", proc.unit):
                self.traps.remove(trap)
                trap.action(proc)
                return

    def new_engine(self, spec: EngineSpec, *, parent: Proc | None, is_stray: bool = False) -> Proc:
        """An engine was forked, or started cold."""
        from tests.sim.fakeengine import FakeEngine

        return FakeEngine(self, spec, parent=parent, is_stray=is_stray)

    def take_doom(self, proc: Proc) -> bool:
        """Whether this instance dies while it starts."""
        if self.takes_sockets and self.doomed[proc.unit] <= 0:
            return False
        if self.takes_sockets:
            self.doomed[proc.unit] -= 1
        self.judge.note(f"{proc} crashes while it starts")
        proc.is_blemished = "crashes at start"
        proc.wait_status = 1 << 8  # exit(1)
        proc.kill()
        return True

    # ------------------------------------------------------------ descriptors

    def new_memory(self, kind: str, owner: Proc, source_fd: int | None = None) -> Memory:
        """Fresh memory; a descriptor that is given is the simulation's own, whatever it was before.

        A duplicate of the listening socket may get the number, and has the inode, of one that a
        supervisor was given and has closed.
        """
        if source_fd is not None:
            self._descriptors.pop(source_fd, None)
        self._next_memory += 1
        return Memory(
            kind, owner.unit, self._next_memory, self.source_fd if source_fd is None else source_fd
        )

    def hand_out(self, memory: Memory, machine: "FakeMachine") -> int:
        """A descriptor of this memory in the supervisor's own process."""
        fd = os.dup(memory.source_fd)
        self._descriptors[fd] = _Descriptor(memory, os.fstat(fd).st_ino, machine)
        return fd

    def memory_of(self, fd: int) -> Memory | None:
        """What a descriptor of the supervisor holds."""
        known = self._descriptors.get(fd)
        return known.memory if known is not None and _is_open(fd, known.inode) else None

    def open_descriptors(self, machine: "FakeMachine") -> list[tuple[int, Memory]]:
        """Descriptors that a supervisor got and has not closed."""
        return [
            (fd, d.memory)
            for fd, d in self._descriptors.items()
            if d.machine is machine and _is_open(fd, d.inode)
        ]

    def check_load(self, cache: Proc) -> None:
        """The weights are read from disk: nobody may hold them at this moment."""
        machine = self.machine
        if machine is not None and any(
            (m.kind, m.owner) == ("weights", cache.unit) for _, m in self.open_descriptors(machine)
        ):
            self.judge.breach(f"{cache.unit} loads what the supervisor still holds")

    def close_descriptors(self, machine: "FakeMachine") -> None:
        """The kernel closes what a dead supervisor held."""
        for fd, _ in self.open_descriptors(machine):
            os.close(fd)
            del self._descriptors[fd]

    def close(self) -> None:
        """End of the simulation."""
        os.close(self.source_fd)
        for proc in self.procs.values():
            proc.discard()


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False
