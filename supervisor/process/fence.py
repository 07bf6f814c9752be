"""Fencing: proof that a process tree can never again write shared memory or answer a client.

Invariants
    1. The caller has cut the route before; no request reaches what is being fenced.
    2. The answer is evidence (exit flags of every thread of every member), never a timer. When
       time runs out the answer is an error, and nobody may be promoted on it.
    3. Nothing here awaits a pidfd, an EOF, a reap or memory: those come up to a second later.
    4. The last scan runs after everybody known is dead and finds nobody new. A process with a
       pending SIGKILL can not finish a fork, so nobody can appear after that.

WARNING: exit flags stop CPU work. GPU kernels already queued may run a little longer; this is
safe only because weights are mapped read-only and each KV slot has one writer per epoch.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from supervisor.process.errors import FenceNotProvenError
from supervisor.process.exitflags import ExitEvidence, ExitProbe
from supervisor.process.handle import ProcessHandle
from supervisor.process.identity import ProcessId
from supervisor.process.ticker import Ticker
from supervisor.process.tree import ProcessTree, kill_one, list_pids, read_table, select_members

__all__ = ["FenceEvidence", "fence"]

_POLL_S: Final = 0.0005
_SCAN_CHUNK: Final = 128  # processes read before the loop gets its turn: about 1 ms


@dataclass(frozen=True, slots=True)
class FenceEvidence:
    """Proof for a whole tree. `members` includes the root."""

    root: ProcessId
    members: tuple[ExitEvidence, ...]
    scans: int
    started_ns: int  # time.monotonic_ns, as all of these
    proven_ns: int

    @property
    def took_ms(self) -> float:
        """From the call to the proof."""
        return (self.proven_ns - self.started_ns) / 1e6


async def fence(
    target: ProcessTree | ProcessHandle,
    *,
    timeout_s: float,
    running_ns: Callable[[], int] = time.monotonic_ns,
) -> FenceEvidence:
    """SIGKILL a whole tree and prove that none of it runs again.

    `running_ns` is the clock of the deadline: one that stands still while this process does not
    run keeps a stopped supervisor from calling a fence failed that it did not look at.

    Called by the `Fence` action, once, after the route is cut and before any promotion; calling
    it again is harmless. A root that is already dead costs one scan of /proc, a living one two.

    Raises:
        FenceNotProvenError: a member still has a live thread when time runs out, or may not be
            killed by us.
        ProcessNotReadableError: no descriptor is left to watch with; nothing is proven either.
        ValueError: the root is this process or one of its ancestors.
    """
    tree = target.tree if isinstance(target, ProcessHandle) else target
    operation = _Fence(tree, timeout_s, running_ns)
    try:
        return await operation.run()
    finally:
        operation.close()


class _Fence:
    """One fence under way: a probe for every member found so far."""

    def __init__(self, tree: ProcessTree, timeout_s: float, running_ns: Callable[[], int]) -> None:
        self._tree = tree
        self._started_ns = time.monotonic_ns()
        self._running_ns = running_ns
        self._deadline_ns = running_ns() + round(timeout_s * 1e9)
        self._probes: dict[ProcessId, ExitProbe] = {}
        self._scans = 0

    def close(self) -> None:
        for probe in self._probes.values():
            probe.close()

    async def run(self) -> FenceEvidence:
        root = ExitProbe(self._tree.root)
        self._probes[self._tree.root] = root
        if root.poll() is None:
            # While it lives its children still name it as parent: find them before the kill.
            self._kill({self._tree.root} | await self._scan())
        await self._wait_all_dead()
        while found := await self._scan() - self._probes.keys():
            self._kill(found)
            await self._wait_all_dead()
            if self._running_ns() >= self._deadline_ns:  # it multiplies as fast as we kill
                raise self._not_proven([self._probes[process] for process in found])
        return FenceEvidence(
            root=self._tree.root,
            members=tuple(self._evidence()),
            scans=self._scans,
            started_ns=self._started_ns,
            proven_ns=time.monotonic_ns(),
        )

    def _evidence(self) -> Iterable[ExitEvidence]:
        return (probe.evidence for probe in self._probes.values() if probe.evidence is not None)

    def _kill(self, members: set[ProcessId]) -> None:
        """The root first. One that we may not kill stays alive, and the wait tells."""
        for process in sorted(members, key=lambda member: member != self._tree.root):
            if process not in self._probes:
                self._probes[process] = ExitProbe(process)
            kill_one(process)

    async def _scan(self) -> set[ProcessId]:
        """Members by one pass over /proc, giving way to the loop every millisecond."""
        self._scans += 1
        table = read_table(())
        pids = iter(list_pids())
        while chunk := tuple(itertools.islice(pids, _SCAN_CHUNK)):
            table |= read_table(chunk)
            await asyncio.sleep(0)
        return select_members(self._tree, table, known=self._probes.keys())

    async def _wait_all_dead(self) -> None:
        async with Ticker(_POLL_S) as ticker:
            while alive := [p for p in self._probes.values() if p.poll() is None]:
                if self._running_ns() >= self._deadline_ns:
                    raise self._not_proven(alive)
                await ticker.next()

    def _not_proven(self, alive: list[ExitProbe]) -> FenceNotProvenError:
        return FenceNotProvenError(
            self._tree.root,
            waited_ms=(time.monotonic_ns() - self._started_ns) / 1e6,
            alive=[probe.process for probe in alive],
            threads=sum(probe.live_threads() for probe in alive),
        )
