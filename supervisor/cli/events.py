"""`supervisor events`: what happened, one line each."""

import json
import time
from typing import Annotated, Any, Final

import typer

from supervisor.cli.client import AdminClient
from supervisor.cli.options import FileOption, Output, OutputOption
from supervisor.cli.render import event_line
from supervisor.cli.target import connect
from supervisor.errors import DeadlineExceededError, NotReachableError

_RECONNECT_S: Final = 30.0
"""A supervisor that restarts is back within a second; after this it is down."""
_RETRY_S: Final = 0.2


def command(
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C.")] = False,
    since: Annotated[
        int, typer.Option(metavar="SEQ", min=0, help="Only events after this number.")
    ] = 0,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show events, oldest first.

    With --follow also those to come; a restart of the supervisor loses none.
    """
    client = connect(file)
    if not follow:
        for event in client.events(since=since):
            _show(event, output)
        return
    try:
        _follow(client, since, output)
    except KeyboardInterrupt:
        return  # the way to end it


def _follow(client: AdminClient, since: int, output: Output) -> None:
    lost_at: float | None = None
    is_first = True
    while True:
        try:
            for event in client.follow_events(since=since):
                is_first, lost_at = False, None
                _show(event, output)
                since = max(since, _number(event, since))
        except (NotReachableError, DeadlineExceededError):
            lost_at = lost_at or time.monotonic()
            if is_first or time.monotonic() - lost_at > _RECONNECT_S:
                raise
        time.sleep(_RETRY_S)


def _number(event: dict[str, Any], default: int) -> int:
    seq = event.get("seq")
    return seq if isinstance(seq, int) else default


def _show(event: dict[str, Any], output: Output) -> None:
    if output is Output.JSON:
        print(json.dumps(event), flush=True)
    elif isinstance(event.get("skipped"), int):
        print(f"{event['skipped']} events were skipped: read too slowly", flush=True)
    else:
        print(event_line(event), flush=True)
