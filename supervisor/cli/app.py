"""The `supervisor` command: its verbs, and what becomes of errors."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import typer

from supervisor.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, report
from supervisor.errors import UnderstudyError

__all__ = ["VERBS", "build_app", "run_command_line"]

VERBS: Final = (
    "run", "check", "plan", "stop",
    "status", "promote", "failover",
    "evict", "resume", "freeze", "thaw",
    "pause", "unpause", "restart", "fence", "ack",
    "history", "events", "logs", "version",
)  # fmt: skip
"""In the order of the help page; each is a module of this package with a function `command`."""

_EPILOG: Final = (
    "Exit codes: 0 ok, 1 failed, 2 bad configuration or usage, 3 not reachable, "
    "4 a precondition does not hold."
)


def build_app() -> typer.Typer:
    """The application with every verb."""
    app = typer.Typer(
        name="supervisor",
        help="Keeps LLM inference up: primary, standby and batch engines on one copy of weights.",
        epilog=_EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for verb in VERBS:
        command: Callable[..., Any] = import_module(f"supervisor.cli.{verb}").command
        app.command(verb)(command)
    return app


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every error has become a line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        outcome = build_app()(
            args=list(arguments) or ["--help"], prog_name="supervisor", standalone_mode=False
        )
        sys.stdout.flush()
    except UnderstudyError as error:
        return report(error)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `supervisor history | head`: the reader has what it wanted. Python would complain once
        # more when it flushes stdout at exit, so give it somewhere to go. (Where the pipe breaks
        # inside a command, typer itself ends quietly with 1.)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 -- the last place before the user: no traceback
        return _unexpected(error)
    return outcome if isinstance(outcome, int) else 0


def _unexpected(error: Exception) -> int:
    """Usage errors of the parser (they format themselves), and mistakes of ours."""
    describe = getattr(error, "format_message", None)
    if describe is not None:
        message = " ".join(str(describe()).split()).rstrip(".")
        print(f"error: usage: {message}; see 'supervisor --help'", file=sys.stderr)
        return EXIT_USAGE
    what = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: internal: {what}; please report this", file=sys.stderr)
    return EXIT_FAILED
