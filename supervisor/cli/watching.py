"""Two ways to watch a supervisor come up: a progress bar on a terminal, lines elsewhere."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli.render import console, event_line
from supervisor.observe.observer import RunObserver

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

__all__ = ["LineObserver", "TerminalObserver", "ready_lines"]

_LINE_EVERY_S: Final = 2.0


def ready_lines(status: Mapping[str, Any], gateway: str, admin: str) -> list[str]:
    """What an operator wants to know first."""
    lines = []
    for group in status.get("groups") or ():
        standby = ", ".join(map(str, group.get("standby") or ())) or "none yet"
        primary = group.get("primary") or "none yet"
        lines.append(f"ready: {group.get('name')}: primary {primary}, standby {standby}")
    return [*lines, f"clients: http://{gateway}/v1", f"admin: http://{admin}"]


class LineObserver(RunObserver):
    """One line for each thing, for logs and pipes."""

    def __init__(self, *, gateway: str, admin: str) -> None:
        self._addresses = (gateway, admin)
        self._next_line: dict[str, float] = {}

    def __enter__(self) -> "LineObserver":
        return self

    def __exit__(self, *_exc: object) -> None:
        """Nothing is held."""

    def loading(
        self, group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
    ) -> None:
        """A line every two seconds, and the last one."""
        now = time.monotonic()
        if now < self._next_line.get(group, 0.0) and bytes_done < bytes_total:
            return
        self._next_line[group] = now + _LINE_EVERY_S
        _say(_loading_line(group, bytes_done, bytes_total, rate, eta_s))

    def event(self, event: dict[str, Any]) -> None:
        """The event's line."""
        _say(event_line(event))

    def ready(self, status: dict[str, Any]) -> None:
        """Who serves, and where."""
        for line in ready_lines(status, *self._addresses):
            _say(line)


class TerminalObserver(RunObserver):
    """A progress bar per group while weights load; events scroll above it."""

    def __init__(self, *, gateway: str, admin: str) -> None:
        self._addresses = (gateway, admin)
        self._console = console()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "TerminalObserver":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: "TracebackType | None",
    ) -> None:
        self._close()

    def loading(
        self, group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
    ) -> None:
        """Move the group's bar; the last one to finish takes the display away."""
        progress = self._open()
        if group not in self._tasks:
            self._tasks[group] = progress.add_task(f"loading {group}", total=bytes_total)
        left = "" if eta_s is None else f"{eta_s:.0f} s left"
        task = self._tasks[group]
        progress.update(task, completed=bytes_done, total=bytes_total, rate=_rate(rate), left=left)
        if progress.finished:
            self._close()

    def event(self, event: dict[str, Any]) -> None:
        """The event's line, above the bars."""
        self._console.print(event_line(event), markup=False)

    def ready(self, status: dict[str, Any]) -> None:
        """Who serves, and where."""
        self._close()
        for line in ready_lines(status, *self._addresses):
            self._console.print(line, markup=False, style="bold")

    def _open(self) -> "Progress":
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

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()


def _say(line: str) -> None:
    print(line, flush=True)


def _rate(rate: float) -> str:
    from supervisor.topology.surroundings import readable

    return f"{readable(int(rate))}/s" if rate > 0 else ""


def _loading_line(
    group: str, bytes_done: int, bytes_total: int, rate: float, eta_s: float | None
) -> str:
    from supervisor.topology.surroundings import readable

    share = 100 * bytes_done // bytes_total if bytes_total else 100
    line = f"loading {group}: {readable(bytes_done)} of {readable(bytes_total)} ({share} %)"
    line += f", {_rate(rate)}" if rate > 0 else ""
    return line + (f", {eta_s:.0f} s left" if eta_s is not None else "")
