"""`supervisor run FILE`: check, then become the supervisor."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from supervisor.cli.errors import EXIT_USAGE
from supervisor.cli.options import FileArgument
from supervisor.errors import PreconditionError

if TYPE_CHECKING:
    from supervisor.cli.watching import LineObserver, TerminalObserver
    from supervisor.topology import Topology


def command(file: FileArgument) -> None:
    """Start everything in FILE and keep it up.

    Stays in the foreground until stop or SIGTERM.
    Processes that an earlier supervisor of the same state directory left are taken over.
    """
    topology = _checked(file)
    from supervisor import daemon  # late: it brings the whole control plane

    with _registered(topology, file), _observer(topology) as observer:
        code = daemon.run(topology, file, observer=observer)
    if code:
        raise typer.Exit(code)


def _checked(file: Path) -> "Topology":
    """The topology, once nothing speaks against running it here; findings go to stderr."""
    from supervisor.topology import Severity, check, load

    findings = check(file, os.environ)
    for finding in findings:
        print(finding, file=sys.stderr)
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if errors:
        noun = "error" if errors == 1 else "errors"
        print(f"error: configuration: {file} has {errors} {noun}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    return load(file, os.environ)


@contextmanager
def _registered(topology: "Topology", file: Path) -> Iterator[None]:
    """An entry in the run registry, so that other verbs need no `-f`.

    Without one (no folder to write to) the supervisor works all the same, and `-f` finds it.
    """
    from supervisor.cli import registry
    from supervisor.process.identity import read_process_id

    state_dir = topology.state_dir.absolute()
    entry = registry.Entry(
        name=topology.name,
        pid=os.getpid(),
        start_ticks=read_process_id(os.getpid()).start_ticks,
        file=str(file.absolute()),
        state_dir=str(state_dir),
        socket=str(state_dir / "admin.sock"),
    )
    path = None
    try:
        path = registry.register(entry, os.environ)
    except PreconditionError as error:
        print(f"warning: {error}", file=sys.stderr)
    try:
        yield
    finally:
        if path is not None:
            with suppress(OSError):  # an entry of a dead process misleads nobody
                registry.unregister(path)


def _observer(topology: "Topology") -> "LineObserver | TerminalObserver":
    from supervisor.cli.watching import LineObserver, TerminalObserver

    kind = TerminalObserver if sys.stdout.isatty() else LineObserver
    return kind(gateway=str(topology.gateway.listen), admin=str(topology.admin.listen))
