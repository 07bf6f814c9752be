"""`supervisor promote`: planned switchover."""

from typing import Annotated

import typer

from supervisor.cli.operation import perform
from supervisor.cli.options import DryRunOption, FileOption, GroupOption, Output, OutputOption


def command(
    *,
    to: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the standby.")] = None,
    group: GroupOption = None,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
    expected_epoch: Annotated[
        int | None, typer.Option(metavar="N", help="Refuse unless the group is at this epoch.")
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Switch over to the standby, as planned.

    The standby becomes primary and the primary becomes standby. Streams in flight go on;
    nothing is killed. When the primary is bad, use failover.
    """
    body = {"group": group, "to": to, "expected_epoch": expected_epoch}
    perform("promote", file=file, output=output, body=body, dry_run=dry_run)
