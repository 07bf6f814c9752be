"""What is wrong with a topology, where, and what to write instead.

`Issue` is what a check says: a place in the document and two sentences. `Finding` is what a
person reads: the same with file, line and column. Checks yield issues and know no files.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Finding", "Issue", "Place", "Severity", "closest", "dotted", "one_of", "readable"]

Place = tuple[str | int, ...]
"""A place in the document: `("groups", 0, "kv", "slots")`. Empty: the document itself."""

_SIMILAR: Final = 0.6
_PLAIN_KEY = re.compile(r"[\w-]+")


class Severity(StrEnum):
    """`error` keeps a supervisor from starting, `warning` does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that a check does not like."""

    place: Place
    what: str
    instead: str
    severity: Severity = Severity.ERROR
    needs: tuple[Place, ...] = ()
    """Places whose values the check relied on: when one of them is itself wrong, the issue says
    nothing new and is dropped. The issue's own place always counts."""
    at_key: bool = False
    """Points at the key, not at its value."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `supervisor check`."""

    file: str
    """The file as the caller named it, or the environment variable that set the value."""
    line: int
    """From 1; 0 when the finding is about no line (file missing, environment variable)."""
    column: int
    path: str
    """Such as `groups[0].engines[1].role`; empty for the document itself."""
    what: str
    instead: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        kind = "warning: " if self.severity is Severity.WARNING else ""
        subject = f"{self.path}: " if self.path else ""
        return f"{where}: {kind}{subject}{self.what}; {self.instead}"


def dotted(place: Place) -> str:
    """`("groups", 0, "name")` -> `groups[0].name`."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if _PLAIN_KEY.fullmatch(part) else repr(part)
            text += f".{shown}" if text else shown
    return text


def closest(word: object, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, or None."""
    candidates = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(str(word).casefold(), candidates, n=1, cutoff=_SIMILAR)
    return candidates[found[0]] if found else None


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def readable(size_bytes: int) -> str:
    """1610612736 -> `1.5 GiB`, for people."""
    for unit, unit_bytes in (
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"
