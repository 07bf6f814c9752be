"""`supervisor unpause`: the supervisor acts again."""

from supervisor.cli.operation import perform
from supervisor.cli.options import FileOption, Output, OutputOption


def command(file: FileOption = None, output: OutputOption = Output.TEXT) -> None:
    """Let the supervisor act again after pause."""
    perform("unpause", file=file, output=output)
