"""What every part of the runtime shares. Made once in `supervisor.daemon`."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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

__all__ = ["Services", "child_environment", "policy_of", "python_module"]

_SINGLE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Without these, imports start two to four threads, and a zygote must have exactly one."""

_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Nothing is ever fetched while a service starts: what the checkpoint lacks is an error."""


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


def python_module(module: str, *arguments: str) -> list[str]:
    """Command line of one of our own modules, with this interpreter."""
    return [sys.executable, "-u", "-m", module, *arguments]


def child_environment(*, with_model: bool) -> dict[str, str]:
    """Environment of a child: ours, with our packages importable though nothing is installed."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    rest = env.get("PYTHONPATH", "")
    if root not in rest.split(os.pathsep):
        env["PYTHONPATH"] = f"{root}{os.pathsep}{rest}" if rest else root
    if with_model:
        env |= _SINGLE_THREAD | _OFFLINE
    return env
