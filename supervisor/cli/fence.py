"""`supervisor fence NAME --confirm`: attest that an engine which cannot be killed is harmless."""

from typing import Annotated

import typer

from supervisor.cli.operation import perform
from supervisor.cli.options import EngineArgument, FileOption, Output, OutputOption


def command(
    name: EngineArgument,
    *,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Yes, its process can never run again.")
    ] = False,
    file: FileOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Go on without engine NAME, which SIGKILL did not end.

    Its group promotes nobody as long as it might act. Without --confirm this says what has to be
    looked at; with it you attest that the process can do no harm (it hangs in the kernel, say),
    and the group goes on.
    """
    perform("fence", name, file=file, output=output, body={"confirm": confirm})
