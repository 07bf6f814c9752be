"""Operating-system processes: spawn, identify, watch, fence, adopt.

The ways in: `spawn` starts a `Child`, `ProcessHandle` owns it (or adopts one that we did not
start), `ExitWatcher` tells within 5 ms that a process died, `fence` kills a whole tree and
proves it, `find_marked` finds what a crashed supervisor left behind.

WARNING: a pid is not an identity. Everything here takes a `ProcessId`, and so should you.
"""

from supervisor.process.errors import (
    FenceNotProvenError,
    ProcessGoneError,
    ProcessNotReadableError,
    ProcParseError,
    SpawnError,
)
from supervisor.process.exitflags import EvidenceKind, ExitEvidence, ExitProbe, ExitWatcher, Watch
from supervisor.process.fence import FenceEvidence, fence
from supervisor.process.handle import ProcessHandle
from supervisor.process.identity import (
    MARKER_VARIABLE,
    MARKER_WIDTH,
    BootId,
    Marker,
    ProcessId,
    age_s,
    find_marked,
    is_same,
    own_boot_id,
    read_marker,
    read_process_id,
    signal_process,
    state_id_of,
)
from supervisor.process.reaper import Reaped, become_subreaper, reap_orphans
from supervisor.process.reserve import RESERVE, DescriptorReserve, spare
from supervisor.process.spawn import Child, open_log, spawn
from supervisor.process.stat import (
    ProcStat,
    SchedDelta,
    SchedStat,
    read_sched,
    read_stat,
    read_threads,
    sched_delta,
)
from supervisor.process.ticker import Ticker
from supervisor.process.tree import KillReport, ProcessTree, find_members, kill_tree

__all__ = [
    "MARKER_VARIABLE",
    "MARKER_WIDTH",
    "RESERVE",
    "BootId",
    "Child",
    "DescriptorReserve",
    "EvidenceKind",
    "ExitEvidence",
    "ExitProbe",
    "ExitWatcher",
    "FenceEvidence",
    "FenceNotProvenError",
    "KillReport",
    "Marker",
    "ProcParseError",
    "ProcStat",
    "ProcessGoneError",
    "ProcessHandle",
    "ProcessId",
    "ProcessNotReadableError",
    "ProcessTree",
    "Reaped",
    "SchedDelta",
    "SchedStat",
    "SpawnError",
    "Ticker",
    "Watch",
    "age_s",
    "become_subreaper",
    "fence",
    "find_marked",
    "find_members",
    "is_same",
    "kill_tree",
    "open_log",
    "own_boot_id",
    "read_marker",
    "read_process_id",
    "read_sched",
    "read_stat",
    "read_threads",
    "reap_orphans",
    "sched_delta",
    "signal_process",
    "spare",
    "spawn",
    "state_id_of",
]
