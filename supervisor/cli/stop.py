"""`supervisor stop`: end the supervisor and everything it started."""

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from supervisor.cli.client import AdminClient
from supervisor.cli.options import FileOption
from supervisor.cli.target import Target, find
from supervisor.errors import (
    DeadlineExceededError,
    NotReachableError,
    ProtocolError,
    UnderstudyError,
)

_ANSWER_S: Final = 10.0
_POLL_S: Final = 0.05


class StillRunningError(UnderstudyError):
    """The supervisor was told to stop, and something of it is still there."""

    code = "still_running"
    exit_code = 1


def command(
    topology: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Topology file. Default: the only one running."),
    ] = None,
    file: FileOption = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait until it is gone.")
    ] = 30.0,
) -> None:
    """Stop the supervisor and all its processes.

    Waits until they are gone, and names what remains when time runs out.
    """
    target = find(topology or file)
    client = AdminClient(target.socket)
    try:
        pid, ticks = _identity(client.status())
    except NotReachableError as error:
        raise _with_leftovers(error, target) from error
    started = time.monotonic()
    # The answer may be cut off by the very stop that was asked for: the pid is what counts.
    with contextlib.suppress(DeadlineExceededError, NotReachableError):
        client.post("stop", timeout_s=min(timeout, _ANSWER_S))
    _wait_gone(pid, ticks, target, deadline=started + timeout)
    print(f"{target.name}: stopped in {time.monotonic() - started:.1f} s")


def _identity(status: dict[str, Any]) -> tuple[int, int | None]:
    """Pid and start time of the supervisor, taken before it is asked to stop."""
    from supervisor.process.stat import read_stat

    try:
        pid = int(status["supervisor"]["pid"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("the supervisor's status does not name its pid") from error
    stat = read_stat(pid)
    return pid, stat.start_ticks if stat else None


def _wait_gone(pid: int, ticks: int | None, target: Target, *, deadline: float) -> None:
    from supervisor.topology.machine import is_alive

    while is_alive(pid, ticks):
        if time.monotonic() > deadline:
            raise StillRunningError(
                f"the supervisor (pid {pid}) still runs when time is up{_leftovers(target)}",
                hint=f"see its log, then end it with kill -TERM {pid}",
            )
        time.sleep(_POLL_S)
    if left := _leftovers(target):
        raise StillRunningError(
            f"the supervisor is gone{left}",
            hint="end them with kill -KILL, or start the supervisor again to take them over",
        )


def _leftovers(target: Target) -> str:
    """`, and pid 12 (chat-a-3f9c21ab) remains`; empty when nothing does."""
    from supervisor.process.identity import find_marked, state_id_of
    from supervisor.topology.machine import is_alive

    found = find_marked(state_id_of(target.state_dir))
    alive = [f"pid {p.pid} ({name})" for p, name in found if is_alive(p.pid, p.start_ticks)]
    return f", and {', '.join(alive)} remain" if alive else ""


def _with_leftovers(error: NotReachableError, target: Target) -> NotReachableError:
    left = _leftovers(target)
    if not left:
        return error
    return NotReachableError(
        f"{error.message}{left}",
        hint="start the supervisor again to take them over, then stop it",
    )
