"""The page about the command line, from the commands themselves."""

import inspect
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

from supervisor.cli.app import VERBS

__all__ = ["cli_page"]

_HEAD = """\
# The command line

<!-- Printed from supervisor/cli by `make docs`; edit the docstrings there. -->

`supervisor VERB --help` says the same. `python -m supervisor` is the same command.

| exit code | meaning |
|---|---|
| 0 | ok |
| 1 | failed |
| 2 | bad configuration or usage |
| 3 | no supervisor can be reached |
| 4 | a precondition does not hold |

An error is one line on stderr, `error: CODE: what happened; what to do`. `-o json` prints one JSON
document on stdout.

Verbs that need a running supervisor find it by `-f FILE`, or without it when only one runs: `run`
leaves a small file in `$XDG_RUNTIME_DIR/understudy` (or `/tmp/understudy-UID`; another folder with
`UNDERSTUDY_REGISTRY`) and takes it away at its end. They speak to the Unix socket `admin.sock` in
the state directory.
"""


def cli_page() -> str:
    """The text of `docs/CLI.md`."""
    return "\n".join([_HEAD, *(_verb(verb) for verb in VERBS)])


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One argument or option, read from the signature: typer's own classes change often."""

    spelling: str
    meaning: str
    is_option: bool


def _verb(verb: str) -> str:
    command = import_module(f"supervisor.cli.{verb}").command
    signature = inspect.signature(command)
    parameters = [_parameter(parameter) for parameter in signature.parameters.values()]
    arguments = [p.spelling for p in parameters if not p.is_option]
    has_options = any(p.is_option for p in parameters)
    usage = ["supervisor", verb, *(["[OPTIONS]"] if has_options else []), *arguments]
    lines = [f"## `{verb}`", "", "```", " ".join(usage), "```", ""]
    lines += [inspect.getdoc(command) or "", ""]
    if parameters:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{_cell(p.spelling)}` | {_cell(p.meaning)} |" for p in parameters]
        lines.append("")
    return "\n".join(lines)


def _parameter(parameter: inspect.Parameter) -> _Parameter:
    kind, info = _unpack(parameter.annotation)
    help_text, default = str(info.help or ""), parameter.default
    if isinstance(info, ArgumentInfo):
        return _Parameter(str(info.metavar or parameter.name.upper()), help_text, False)
    # In `Annotated`, typer keeps the first spelling where a default would stand.
    spellings = [
        text
        for text in (info.default, *(info.param_decls or ()))
        if isinstance(text, str) and text.startswith("-")
    ] or [f"--{parameter.name.replace('_', '-')}"]
    spelling = ", ".join(spellings)
    if kind is not bool:
        choices = "|".join(kind) if issubclass(kind, StrEnum) else ""
        spelling += f" {choices or info.metavar or kind.__name__.upper()}"
        if default is not None:
            help_text += f" Default: {default}."
    return _Parameter(spelling, help_text, True)


def _unpack(annotation: Any) -> tuple[type[Any], ArgumentInfo | OptionInfo]:  # noqa: ANN401
    """The type and typer's information of `Annotated[X | None, info]`."""
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"{annotation} tells no help text; write Annotated[..., typer.Option(...)]")
    kind, info = get_args(annotation)
    inner = [arg for arg in get_args(kind) if arg is not NoneType]
    return (inner[0] if inner else kind), info


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
