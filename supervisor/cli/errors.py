"""How errors look on the command line: one line on stderr, and the exit code that goes with it."""

import sys
from typing import Any, Final

from supervisor.errors import UnderstudyError

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_REACHABLE",
    "EXIT_OK",
    "EXIT_PRECONDITION",
    "EXIT_USAGE",
    "AdminError",
    "report",
]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_REACHABLE: Final = 3
EXIT_PRECONDITION: Final = 4
EXIT_INTERRUPTED: Final = 130
"""As a shell reports a process that SIGINT ended."""

_PRECONDITION_STATUS: Final = frozenset({404, 409, 412, 423, 429})


class AdminError(UnderstudyError):
    """The supervisor refused or failed a request; it answered with a problem document."""

    code = "admin"

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        title = str(problem.get("title") or f"HTTP status {status}")
        super().__init__(
            str(problem.get("detail") or title),
            hint=str(problem.get("hint") or ""),
            details=problem,
        )
        self.status = status
        self._code = str(problem.get("code") or self.code)

    @property
    def stable_code(self) -> str:
        """The code that the supervisor gave."""
        return self._code

    @property
    def exit(self) -> int:
        """By the code where this release knows it, else by the HTTP status."""
        known = _exit_codes(UnderstudyError)
        if self._code in known:
            return known[self._code]
        return EXIT_PRECONDITION if self.status in _PRECONDITION_STATUS else EXIT_FAILED


def _exit_codes(root: type[UnderstudyError]) -> dict[str, int]:
    codes = {root.code: root.exit_code}
    for child in root.__subclasses__():
        codes.update(_exit_codes(child))
    return codes


def report(error: UnderstudyError) -> int:
    """Print the error on stderr and return the exit code."""
    for finding in getattr(error, "findings", ()):
        print(finding, file=sys.stderr)
    text = " ".join(f"error: {error.stable_code}: {error}".split())
    print(text, file=sys.stderr)
    return error.exit if isinstance(error, AdminError) else error.exit_code
