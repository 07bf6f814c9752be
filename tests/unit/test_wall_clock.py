"""Nothing that decides reads the time of day: it may jump, in both directions, at any moment.

Where it is read it is only written down or shown, but for one place that compares it with the times
of files. A new place must be added here, with its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WRITES_IT_DOWN = {
    "supervisor/observe/events.py",  # the time of an event, beside its number
    "supervisor/gateway/endpoints.py",  # `created` of an answer
    "supervisor/runtime/group.py",  # `created` of a model in /v1/models
    "supervisor/runtime/operations.py",  # when an operation began, and the first half of its name
    "supervisor/runtime/controller.py",  # the same, as shown to the operator
}

COMPARES_FILE_TIMES = {
    # What it decides is whether headers are read again, never what they say.
    "cache/fingerprint.py",
}

CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime"}
NO_CLOCKS = {"loop", "_loop", "get_running_loop", "get_event_loop"}  # their time() is monotonic


def readings(path: Path) -> Iterator[int]:
    """Lines that ask for the time of day."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr == "CLOCK_REALTIME":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for a in node.names if a.name in CLOCKS)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in CLOCKS and not (node.args and node.func.attr != "now")
            if asks and owner(node.func.value) not in NO_CLOCKS:
                yield node.lineno


def owner(value: ast.expr) -> str:
    """The last name before the dot."""
    if isinstance(value, ast.Call):
        value = value.func
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")


def sources() -> list[Path]:
    folders = ("supervisor", "cache", "engines")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_no_decision_reads_the_time_of_day() -> None:
    found = {str(p.relative_to(ROOT)): list(readings(p)) for p in sources()}
    assert len(found) > 100
    assert {path for path, lines in found.items() if lines} == WRITES_IT_DOWN | COMPARES_FILE_TIMES


def test_a_decision_by_the_time_of_day_is_found(tmp_path: Path) -> None:
    guilty = tmp_path / "guilty.py"
    guilty.write_text("import time\nif time.time() > 5 or datetime.now(UTC):\n    promote()\n")
    assert list(readings(guilty)) == [2, 2]
