"""The results of `benchmarks.h200_load` on disk: what each step found, and a page of all rows.

Invariant: what a step found is replaced by what the same step found later, and by nothing else: a
step that failed, or for which there was no time, leaves what was known.
"""

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.h200_book import BrokenBookError
from benchmarks.report import commit, this_machine, write_both
from cache.errors import CacheError

__all__ = ["NotHereError", "Report", "Row"]

Row = tuple[str, str, str]
"""What, figure, note."""


class NotHereError(RuntimeError):
    """This machine does not let us measure a thing: no failure of what is measured."""


class Report:
    """What is known of each step, on disk after every step."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.failed: list[str] = []
        self._out, self._deadline = out, deadline
        self._rows: list[Row] = []  # of the step that runs
        out.mkdir(parents=True, exist_ok=True)
        self._data = {
            **_known(out / "h200_load.json"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": asdict(this_machine()),
        }

    def row(self, what: str, figure: str, note: str = "") -> None:
        """Add a line to what the step that runs has found."""
        self._rows.append((what, figure, note))
        sys.stdout.write(f"{what}: {figure} {note}\n")
        sys.stdout.flush()

    def step(self, name: str, needs_s: float, work: Callable[[], Any]) -> None:
        """Run a step if there is time for it."""
        if time.monotonic() + needs_s > self._deadline:
            sys.stdout.write(f"{name}: left out for want of time\n")
            return
        self._rows = []
        began = time.monotonic()
        stamp = {"date": self._data["date"], "commit": self._data["commit"]}
        steps: dict[str, Any] = self._data["steps"]
        try:
            found = work()
        except NotHereError as error:
            sys.stdout.write(f"{name}: left out, {error}\n")
            return
        except (CacheError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.failed.append(name)
            sys.stdout.write(f"{name}: failed, {error}\n")
            steps[name] = {**steps.get(name, {}), "failed": {**stamp, "error": str(error)[:300]}}
        else:
            seconds = round(time.monotonic() - began, 2)
            steps[name] = {**stamp, "seconds": seconds, "rows": self._rows, "found": found}
        write_both(self._out, "h200_load", self._data, _page(self._data))


def _known(path: Path) -> dict[str, Any]:
    """What earlier runs found, with whatever else the file holds.

    Raises:
        BrokenBookError: there is a file, but not of results.
    """
    known: dict[str, Any] = {}
    if path.exists():
        try:
            known = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise BrokenBookError(path, str(error)) from error
    if not isinstance(known, dict) or not isinstance(known.setdefault("steps", {}), dict):
        raise BrokenBookError(path, "it must be an object, and 'steps' in it, too")
    return known


def _page(data: dict[str, Any]) -> str:
    machine = data["machine"]
    lines = [
        "# Loading and mapping on one H200",
        "",
        f"{data['date']}, commit {data['commit']}; {machine['cpu']}, {machine['cores']} cores, "
        f"Python {machine['python']}, torch {machine['torch']}. Made by `python -m "
        "benchmarks.h200_load`. Files in a memory file system unless said otherwise; GiB/s are of "
        "file bytes.",
        "",
        "| what | figure | note |",
        "|---|--:|---|",
    ]
    for name, step in data["steps"].items():
        is_older = step.get("commit", data["commit"]) != data["commit"]
        for what, figure, note in step.get("rows", []):
            notes = [note, f"commit {step['commit']}" if is_older else ""]
            lines.append(f"| {what} | {figure} | {'; '.join(filter(None, notes))} |")
        if "failed" in step:
            failed = step["failed"]
            why = failed["error"].replace("\n", " ").replace("|", "/")
            lines.append(f"| {name} | failed | {why}; commit {failed['commit']} |")
    return "\n".join(lines) + "\n"
