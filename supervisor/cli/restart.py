"""`supervisor restart NAME`: replace the process of an engine."""

from supervisor.cli.operation import perform
from supervisor.cli.options import EngineArgument, FileOption, Output, OutputOption


def command(
    name: EngineArgument, file: FileOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Replace the process of engine NAME."""
    perform("restart", name, file=file, output=output)
