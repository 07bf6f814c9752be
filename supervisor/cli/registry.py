"""Which supervisors this user runs: one small file each, in a private folder.

`supervisor status` without `-f` must find the one that runs. `run` writes
`<name>-<pid>.json` and removes it at its end; a file whose process (pid and start time) is gone
is stale and ignored, so a killed supervisor misleads nobody.

The folder is `$XDG_RUNTIME_DIR/understudy`, else `/tmp/understudy-<uid>`; readers look in both,
because a service manager and a login shell seldom agree on the variable. `UNDERSTUDY_REGISTRY`
names another folder, and then only that one counts.

WARNING: an entry tells where a socket is said to be. Whoever connects there is checked by the
supervisor (peer uid), and the folder must be ours alone, so an entry of another user is not read.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import PreconditionError
from supervisor.topology.machine import is_alive

__all__ = ["Entry", "crashed", "folders", "register", "running", "unregister"]

_MAX_ENTRY_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Entry:
    """One running supervisor."""

    name: str
    pid: int
    start_ticks: int  # with the pid, an identity within this boot
    file: str  # absolute path of its topology
    state_dir: str
    socket: str


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Where entries may lie; the first is where new ones are written."""
    if named := environ.get("UNDERSTUDY_REGISTRY"):
        return [Path(named)]
    uid = os.geteuid()
    runtime = environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(runtime) / "understudy"] if runtime else []
    if not runtime and (login := Path(f"/run/user/{uid}")).is_dir():
        candidates.append(login / "understudy")
    return [*candidates, Path(f"/tmp/understudy-{uid}")]  # noqa: S108 -- checked to be ours alone


def register(entry: Entry, environ: Mapping[str, str]) -> Path:
    """Write the entry of a supervisor that starts; returns its file for `unregister`.

    Raises:
        PreconditionError: the folder is not ours alone, or cannot be written.
    """
    folder = folders(environ)[0]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            raise PreconditionError(
                f"{folder} is not a folder of yours alone",
                hint=f"remove it, or run chmod 700 {folder}",
            )
        _forget_crashed(folder, entry.state_dir)
        path = folder / f"{entry.name}-{entry.pid}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(entry)), encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        raise PreconditionError(
            f"{folder} cannot be written: {error.strerror}",
            hint="set UNDERSTUDY_REGISTRY to a folder of yours",
        ) from error
    return path


def crashed(environ: Mapping[str, str]) -> list[Entry]:
    """Entries whose process is gone without having removed them."""
    found = [entry for folder in folders(environ) for entry in _entries(folder)]
    return [entry for entry in found if not is_alive(entry.pid, entry.start_ticks)]


def unregister(path: Path) -> None:
    """Remove an entry; it may be gone already."""
    path.unlink(missing_ok=True)


def running(environ: Mapping[str, str]) -> list[Entry]:
    """Every entry whose process is alive, by name and pid."""
    found = {entry.pid: entry for folder in folders(environ) for entry in _entries(folder)}
    alive = [entry for entry in found.values() if is_alive(entry.pid, entry.start_ticks)]
    return sorted(alive, key=lambda entry: (entry.name, entry.pid))


def _entries(folder: Path) -> Iterator[Entry]:
    if not _is_private(folder):
        return
    for path in sorted(folder.glob("*.json")):
        if (entry := _read(path)) is not None:
            yield entry


def _forget_crashed(folder: Path, state_dir: str) -> None:
    """Remove what earlier supervisors of this state directory left: the new one takes over."""
    for path in folder.glob("*.json"):
        entry = _read(path)
        if entry and entry.state_dir == state_dir and not is_alive(entry.pid, entry.start_ticks):
            unregister(path)


def _read(path: Path) -> Entry | None:
    """None for a file that is not an entry, or vanished: the registry is a hint, not a record."""
    try:
        with path.open("rb") as stream:
            value = json.loads(stream.read(_MAX_ENTRY_BYTES))
        return Entry(
            name=str(value["name"]),
            pid=int(value["pid"]),
            start_ticks=int(value["start_ticks"]),
            file=str(value["file"]),
            state_dir=str(value["state_dir"]),
            socket=str(value["socket"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_private(folder: Path) -> bool:
    try:
        facts = folder.lstat()
    except OSError:
        return False
    others = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not others
