"""The results of `benchmarks.h200` on disk: `h200.json`, and `h200.md` printed from it.

Invariants
    1. An experiment's figures are replaced by newer figures alone. A run that failed is written
       down beside them, under `failed`.
    2. Both files are replaced whole: whoever reads them, or ends the run, never meets a half.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.report import is_same_commit, write_both
from cache.errors import UnderstudyError

__all__ = ["Book", "BrokenBookError", "page"]

_CHECKED: Final = (
    "Random weights of real shapes; streams run through the real gateway, half greedy and half at "
    "temperature 1 (all greedy in `speed`). Every stream was complete, but for those of a batch "
    "engine that was evicted. Where an experiment says what its texts were equal to, one token "
    "that was lost, repeated or computed differently would have made it fail. A sample is one "
    "stream at one event, or one event."
)


class BrokenBookError(UnderstudyError):
    """The results of earlier runs cannot be read."""

    code = "benchmark_results_broken"

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is not a file of results: {why}",
            hint=f"take it back from git ('git checkout -- {path}'), move it away, or name "
            "another folder with --out",
        )


class Book:
    """Results by experiment; every entry is on disk as soon as it is known."""

    def __init__(self, folder: Path, entries: dict[str, Any]) -> None:
        self.folder = folder
        self.entries = entries

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The results in a folder, which is made where it is missing.

        Raises:
            BrokenBookError: there is a file, but not of results.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "h200.json"
        if not path.exists():
            return cls(folder, {})
        try:
            entries = json.loads(path.read_text("utf-8"))["experiments"]
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenBookError(path, f"{type(error).__name__}: {error}") from error
        if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
            raise BrokenBookError(path, "'experiments' must be an object of objects")
        return cls(folder, entries)

    def has(self, name: str, *, commit: str, options: dict[str, Any]) -> bool:
        """Whether this was measured at this very commit, in this size, and not failed since."""
        entry = self.entries.get(name, {})
        return (
            "figures" in entry
            and "failed" not in entry
            and is_same_commit(entry.get("commit", ""), commit)
            and entry.get("options", {}) == options
        )

    def write_figures(self, name: str, entry: dict[str, Any], head: dict[str, Any]) -> None:
        """Take what an experiment measured instead of what was known before."""
        self.entries[name] = entry
        self._save(head)
        sys.stdout.write(f"== {name} ({entry['seconds']:.0f} s)\n")
        for figure in entry["figures"]:
            line = "   {what}: p50 {p50} p99 {p99} worst {worst} {unit} n={count} {note}\n"
            sys.stdout.write(line.format(**figure))
        sys.stdout.flush()

    def write_failure(
        self, name: str, text: str, failure: dict[str, Any], head: dict[str, Any]
    ) -> None:
        """Note that an experiment failed; figures that are there stay."""
        self.entries[name] = {"text": text, **self.entries.get(name, {}), "failed": failure}
        self._save(head)
        sys.stdout.write(f"== {name} failed: {failure['error']}\n")
        sys.stdout.flush()

    def _save(self, head: dict[str, Any]) -> None:
        whole = {**head, "experiments": self.entries}
        write_both(self.folder, "h200", whole, page(whole))


def page(whole: dict[str, Any]) -> str:
    """The Markdown page."""
    machine = whole["machine"]
    lines = [
        "# One H200",
        "",
        f"{whole['date']}, commit {whole['commit']}; {whole['card']}, driver {whole['driver']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}, "
        f"torch {machine['torch']}. Made by `python -m benchmarks.h200`.",
        "",
        _CHECKED,
        "",
    ]
    for name, entry in whole["experiments"].items():
        lines += [f"## {name}", "", entry.get("text", ""), "", *_section(entry, whole), ""]
    return "\n".join(lines)


def _section(entry: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    lines = []
    if "figures" in entry and entry.get("commit", whole["commit"]) != whole["commit"]:
        lines += [f"Measured at {entry['date']}, commit {entry['commit']}.", ""]
    if entry.get("options"):
        lines += ["With " + ", ".join(f"--{k} {v}" for k, v in entry["options"].items()) + ".", ""]
    if "failed" in entry:
        failed = entry["failed"]
        kept = " The figures are of one that did not." if "figures" in entry else ""
        error = failed["error"].rstrip(".")
        lines += [
            f"A run at {failed['date']}, commit {failed['commit']}, failed: {error}.{kept}",
            "",
        ]
    if entry.get("figures"):
        lines += ["| what | samples | p50 | p99 | worst | unit | target |",
                  "|---|--:|--:|--:|--:|---|---|"]  # fmt: skip
    for f in entry.get("figures", []):
        what = f"{f['what']} ({f['note']})" if f["note"] else f["what"]
        lines.append(f"| {what} | {f['count']} | {f['p50']:,} | {f['p99']:,} "
                     f"| {f['worst']:,} | {f['unit']} | {f['target']} |")  # fmt: skip
    return lines
