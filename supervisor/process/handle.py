"""`ProcessHandle`: one operating-system process, whoever started it.

Three origins: a child that we spawned, a fork of the zygote, a process adopted after a restart.
They differ only in who learns the exit status: we (by `waitid` on that one pidfd), the zygote
(which reports it), nobody.

Invariants
    1. Only `waitid(P_PIDFD, WNOHANG)` after the pidfd became readable; never a blocking wait,
       never a wait on a pid.
    2. The handle of a child must be closed only after it was reaped, or while it goes on living
       and the supervisor ends; else the zombie is left to `reap_orphans`.
    3. Belongs to one event loop; every method is called on it.
"""

import asyncio
import os
import signal
import time
from typing import Final, Self

from supervisor.process.exitflags import ExitEvidence, ExitProbe
from supervisor.process.identity import Marker, ProcessId, open_pidfd
from supervisor.process.reaper import exit_status_of
from supervisor.process.spawn import Child
from supervisor.process.ticker import Ticker
from supervisor.process.tree import KillReport, ProcessTree, kill_tree

__all__ = ["ProcessHandle"]

_POLL_S: Final = 0.001
_REAP_RETRY_S: Final = 0.005


class ProcessHandle:
    """One process, spawned by us, forked by the zygote, or adopted."""

    def __init__(self, process: ProcessId, pidfd: int, marker: Marker | None) -> None:
        """Own `pidfd` from now on. Use `of_child` or `adopt` instead."""
        self.process = process
        self.marker = marker
        self._pidfd = pidfd
        self._status: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None
        self._probe = ExitProbe(process)
        self._loop.add_reader(pidfd, self._on_readable)

    @classmethod
    def of_child(cls, child: Child) -> Self:
        """The handle of a process that we spawned; it takes the child's pidfd over.

        Raises:
            ProcessNotReadableError: no descriptor left; the child and its pidfd stay the caller's.
        """
        return cls(child.process, child.pidfd, child.marker)

    @classmethod
    def adopt(cls, process: ProcessId, marker: Marker | None) -> Self:
        """The handle of a process that is not our child, or not any more.

        Called for the zygote's forks, and at start for each process in `state.json`.

        Raises:
            ProcessGoneError: it is gone, or its pid has a new owner.
            ProcessNotReadableError: no descriptor left, or /proc hides it.
        """
        pidfd = open_pidfd(process)
        try:
            return cls(process, pidfd, marker)
        except BaseException:
            os.close(pidfd)
            raise

    @property
    def tree(self) -> ProcessTree:
        """The root and marker, for `fence` and `kill_tree`."""
        return ProcessTree(self.process, self.marker)

    @property
    def exit_status(self) -> int | None:
        """Exit code, or the negative signal; None while it runs, and if nobody told us."""
        return self._status

    @property
    def has_ended(self) -> bool:
        """True once the kernel has torn the process down; late, see `wait_user_code_dead`."""
        return self._ended.is_set()

    @property
    def evidence(self) -> ExitEvidence | None:
        """The proof of death, if `wait_user_code_dead` has found it."""
        return self._probe.evidence

    def report_exit(self, exit_status: int) -> None:
        """Take what the zygote reported for its fork: an exit code, or the negative signal.

        A raw wait status goes through `os.waitstatus_to_exitcode` before. What our own `waitid`
        found (after the zygote died, we are the parent) is kept.
        """
        if self._status is None:
            self._status = exit_status

    def send_signal(self, sig: signal.Signals) -> bool:
        """Signal the process through the pidfd. False: it is gone.

        Raises:
            PermissionError: the process changed its user.
        """
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, sig)
        except ProcessLookupError:
            return False
        return True

    async def wait_user_code_dead(self, *, timeout_s: float) -> bool:
        """Wait until no thread of the process can run user code again.

        True is proof. False means that time ran out. Looks at this process only; the promotion
        path uses `fence`, which proves it for the whole tree.
        """
        deadline = time.monotonic() + timeout_s
        async with Ticker(_POLL_S) as ticker:
            while self._probe.poll() is None:
                if time.monotonic() >= deadline:
                    return False
                await ticker.next()
        return True

    async def wait_reaped(self, *, timeout_s: float) -> int | None:
        """Exit status once the kernel has freed everything; None if unknown or time ran out.

        Called by the janitor only; `has_ended` tells the two Nones apart. Takes up to seconds:
        never await it on the promotion path.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return None
        return self._status

    def kill_tree(self, *, timeout_s: float = 1.0) -> KillReport:
        """SIGKILL this process and everything that belongs to it; waits for nobody."""
        return kill_tree(self.tree, timeout_s=timeout_s)

    async def terminate(self, *, grace_s: float) -> bool:
        """SIGTERM, up to `grace_s` for its own clean-up, then SIGKILL for what is left.

        True: it went by itself. A stopped process gets SIGCONT too, else SIGTERM does nothing.
        The tree is killed in both cases, because a clean exit may leave workers behind.
        """
        if self.send_signal(signal.SIGTERM):
            self.send_signal(signal.SIGCONT)
        went_by_itself = await self.wait_user_code_dead(timeout_s=grace_s)
        self.kill_tree()
        return went_by_itself

    def close(self) -> None:
        """Give the descriptors back. Kills nothing; safe to call twice."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._probe.close()

    def _on_readable(self) -> None:
        """The pidfd is readable: the process is a zombie, or reaped by its parent."""
        self._loop.remove_reader(self._pidfd)
        self._retry = None
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            self._finish()  # not our child: the status is the zygote's to report, or lost
            return
        if info is None:  # readable, but its parent may not reap it yet: a tracer holds it
            self._retry = self._loop.call_later(_REAP_RETRY_S, self._on_readable)
            return
        self._status = exit_status_of(info)
        self._finish()

    def _finish(self) -> None:
        self._probe.poll()
        self._ended.set()
