"""Two ways to watch a supervisor come up: a progress bar on a terminal, lines elsewhere.

Every method is called on the supervisor's loop and only hands a job to the `Outlet`.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from supervisor.cli.outlet import Outlet
from supervisor.cli.render import console, event_line
from supervisor.topology.findings import readable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["LineObserver", "TerminalObserver", "ready_lines"]

_LINE_EVERY_S: Final = 2.0


def ready_lines(status: Mapping[str, Any], gateway: str, admin: str) -> list[str]:
    """What an operator wants to know first; the ports in use, where the file leaves them open."""
    lines = []
    for group in status.get("groups") or ():
        standby = ", ".join(map(str, group.get("standby") or ())) or "none yet"
        primary = group.get("primary") or "none yet"
        lines.append(f"ready: {group.get('name')}: primary {primary}, standby {standby}")
    in_use = status.get("addresses") or {}
    clients, operators = in_use.get("gateway") or gateway, in_use.get("admin") or admin
    return [*lines, f"clients: http://{clients}/v1", f"admin: http://{operators}"]


class _Observer:
    """What both have in common: the outlet, and its end."""

    def __init__(self, *, gateway: str, admin: str) -> None:
        self._addresses = (gateway, admin)
        self._outlet = Outlet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._finish()
        self._outlet.close()

    def _finish(self) -> None:
        """Take back what stands on the screen."""


class LineObserver(_Observer):
    """One line for each thing, for logs and pipes."""

    def __init__(self, *, gateway: str, admin: str) -> None:
        super().__init__(gateway=gateway, admin=admin)
        self._next_line: dict[str, float] = {}

    def loading(
        self, group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
    ) -> None:
        """A line every two seconds, and the last one."""
        now = time.monotonic()
        if now < self._next_line.get(group, 0.0) and bytes_done < bytes_total:
            return
        self._next_line[group] = now + _LINE_EVERY_S
        self._say(_loading_line(group, bytes_done, bytes_total, rate, eta_s))

    def event(self, event: dict[str, Any]) -> None:
        """The event's line."""
        self._say(event_line(event))

    def ready(self, status: dict[str, Any]) -> None:
        """Who serves, and where."""
        for line in ready_lines(status, *self._addresses):
            self._say(line)

    def _say(self, line: str) -> None:
        self._outlet.put(partial(print, line, flush=True))


class TerminalObserver(_Observer):
    """A progress bar per group while weights load; events scroll above it."""

    def __init__(self, *, gateway: str, admin: str) -> None:
        super().__init__(gateway=gateway, admin=admin)
        self._console = console()
        # The next two belong to the outlet's thread.
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def loading(
        self, group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
    ) -> None:
        """Move the group's bar; the last one to finish takes the display away."""
        left = "" if eta_s is None else f"{eta_s:.0f} s left"
        self._outlet.put(partial(self._move, group, bytes_done, bytes_total, _rate(rate), left))

    def event(self, event: dict[str, Any]) -> None:
        """The event's line, above the bars."""
        self._outlet.put(partial(self._console.print, event_line(event), markup=False))

    def ready(self, status: dict[str, Any]) -> None:
        """Who serves, and where."""
        self._finish()
        for line in ready_lines(status, *self._addresses):
            self._outlet.put(partial(self._console.print, line, markup=False, style="bold"))

    def _finish(self) -> None:
        self._outlet.put(self._take_down)

    def _move(self, group: str, done: int, total: int, rate: str, left: str) -> None:
        progress = self._put_up()
        if group not in self._tasks:
            self._tasks[group] = progress.add_task(
                f"loading {group}", total=total, rate="", left=""
            )
        progress.update(self._tasks[group], completed=done, total=total, rate=rate, left=left)
        if progress.finished:
            self._take_down()

    def _put_up(self) -> "Progress":
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TextColumn("{task.fields[rate]}"),
                TextColumn("{task.fields[left]}"),
                console=self._console,
            )
            self._progress.start()
        return self._progress

    def _take_down(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()


def _rate(rate: float) -> str:
    return f"{readable(int(rate))}/s" if rate > 0 else ""


def _loading_line(
    group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
) -> str:
    share = 100 * bytes_done // bytes_total if bytes_total else 100
    line = f"loading {group}: {readable(bytes_done)} of {readable(bytes_total)} ({share} %)"
    line += f", {_rate(rate)}" if rate > 0 else ""
    return line + (f", {eta_s:.0f} s left" if eta_s is not None else "")
