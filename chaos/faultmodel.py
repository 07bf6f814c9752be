"""What every fault has in common: data with a `kind`, and one method that does the harm.

Invariants
    1. Only processes that the system itself names, and that carry its marker, are hit.
    2. Whatever outlasts `inject` (a stop, a limit, a full disk, spinning processes) is registered
       with the world, which undoes it at the end of the run.
"""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from chaos.history import Target
from chaos.load import OpenLoad
from chaos.sockets import client_ports_of
from chaos.system import RunningSystem

__all__ = [
    "DEADLY",
    "FaultModel",
    "Injury",
    "Role",
    "SignalName",
    "World",
    "streams_elsewhere",
]

Role = Literal["primary", "standby", "batch", "zygote", "cache", "gateway", "supervisor"]

SignalName = Literal["KILL", "STOP", "SEGV", "ABRT", "TERM", "INT", "HUP"]

DEADLY: Final = frozenset({"KILL", "SEGV", "ABRT", "TERM", "INT", "HUP"})
"""The signals that end a process."""


@dataclass(frozen=True, slots=True)
class Injury:
    """What a fault did."""

    at_ns: int
    targets: tuple[Target, ...] = ()
    breaks_streams: bool = False
    is_deadly: bool = False
    note: str = ""
    spared: tuple[str, ...] = ()  # streams that are known to be elsewhere, if it breaks any
    problem: str = ""  # what the system answered wrongly while it was hurt


class World(Protocol):
    """The run, as a fault sees it."""

    system: RunningSystem
    load: OpenLoad
    seed: int
    fault_dir: Path  # where `chaos/hooks/sitecustomize.py` in the children looks for orders
    strangers: ExitStack  # what listens on ports of the system and is none of its processes

    def locate(self, role: Role) -> Target:
        """Who has the role now, or had it when the supervisor last answered."""

    def send(self, target: Target, sig: signal.Signals) -> bool:
        """Signal a process of this system; False if it is gone. A stop is undone at the end."""

    def jump_clock(self, offset_s: float) -> int:
        """Set by how much the system's wall clock is off; the moment at which it was done."""

    def on_end(self, undo: Callable[[], None]) -> None:
        """Do this when the run ends, whatever became of it."""


class FaultModel(BaseModel):
    """Base of all faults."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")
    kind: str

    def inject(self, world: World) -> Injury:
        """Do it.

        Raises:
            UnderstudyError: it could not be done; the run ends there, as not judged.
        """
        raise AssertionError(f"{self.kind} does not say what it does in {world}")


def streams_elsewhere(world: World, victims: set[int]) -> tuple[str, ...]:
    """Streams whose client is connected to a gateway worker that is not hit."""
    port = world.system.gateway_port
    workers = {p.pid for p, instance in world.system.marked() if instance.startswith("gateway")}
    living: set[int] = set()
    for pid in workers - victims:
        living |= client_ports_of(pid, port)
    return tuple(name for name, own in world.load.local_ports().items() if own in living)
