"""Prints the generated documents: `python -m docs.generate`, or `--check` to compare only.

Each page is a function that returns its text from the code it describes, so nothing here can
drift; CI runs `--check`.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from docs.cli_page import cli_page
from docs.config_page import config_page
from docs.fsm_page import fsm_page
from supervisor.observe.metrics_doc import render_metrics_doc
from supervisor.topology.jsonschema import SCHEMA_FILE, schema_text

__all__ = ["PAGES", "main"]

ROOT: Final = Path(__file__).resolve().parent.parent


def errors_page() -> str:
    """The catalogue of errors, from an interpreter of its own that imports every error class."""
    command = [sys.executable, "-m", "supervisor.admin.errors_doc"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


PAGES: Final[dict[str, Callable[[], str]]] = {
    SCHEMA_FILE: schema_text,
    "docs/CLI.md": cli_page,
    "docs/CONFIG.md": config_page,
    "docs/METRICS.md": render_metrics_doc,
    "docs/errors.md": errors_page,
    "docs/fsm.md": fsm_page,
}


def main(arguments: list[str]) -> int:
    """Write every page, or with `--check` name those that differ from the code."""
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        verb = "differs from the code; run make docs" if "--check" in arguments else "written"
        sys.stdout.write(f"{name}: {verb}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
