"""`supervisor freeze NAME`: stop the compute of a batch engine, keeping its memory."""

from supervisor.cli.operation import perform
from supervisor.cli.options import EngineArgument, FileOption, Output, OutputOption


def command(
    name: EngineArgument, file: FileOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Stop batch engine NAME; it keeps its memory."""
    perform("freeze", name, file=file, output=output)
