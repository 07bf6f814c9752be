"""`supervisor events`: what happened, one line each."""

import json
import time
from typing import Annotated, Final

import typer

from supervisor.cli.client import AdminClient
from supervisor.cli.options import FileOption, Output, OutputOption
from supervisor.cli.render import event_line
from supervisor.cli.target import connect
from supervisor.errors import NotReachableError

_RECONNECT_S: Final = 30.0
"""A supervisor that restarts is back within a second; after this it is down."""


def command(
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C.")] = False,
    since: Annotated[
        int, typer.Option(metavar="SEQ", min=0, help="Only events after this number.")
    ] = 0,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show events, oldest first. With --follow a restart of the supervisor loses none."""
    client = connect(file)
    if not follow:
        for event in client.events(since=since, follow=False):
            _show(event, output)
        return
    try:
        _follow(client, since, output)
    except KeyboardInterrupt:
        return  # the way to end it


def _follow(client: AdminClient, since: int, output: Output) -> None:
    deadline = None
    while True:
        try:
            for event in client.events(since=since, follow=True):
                _show(event, output)
                since = max(since, int(event.get("seq", since)))
                deadline = None
        except NotReachableError:
            if deadline is None and since == 0:
                raise  # never connected: nothing to wait for
            deadline = deadline or time.monotonic() + _RECONNECT_S
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _show(event: dict[str, object], output: Output) -> None:
    print(json.dumps(event) if output is Output.JSON else event_line(event), flush=True)
