"""Small file operations that keep a promise: private, whole or not at all, never through a link.

Everything here blocks. Call it before the event loop runs, or from a writer thread.
"""

import os
from pathlib import Path
from typing import Final

from supervisor.errors import ConfigurationError

__all__ = [
    "PRIVATE_DIR_MODE",
    "PRIVATE_FILE_MODE",
    "ensure_private_dir",
    "replace_file",
    "set_aside",
    "sync_dir",
    "write_all",
]

PRIVATE_DIR_MODE: Final = 0o700
PRIVATE_FILE_MODE: Final = 0o600
_QUARANTINE_NAMES: Final = 1000


def ensure_private_dir(path: Path) -> None:
    """Make `path` a directory of ours that nobody else may enter; parents are made as usual.

    Raises:
        ConfigurationError: it is no directory, belongs to another user, or cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_DIR_MODE, exist_ok=True)
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(PRIVATE_DIR_MODE)
    except OSError as error:
        raise ConfigurationError(
            f"the state directory {path} cannot be used: {error.strerror}",
            hint="name another state_dir, or make it writable for this user",
        ) from error
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"the state directory {path} belongs to uid {found.st_uid}, this is {os.geteuid()}",
            hint="run as its owner, or name another state_dir",
        )


def write_all(fd: int, data: bytes) -> None:
    """Write every byte; a short write (a full disk gives one before it fails) goes on.

    Raises:
        OSError: the disk is full or broken; some bytes may be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put `data` at `path` so that a reader, and the disk after a crash, has the old or the new.

    What need not outlive the machine (`durable` False) does not wait for the disk. One writer at a
    time: the temporary name is fixed, so a crash leaves at most one behind.

    Raises:
        OSError: nothing was replaced, or (only from the last step) it may not be durable yet.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, PRIVATE_FILE_MODE)
    try:
        os.fchmod(fd, PRIVATE_FILE_MODE)
        write_all(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    if durable:
        sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file that cannot be used to `<name>.<why>-<n>`; never over an existing one.

    Raises:
        OSError: it could not be renamed, and still lies where it was.
    """
    for number in range(1, _QUARANTINE_NAMES):
        target = path.with_name(f"{path.name}.{why}-{number}")
        if not target.exists() and not target.is_symlink():
            path.rename(target)
            return target
    raise FileExistsError(f"{path} was set aside {_QUARANTINE_NAMES} times already")
