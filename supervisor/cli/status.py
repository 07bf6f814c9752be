"""`supervisor status`: who is primary, and is there redundancy."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from supervisor.cli.client import AdminClient
from supervisor.cli.options import FileOption, Output, OutputOption
from supervisor.cli.render import console, print_json, status_view
from supervisor.cli.target import connect
from supervisor.errors import NotReachableError

if TYPE_CHECKING:
    from rich.console import RenderableType


def command(
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Time between two looks.")
    ] = 1.0,
) -> None:
    """Show groups, engines, caches and gateway workers."""
    client = connect(file)
    if not watch:
        status = client.status()
        if output is Output.JSON:
            print_json(status)
        else:
            console().print(status_view(status))
        return
    try:
        _watch(client, output, interval)
    except KeyboardInterrupt:
        return  # the way to end it


def _watch(client: AdminClient, output: Output, interval_s: float) -> None:
    if output is Output.JSON or not sys.stdout.isatty():
        while True:
            status = client.status()
            if output is Output.JSON:
                print(json.dumps(status), flush=True)
            else:
                console().print(status_view(status))
            time.sleep(interval_s)
    from rich.live import Live

    with Live(status_view(client.status()), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_look(client), refresh=True)


def _look(client: AdminClient) -> "RenderableType":
    """The status, or why there is none: a supervisor that restarts is back in a moment."""
    try:
        return status_view(client.status())
    except NotReachableError as error:
        return error.message
