"""Which supervisor a verb talks to: the one of `-f FILE`, or the only one that runs."""

import os
from dataclasses import dataclass
from pathlib import Path

from supervisor.cli.client import AdminClient
from supervisor.errors import NotReachableError, PreconditionError

__all__ = ["ADMIN_SOCKET", "Target", "connect", "find"]

ADMIN_SOCKET = "admin.sock"
"""Name of the admin socket in the state directory."""


@dataclass(frozen=True, slots=True)
class Target:
    """A supervisor that is said to run."""

    name: str
    state_dir: Path
    socket: Path
    file: Path | None
    """Its topology file, where known."""


def find(file: Path | None) -> Target:
    """The target of a verb.

    Raises:
        TopologyError: `file` has errors.
        NotReachableError: no file is named and none runs.
        PreconditionError: no file is named and several run.
    """
    from supervisor.cli import registry

    entries = registry.running(os.environ)
    if file is not None:
        absolute = str(file.absolute())
        entries = [entry for entry in entries if entry.file == absolute]
        if len(entries) != 1:
            return _from_topology(file)
    if not entries:
        raise _none_runs()
    if len(entries) > 1:
        names = ", ".join(f"{entry.name} ({entry.file})" for entry in entries)
        raise PreconditionError(
            f"{len(entries)} supervisors are running: {names}", hint="name one with -f FILE"
        )
    (entry,) = entries
    return Target(entry.name, Path(entry.state_dir), Path(entry.socket), Path(entry.file))


def _none_runs() -> NotReachableError:
    from supervisor.cli import registry

    for entry in registry.crashed(os.environ):
        return NotReachableError(
            f"the supervisor {entry.name!r} ended without being stopped",
            hint=f"start it again with 'supervisor run {entry.file}'; it adopts what still runs",
        )
    return NotReachableError(
        "no supervisor of this user is running",
        hint="start one with 'supervisor run FILE', or name its topology with -f FILE",
    )


def _from_topology(file: Path) -> Target:
    from supervisor.topology import load

    topology = load(file, os.environ)
    state_dir = topology.state_dir.absolute()
    return Target(topology.name, state_dir, state_dir / ADMIN_SOCKET, file)


def connect(file: Path | None) -> AdminClient:
    """A client of the target's admin API."""
    return AdminClient(find(file).socket)
