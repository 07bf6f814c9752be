"""How a measurement is written down: with its date, its commit and the machine it ran on."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from chaos.judge import Spread

__all__ = [
    "Machine",
    "Row",
    "commit",
    "is_same_commit",
    "markdown_table",
    "this_machine",
    "write_both",
    "write_report",
]

ROOT: Final = Path(__file__).resolve().parent.parent
_REPORTS: Final = "docs/benchmarks"
_COMMIT: Final = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures depend on."""

    cpu: str
    cores: int
    memory_gib: int
    kernel: str
    python: str
    torch: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, in milliseconds."""

    what: str
    rounds: int
    spread: Spread
    target: str = ""
    note: str = ""


def this_machine() -> Machine:
    """The machine that runs this."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_bytes / (1 << 30)),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
    )


def commit() -> str:
    """The commit that was measured; says so when the tree holds more than it.

    What measurements write into the tree is no change of what is measured.
    """
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "-uno", "--", ".", f":(exclude){_REPORTS}")
    return f"{head} with local changes" if changes else head


def is_same_commit(one: str, other: str) -> bool:
    """Whether two results of `commit`, in short or long form, surely name the same code.

    Local changes may be any changes, so they are never the same.
    """
    shorter, longer = sorted((one, other), key=len)
    return bool(_COMMIT.fullmatch(shorter)) and longer.startswith(shorter)


def _write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or the end of this process, never meets half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, "utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_both(directory: Path, name: str, data: object, page: str) -> Path:
    """`name.json` with everything and `name.md` for people; the path of the latter."""
    _write_whole(directory / f"{name}.json", json.dumps(data, indent=1) + "\n")
    path = directory / f"{name}.md"
    _write_whole(path, page)
    return path


def write_report(
    directory: Path, name: str, *, title: str, rows: Sequence[Row], text: str, data: object
) -> Path:
    """Write `name.json` with every sample and `name.md` for people; the path of the latter."""
    machine = this_machine()
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    head = {"date": now.isoformat(), "commit": commit(), "machine": asdict(machine)}
    directory.mkdir(parents=True, exist_ok=True)
    summary = [{**asdict(row.spread), "what": row.what, "rounds": row.rounds} for row in rows]
    whole = {**head, "summary_ms": summary, "data": data}
    page = (
        f"# {title}\n\n"
        f"{now:%Y-%m-%d %H:%M} UTC, commit {head['commit']}; {machine.cpu}, {machine.cores} cores, "
        f"{machine.memory_gib} GiB, Linux {machine.kernel}, Python {machine.python}, "
        f"torch {machine.torch}.\n\n{text}\n\n{markdown_table(rows)}"
    )
    return write_both(directory, name, whole, page)


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a table; milliseconds."""
    lines = [
        "| what | rounds | samples | p50 ms | p99 ms | worst ms | target |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row.what} | {row.rounds} | {row.spread.count} | {row.spread.p50:,.1f} "
        f"| {row.spread.p99:,.1f} | {row.spread.worst:,.1f} | {row.target} |"
        for row in rows
    ]
    notes = [f"{row.what}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
