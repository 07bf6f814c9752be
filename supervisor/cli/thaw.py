"""`supervisor thaw NAME`: let a frozen batch engine go on."""

from supervisor.cli.operation import perform
from supervisor.cli.options import EngineArgument, FileOption, Output, OutputOption


def command(
    name: EngineArgument, file: FileOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Let frozen batch engine NAME go on."""
    perform("thaw", name, file=file, output=output)
