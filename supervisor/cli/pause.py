"""`supervisor pause`: the supervisor keeps its hands off."""

from supervisor.cli.operation import perform
from supervisor.cli.options import FileOption, Output, OutputOption


def command(file: FileOption = None, output: OutputOption = Output.TEXT) -> None:
    """Keep hands off until unpause.

    Nothing is started, stopped, signalled or promoted meanwhile.
    """
    perform("pause", file=file, output=output)
