"""Printing from a loop that must never wait: lines and display changes go through a thread.

stdout of `supervisor run` may be a pipe that nobody reads, or a terminal stopped by Ctrl-S. A
print would then block the supervisor's loop, and with it detection and takeover.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Outlet"]

_QUEUE_JOBS: Final = 2000
_CLOSE_S: Final = 1.0


class Outlet:
    """Runs jobs one after the other in a thread of its own; drops them when it cannot keep up."""

    def __init__(self, *, queue_jobs: int = _QUEUE_JOBS) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(queue_jobs)
        self._dropped = 0
        # A daemon: a write that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Jobs that were given up because nobody read the output."""
        return self._dropped

    def put(self, job: Callable[[], None]) -> None:
        """Do `job` soon; returns at once, and drops it when too many wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._dropped += 1

    def close(self, *, timeout_s: float = _CLOSE_S) -> None:
        """Finish what waits, at most `timeout_s`."""
        with contextlib.suppress(queue.Full):  # it is stuck: the join below runs out
            self._jobs.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # the reader is gone: nobody to tell
                job()
