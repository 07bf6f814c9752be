"""What every part of the runtime shares. Made once in `supervisor.daemon`."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.core.restart import SERVED_PAUSE_S, RestartPolicy
from supervisor.observe.events import EventLog
from supervisor.observe.looplag import LoopLag
from supervisor.observe.metrics import Metrics
from supervisor.observe.observer import RunObserver
from supervisor.process import ProcessId
from supervisor.runtime.machine import Clock, Machine
from supervisor.runtime.paths import StatePaths
from supervisor.runtime.patience import Patience
from supervisor.topology.schema import Failover, Topology

__all__ = ["Services", "policy_of"]


@dataclass
class Services:
    """Shared parts. `is_stopping` is set once and never cleared."""

    topology: Topology
    paths: StatePaths
    state_id: str
    machine: Machine
    events: EventLog
    metrics: Metrics
    observer: RunObserver
    clock: Clock = time
    is_paused: bool = False
    is_stopping: bool = False
    cwd: Path = field(default_factory=Path.cwd)
    owned_pids: set[int] = field(default_factory=set)  # processes that a handle will reap
    lag: LoopLag = field(default_factory=LoopLag)  # the runtime puts the one that runs here
    attested: dict[str, ProcessId] = field(default_factory=dict)
    """Instances that cannot be killed, and that the operator has declared harmless."""

    @property
    def patience(self) -> Patience:
        """Deadlines for others, in running time."""
        return Patience(self.lag)

    @property
    def disk_trouble(self) -> str:
        """Why the state directory takes nothing now; empty while it does.

        A child that cannot make its socket there dies young, and that is not its fault.
        """
        return self.events.degraded


def policy_of(failover: Failover, *, device: str) -> RestartPolicy:
    """The restart policy that a group's `failover` section describes."""
    return RestartPolicy(
        served_pause_s=SERVED_PAUSE_S if device == "cpu" else 0.0,  # `_let_streams_go_on` waits
        stable_after_s=failover.stable_after,
        max_backoff_s=failover.max_backoff,
        max_young_deaths=failover.max_young_deaths,
    )
