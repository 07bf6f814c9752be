"""`supervisor ack`: the operator has seen why a group is BLOCKED or an engine FATAL."""

from supervisor.cli.operation import perform
from supervisor.cli.options import FileOption, GroupOption, Output, OutputOption


def command(
    group: GroupOption = None, file: FileOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Let a BLOCKED group fail over again.

    It failed over by judgement more often than its limit allows; find out why first.
    """
    perform("ack", file=file, output=output, body={"group": group})
