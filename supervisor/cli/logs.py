"""`supervisor logs NAME`: what an engine, zygote, cache daemon or gateway worker printed.

Reads the files in `state_dir/logs`, so it also works when the supervisor is down.
"""

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Final

import typer

from supervisor.cli.target import find
from supervisor.errors import NotFoundError

_CHUNK_BYTES: Final = 64 << 10
_POLL_S: Final = 0.2


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Engine, or another process.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="FILE", help="Topology file. Default: the only one running."
        ),
    ] = None,
) -> None:
    """Show what engine NAME printed.

    Also takes a zygote, cache daemon or gateway worker, such as zygote-chat or gateway-0.
    """
    folder = find(file).state_dir / "logs"
    path = newest_log(folder, name)
    with path.open("rb") as stream:
        for line in deque(stream, maxlen=lines):
            _write(line)
        position = stream.tell()
    if follow:
        try:
            _follow(folder, name, path, position)
        except KeyboardInterrupt:
            return  # the way to end it


def newest_log(folder: Path, name: str) -> Path:
    """The log of `name`: one file for it, or the youngest of one per instance.

    Raises:
        NotFoundError: there is none; the hint lists the names that have one.
    """
    found = list(folder.glob("*.log"))
    own = [path for path in found if _owner(path) == name or path.stem == name]
    if not own:
        known = ", ".join(sorted({_owner(path) for path in found})) or "nothing yet"
        raise NotFoundError(f"{folder} has no log of {name}", hint=f"there are logs of: {known}")
    return max(own, key=lambda path: path.stat().st_mtime_ns)


def _owner(path: Path) -> str:
    """`chat-a-3f9c21ab.log` and `chat-a.log` both belong to `chat-a`."""
    name, _, instance = path.stem.rpartition("-")
    is_instance = len(instance) == 8 and set(instance) <= set("0123456789abcdef")
    return name if name and is_instance else path.stem


def _follow(folder: Path, name: str, path: Path, position: int) -> None:
    """Print what is added to `path` behind `position`; go over to the log of a new instance."""
    while True:
        with path.open("rb") as stream:
            stream.seek(position)
            newest = path
            while newest == path:
                while chunk := stream.read(_CHUNK_BYTES):
                    _write(chunk)
                if os.fstat(stream.fileno()).st_size < stream.tell():
                    stream.seek(0)  # cut by log rotation
                time.sleep(_POLL_S)
                newest = newest_log(folder, name)
            _write(stream.read())  # what came between the last read and the change
        path, position = newest, 0


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
