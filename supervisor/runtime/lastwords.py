"""What a process said last: the tail of its log, for the error that tells how its start failed.

Our own processes end with one line `error: CODE: SENTENCE`. The code in it is compared as a code,
never looked for in the text: a sentence may mention another one.
"""

import contextlib
from pathlib import Path
from typing import Final

__all__ = ["code_of", "log_bytes", "log_tail"]

_TAIL_BYTES: Final = 4096
_ERROR: Final = "error: "


def log_bytes(path: Path) -> int:
    """How long the log is now: what is said from here on is said by the next instance."""
    with contextlib.suppress(OSError):  # there is none yet
        return path.stat().st_size
    return 0


def log_tail(path: Path, *, since_bytes: int = 0, lines: int = 3) -> str:
    """What a process said last, for an error message; empty when there is no log.

    Its line `error: CODE: SENTENCE` says it all, where there is one. What lies before
    `since_bytes` was said by others.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        size_bytes = path.stat().st_size
        begin_bytes = since_bytes if since_bytes <= size_bytes else 0  # somebody has emptied it
        file.seek(max(begin_bytes, size_bytes - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
        found = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in found if line.startswith(_ERROR)]
        return errors[-1].removeprefix(_ERROR) if errors else " | ".join(found[-lines:])
    return ""


def code_of(last_words: str) -> str:
    """The stable code in `[error: ]CODE: SENTENCE`; empty when that is not what was said."""
    code, colon, _ = last_words.removeprefix(_ERROR).partition(": ")
    return code if colon and code.replace("_", "").isalnum() else ""
