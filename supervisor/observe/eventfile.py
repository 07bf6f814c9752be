"""The file below the event log: append whole lines, sync, and repair what a crash left torn.

One thread at a time, and it may block. The file is opened anew after every failure, and then its
end is looked at again: a line is either complete in the file, or cut off and written once more.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.observe.files import PRIVATE_FILE_MODE, set_aside, sync_dir, write_all

__all__ = ["EventFile", "Tail"]

_TAIL_BYTES: Final = 4 << 20
"""How much of the end is read at start; some 20,000 events."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of the file."""

    events: list[dict[str, Any]]
    last_seq: int
    note: str  # what was wrong with it; empty when nothing was


class EventFile:
    """Appends events; `read_tail` at start. What fails raises OSError and may be repeated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def read_tail(self, count: int) -> Tail:
        """The newest events, after repair. Never raises: a file that cannot be read is noted."""
        try:
            self._fd, tail = self._open(count)
        except OSError as error:
            return self._read_only_tail(count, error)
        return tail

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Write events that are not in the file yet, and sync.

        Raises:
            OSError: some may not be durable; call again with the same ones.
        """
        last_seq = -1
        try:
            if self._fd is None or self._was_renamed(self._fd):
                self.close()
                self._fd, tail = self._open(1)
                last_seq = tail.last_seq
            write_all(self._fd, b"".join(_line(e) for e in events if e["seq"] > last_seq))
            os.fdatasync(self._fd)
        except OSError:
            self.close()  # opened anew, and repaired, at the next attempt
            raise

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self, count: int) -> tuple[int, Tail]:
        """Open the file, cut off a torn last line, and read its newest events.

        A file without one readable event is set aside, and a new one is begun.

        Raises:
            OSError: it cannot be opened, or not be repaired.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, PRIVATE_FILE_MODE)
        try:
            os.fchmod(fd, PRIVATE_FILE_MODE)
            size = os.fstat(fd).st_size
            if not size:
                sync_dir(self._path.parent)
                return fd, Tail([], 0, "")
            start = max(0, size - _TAIL_BYTES)
            tail, end = _read(os.pread(fd, size - start, start), count, is_cut=start > 0)
            if tail.events:
                if start + end < size:
                    os.ftruncate(fd, start + end)
                return fd, tail
            target = set_aside(self._path, "corrupt")
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        fd, _ = self._open(count)
        return fd, Tail([], 0, f"{self._path.name} held no readable event: now {target.name}")

    def _was_renamed(self, fd: int) -> bool:
        """Whether the path no longer leads to the open file (rotated, or deleted)."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        here = os.fstat(fd)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _read_only_tail(self, count: int, why: OSError) -> Tail:
        """What can be had when the file cannot be opened for writing."""
        note = f"{self._path.name} cannot be written: {why.strerror}"
        try:
            with self._path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
                file.seek(start)
                tail, _ = _read(file.read(_TAIL_BYTES), count, is_cut=start > 0)
        except OSError:
            return Tail([], 0, note)
        return Tail(tail.events, tail.last_seq, note)


def _read(data: bytes, count: int, *, is_cut: bool) -> tuple[Tail, int]:
    """Newest events of the data, and where its last complete line ends."""
    end = data.rfind(b"\n") + 1
    events, bad_lines = _parse(data[:end], is_cut=is_cut)
    notes = []
    if end < len(data):
        notes.append(f"{len(data) - end} bytes of a torn last line were cut off")
    if bad_lines:
        notes.append(f"{bad_lines} lines could not be read")
    last_seq = max((event["seq"] for event in events), default=0)
    return Tail(events[-count:], last_seq, "; ".join(notes)), end


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    ) + b"\n"  # fmt: skip


def _parse(data: bytes, *, is_cut: bool) -> tuple[list[dict[str, Any]], int]:
    """Events of complete lines, and how many lines were none. `is_cut`: starts mid-line."""
    lines = data.split(b"\n")[1 if is_cut else 0 :]
    events: list[dict[str, Any]] = []
    bad_lines = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or type(event.get("seq")) is not int:
                raise ValueError("not an event")  # noqa: TRY301 -- counted below
        except ValueError:
            bad_lines += 1
            continue
        events.append(event)
    return events, bad_lines
