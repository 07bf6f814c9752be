"""Prints `docs/errors.md` from the error classes: `python -m supervisor.admin.errors_doc > FILE`.

Walks every subclass of `UnderstudyError` in the modules that work without torch. Run it as a
program, in an interpreter of its own: it forbids the import of torch, and leaves out the modules
that cannot do without.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final

from cache.errors import UnderstudyError

__all__ = ["error_classes", "render_errors_doc"]

_PACKAGES: Final = ("cache", "engines", "supervisor", "chaos")
_FORBIDDEN: Final = frozenset({"torch", "transformers", "safetensors", "numpy", "tokenizers"})

_HEAD = """\
# Errors

Printed from the error classes by `python -m supervisor.admin.errors_doc`; do not edit.

Every error has a stable code. The same object becomes the line on the terminal (`error: code:
what happened; what to do`), the exit code of the command, and the problem document of the admin
API (RFC 9457, with `code` and `hint`).

| code | exit code | HTTP status | class | when |
|---|---|---|---|---|
"""


class _WithoutModels(importlib.abc.MetaPathFinder):
    """Makes the import of what brings torch along fail at once."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _FORBIDDEN:
            raise ModuleNotFoundError(f"{fullname} is left out here", name=fullname)
        return None


def import_everything() -> list[str]:
    """Import each module that needs no torch; returns the names of those left out."""
    sys.meta_path.insert(0, _WithoutModels())
    left_out: list[str] = []
    for package in _PACKAGES:
        try:
            root = importlib.import_module(package)
        except ImportError:
            continue  # not part of this installation
        for name in sorted(_module_names(root)):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in _PACKAGES:
                    raise  # a mistake of ours; else an optional library, or one that is forbidden
                left_out.append(name)
    return left_out


def _module_names(package: ModuleType) -> Iterator[str]:
    """All modules below a package, found without importing them; programs are no modules."""
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if info.name.endswith(".__main__"):
            continue
        yield info.name
        if info.ispkg:
            spec = importlib.machinery.PathFinder.find_spec(
                info.name, [str(path) for path in package.__path__]
            )
            if spec is not None and spec.submodule_search_locations is not None:
                inner = ModuleType(info.name)
                inner.__path__ = list(spec.submodule_search_locations)
                yield from _module_names(inner)


def error_classes() -> list[type[UnderstudyError]]:
    """The root and all classes below it that were imported, each once, by code."""
    found: dict[str, type[UnderstudyError]] = {}
    waiting: list[type[UnderstudyError]] = [UnderstudyError]
    while waiting:
        cls = waiting.pop()
        if cls.__module__.partition(".")[0] in _PACKAGES:
            found[f"{cls.code} {cls.__module__}.{cls.__qualname__}"] = cls
        waiting += cls.__subclasses__()
    return [found[key] for key in sorted(found)]


def render_errors_doc() -> str:
    """The whole document, of the classes imported so far."""
    return _HEAD + "".join(_row(cls) for cls in error_classes())


def _row(cls: type[UnderstudyError]) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()).replace("|", r"\|")
    name = f"`{cls.__module__}.{cls.__qualname__}`"
    return f"| `{cls.code}` | {cls.exit_code} | {cls.http_status} | {name} | {text} |\n"


if __name__ == "__main__":
    import_everything()
    sys.stdout.write(render_errors_doc())
