"""Verbs that change something: ask, wait until it is done, say what happened."""

from pathlib import Path
from typing import Any, Final

import typer

from supervisor.cli.errors import EXIT_FAILED
from supervisor.cli.options import Output
from supervisor.cli.render import describe_operation, print_json
from supervisor.cli.target import connect

__all__ = ["perform"]

_NOT_DONE: Final = frozenset({"failed", "refused"})


def perform(
    *segments: str,
    file: Path | None,
    output: Output,
    body: dict[str, Any] | None = None,
    dry_run: bool = False,
) -> None:
    """Post to `/v1/<segments>` and print the outcome.

    Raises:
        Exit: with 1 when the operation was carried out and failed.
    """
    answer = connect(file).post(*segments, body=body, dry_run=dry_run)
    operation = answer.get("operation")
    if output is Output.JSON:
        print_json(answer)
    elif isinstance(operation, dict):
        print(describe_operation(operation))
    else:
        print(answer.get("text") or "done")
    if isinstance(operation, dict) and operation.get("state") in _NOT_DONE:
        raise typer.Exit(EXIT_FAILED)
