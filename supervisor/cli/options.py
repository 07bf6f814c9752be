"""Options that several verbs share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DryRunOption",
    "EngineArgument",
    "FileArgument",
    "FileOption",
    "GroupOption",
    "Output",
    "OutputOption",
]


class Output(StrEnum):
    """For whom the answer is printed."""

    TEXT = "text"
    JSON = "json"


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Topology file.")]

FileOption = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        metavar="FILE",
        help="Topology file of the supervisor that is meant. Default: the only one running.",
    ),
]

OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="For people, or for programs.")
]

EngineArgument = Annotated[str, typer.Argument(metavar="NAME", help="Engine of the topology.")]

GroupOption = Annotated[
    str | None,
    typer.Option(metavar="GROUP", help="Which group. Default: the only one."),
]

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would happen, and do nothing.")
]
