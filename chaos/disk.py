"""A small file system of its own for the state directory of one run."""

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from cache.errors import UnderstudyError

__all__ = ["DiskKind", "SkippedError", "is_writable", "small_disk"]

DiskKind = Literal["tmpfs", "ext4"]


class SkippedError(UnderstudyError):
    """This machine cannot run the scenario; says why."""

    code = "chaos_skipped"


@contextlib.contextmanager
def small_disk(place: Path, size: str, kind: DiskKind) -> Iterator[Path]:
    """Mount one; what is left on it is copied beside it for later reading.

    Raises:
        SkippedError: this user may not mount, or the tools are not there.
    """
    place.mkdir(exist_ok=True)
    image = place.parent / "disk.img"
    if kind == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    else:
        image.unlink(missing_ok=True)
        _run("truncate", "-s", size, str(image))
        _run("mkfs.ext4", "-q", str(image))
        _run("mount", "-t", "ext4", "-o", "loop,errors=remount-ro", str(image), str(place))
    try:
        yield place
        logs = place / "state" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, place.parent / "logs", dirs_exist_ok=True)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)  # noqa: S607
        image.unlink(missing_ok=True)  # the loop device keeps it for as long as it needs it


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise SkippedError(f"there is no {command[0]} on this machine") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()
        raise SkippedError(f"a small file system cannot be made here: {reason}")


def is_writable(directory: Path) -> bool:
    """Whether its file system takes new files (a full one does, as far as this is concerned)."""
    probe = directory / ".probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.errno != errno.EROFS
    return True
