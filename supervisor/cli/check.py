"""`supervisor check FILE`: every error of a topology at once."""

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING

import typer

from supervisor.cli.errors import EXIT_USAGE
from supervisor.cli.options import FileArgument, Output, OutputOption

if TYPE_CHECKING:
    from supervisor.topology import Finding


def command(file: FileArgument, output: OutputOption = Output.TEXT) -> None:
    """Say everything that is wrong with FILE.

    Also what keeps it from running on this machine. Changes nothing. Each error is one line
    FILE:LINE: what is wrong; what to write instead.
    """
    from supervisor.topology import Severity, check

    findings = check(file, os.environ)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if output is Output.JSON:
        answer = {
            "file": str(file),
            "ok": not errors,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(answer, indent=2))
    else:
        _print_lines(str(file), findings, len(errors))
    if errors:
        raise typer.Exit(EXIT_USAGE)


def _print_lines(file: str, findings: "list[Finding]", error_count: int) -> None:
    for finding in findings:
        print(finding, file=sys.stderr)
    warning_count = len(findings) - error_count
    if error_count:
        noun = "error" if error_count == 1 else "errors"
        print(f"error: configuration: {file} has {error_count} {noun}", file=sys.stderr)
    else:
        noun = "warning" if warning_count == 1 else "warnings"
        print(f"{file}: ok" + (f", {warning_count} {noun}" if warning_count else ""))
