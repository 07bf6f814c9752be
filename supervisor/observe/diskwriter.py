"""One thread that does one piece of disk work when poked, so that nobody else waits for a disk.

Invariants
    1. `poke` never blocks and never raises: a full, read-only or hanging disk is the thread's
       problem, visible as `degraded`.
    2. Work that failed is tried again every `retry_s`, until it succeeds or the writer is closed.
    3. The lock is held for bookkeeping only, never while the disk is touched.

The thread is a daemon thread: a disk that never answers must not keep the process alive.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["DiskWriter"]

_HANGS_AFTER_S: Final = 5.0
"""A write that takes longer counts as degraded: disks answer in milliseconds."""


class DiskWriter:
    """Runs `work` in a thread: once after one or many pokes, again later after a failure.

    `work` does everything that is pending and raises OSError when it could not. `on_change` is
    called from the thread with the reason when trouble begins, and with "" when it is over.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        *,
        retry_s: float = 1.0,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._retry_s = retry_s
        self._on_change = on_change
        self._condition = threading.Condition()
        self._wanted = 0  # pokes so far
        self._done = 0  # pokes whose work is on disk
        self._attempted = 0  # pokes that were tried at least once
        self._closing = False
        self._last_try = False
        self._retry_at = 0.0  # monotonic; pokes come faster than a disk recovers
        self._trouble = ""
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def degraded(self) -> str:
        """Why the disk does not take what it should; empty while all is well."""
        busy_since = self._busy_since
        if self._trouble or busy_since is None:
            return self._trouble
        waited_s = time.monotonic() - busy_since
        return (
            f"the disk has not answered for {waited_s:.0f} s" if waited_s > _HANGS_AFTER_S else ""
        )

    def poke(self) -> None:
        """There is work. Never blocks, never raises."""
        with self._condition:
            self._wanted += 1
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until all work of pokes so far is on disk. Blocks: not for the event loop.

        False: it failed (and will be retried), or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            target = self._wanted
            while self._done < target and self._attempted < target:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._condition.wait(remaining_s)
            return self._done >= target

    def close(self, *, timeout_s: float) -> bool:
        """Do pending work once more and end the thread. False: not all of it reached the disk.

        Blocks for at most `timeout_s`. A later `poke` is remembered but never done.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        with self._condition:
            return self._done >= self._wanted

    def _run(self) -> None:
        while (target := self._next_target()) is not None:
            self._attempt(target)

    def _next_target(self) -> int | None:
        """Wait for work that is due; None ends the thread, after one last try."""
        with self._condition:
            while True:
                pending = self._wanted > self._done
                pause_s = self._retry_at - time.monotonic()
                if self._closing and (not pending or self._last_try):
                    return None
                if pending and (pause_s <= 0 or self._closing):
                    self._last_try = self._closing
                    return self._wanted
                self._condition.wait(pause_s if pending else None)

    def _attempt(self, target: int) -> None:
        self._busy_since = time.monotonic()
        trouble = ""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 -- a dead writer thread would lose everything after
            trouble = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.strerror:
                trouble = error.strerror
        self._busy_since = None
        with self._condition:
            changed = bool(trouble) != bool(self._trouble)
            self._trouble = trouble
            self._attempted = max(self._attempted, target)
            self._retry_at = time.monotonic() + self._retry_s if trouble else 0.0
            if not trouble:
                self._done = max(self._done, target)
            self._condition.notify_all()
        if changed and self._on_change is not None:
            self._on_change(trouble)
