"""The catalogue of errors, from the tree of classes: code, exit code, HTTP status, when raised."""

import importlib
import pkgutil
from collections.abc import Iterator

import supervisor
from cache.errors import UnderstudyError

__all__ = ["errors_page"]

_HEAD = """\
# Errors

<!-- Printed from the error classes by `make docs`; edit their docstrings. -->

Every error has a stable code, one sentence and mostly a hint. The same error is a line on the
command line (`error: CODE: sentence; hint`), a problem document of the admin API
(`application/problem+json` with `code` and `hint`), and an event. Programs match on the code.

| code | exit code | HTTP status | when |
|---|---|---|---|
"""

_OUTSIDE = ("cache.errors", "engines.native.errors")
"""Errors that reach the supervisor over a socket; their modules need no torch."""


def errors_page() -> str:
    """The text of `docs/errors.md`."""
    modules = set(_OUTSIDE) | set(_supervisor_modules())
    for name in sorted(modules):
        importlib.import_module(name)
    found = {error for error in _tree(UnderstudyError) if error.__module__ in modules}
    rows = sorted(found, key=lambda error: (error.code, error.__module__, error.__name__))
    return _HEAD + "\n".join(_row(error) for error in rows) + "\n"


def _supervisor_modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(supervisor.__path__, "supervisor."):
        if not module.name.endswith("__main__"):
            yield module.name


def _tree(root: type[UnderstudyError]) -> Iterator[type[UnderstudyError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _row(error: type[UnderstudyError]) -> str:
    meaning = " ".join((error.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
    cells = (f"`{error.code}`", str(error.exit_code), str(error.http_status), meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
