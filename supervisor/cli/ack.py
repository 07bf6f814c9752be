"""`supervisor ack`: the operator has seen why a group is BLOCKED or an engine FATAL."""

from supervisor.cli.operation import perform
from supervisor.cli.options import FileOption, GroupOption, Output, OutputOption


def command(
    group: GroupOption = None, file: FileOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Let a BLOCKED group fail over again, and FATAL engines start again.

    A group is BLOCKED when it failed over by judgement more often than its limit allows, an
    engine FATAL when it died young too often; find out why first.
    """
    perform("ack", file=file, output=output, body={"group": group})
