"""`supervisor evict NAME`: kill a batch engine so that its memory comes back."""

from typing import Annotated

import typer

from supervisor.cli.operation import perform
from supervisor.cli.options import DryRunOption, EngineArgument, FileOption, Output, OutputOption


def command(
    name: EngineArgument,
    hold: Annotated[
        bool, typer.Option("--hold", help="Stay away until resume; else it comes back by itself.")
    ] = False,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
    dry_run: DryRunOption = False,
) -> None:
    """Kill batch engine NAME to get its memory back."""
    perform("evict", name, file=file, output=output, body={"hold": hold}, dry_run=dry_run)
