"""`supervisor failover --force`: kill the primary and promote a standby."""

from typing import Annotated

import typer

from supervisor.cli.operation import perform
from supervisor.cli.options import DryRunOption, FileOption, GroupOption, Output, OutputOption
from supervisor.errors import PreconditionError


def command(
    *,
    to: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the standby.")] = None,
    group: GroupOption = None,
    force: Annotated[bool, typer.Option("--force", help="Yes, kill the primary.")] = False,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
    dry_run: DryRunOption = False,
) -> None:
    """Kill the primary and promote a standby.

    As if the primary had died. Asks for --force, because promote does the same without
    killing anything.
    """
    if not (force or dry_run):
        raise PreconditionError(
            "a failover kills the primary",
            hint="write --force to do it, or use 'supervisor promote' for a planned switchover",
        )
    perform("failover", file=file, output=output, body={"group": group, "to": to}, dry_run=dry_run)
