"""`supervisor resume NAME`: start a batch engine again that was evicted."""

from supervisor.cli.operation import perform
from supervisor.cli.options import DryRunOption, EngineArgument, FileOption, Output, OutputOption


def command(
    name: EngineArgument,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
    dry_run: DryRunOption = False,
) -> None:
    """Bring evicted batch engine NAME back."""
    perform("resume", name, file=file, output=output, dry_run=dry_run)
