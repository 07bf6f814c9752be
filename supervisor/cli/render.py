"""How answers of the supervisor look to people: status, operations, events.

Every reader is tolerant: a key that an older or newer supervisor does not send shows as `-`.
"""

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "console",
    "describe_operation",
    "event_line",
    "phases_of",
    "print_json",
    "status_view",
    "when",
]

_PIPE_COLUMNS: Final = 200
_GOOD: Final = frozenset(
    {"primary", "standby", "healthy", "redundant", "serving", "ready", "batch"}
)
_BAD: Final = frozenset({"dead", "hung", "fatal", "blocked", "failed", "down", "unkillable"})


def console() -> "Console":
    """A console on stdout that neither guesses at numbers nor cuts what is piped on."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(highlight=False, soft_wrap=True, width=width)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def when(moment: object) -> str:
    """A time of the API (seconds since 1970, or ISO 8601) in the reader's own time zone."""
    try:
        if isinstance(moment, int | float):
            parsed = datetime.datetime.fromtimestamp(moment, datetime.UTC)
        else:
            parsed = datetime.datetime.fromisoformat(str(moment))
    except (ValueError, OverflowError, OSError):
        return "-"
    return parsed.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def event_line(event: Mapping[str, Any]) -> str:
    """One event as one line."""
    subject = event.get("engine") or event.get("group") or ""
    seq = event.get("seq", "-")
    parts = (when(event.get("time")), f"#{seq}", event.get("kind"), subject, event.get("text"))
    fields = event.get("fields")
    pairs = fields.items() if isinstance(fields, Mapping) else ()
    tail = (f"{key}={_short(value)}" for key, value in pairs)
    return "  ".join(" ".join(str(part).split()) for part in (*parts, *tail) if part)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- operations --------------------------------------------------------------------------------


def phases_of(operation: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by phase, in order."""
    phases = operation.get("phases") or operation.get("phases_ms") or {}
    return {str(k): float(v) for k, v in phases.items() if isinstance(v, int | float)}


def describe_operation(operation: Mapping[str, Any]) -> str:
    """One sentence: what was done, how it ended, and how long each phase took."""
    subject = operation.get("engine") or operation.get("group") or ""
    head = " ".join(str(p) for p in (operation.get("kind"), subject) if p)
    text = operation.get("text") or operation.get("result")
    state = operation.get("state", "done")
    sentence = f"{head}: {state}"
    for more in (operation.get("error"), text):
        sentence += f", {_result(more)}" if more and more != head else ""
    if isinstance(operation.get("epoch"), int) and operation["epoch"]:
        sentence += f", epoch {operation['epoch']}"
    phases = phases_of(operation)
    if phases:
        total = phases.get("total", sum(phases.values()))
        parts = ", ".join(f"{k} {v:.1f}" for k, v in phases.items() if k != "total")
        sentence += f" ({total:.1f} ms: {parts})"
    elif isinstance(operation.get("duration_ms"), int | float):
        sentence += f" ({operation['duration_ms']:.1f} ms)"
    return sentence


def _result(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value)


# --- status ------------------------------------------------------------------------------------


def status_view(status: Mapping[str, Any]) -> "Group":
    """The whole status: one line for the supervisor, a table per group."""
    from rich.console import Group
    from rich.text import Text

    supervisor = status.get("supervisor") or {}
    gateways = [_process(worker) for worker in _items(status, "gateway")]
    head = f"{status.get('name', '-')}: supervisor pid {supervisor.get('pid', '-')}"
    lines = [Text(head + (f", gateway {', '.join(gateways)}" if gateways else ""))]
    if status.get("paused"):
        lines.append(Text("paused: nothing is started, stopped or promoted", style="yellow"))
    degraded = supervisor.get("degraded")
    if isinstance(degraded, Mapping):
        lines += [Text(f"degraded, {k}: {v}", style="yellow") for k, v in degraded.items()]
    parts: list[Text | Table] = [*lines]
    for group in _items(status, "groups"):
        parts += [Text(), _group_line(group), _engine_table(group)]
    return Group(*parts)


def _items(holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = holder.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _process(process: Mapping[str, Any]) -> str:
    state = process.get("state")
    return f"pid {process.get('pid', '-')}" + (f" {state}" if state else "")


def _group_line(group: Mapping[str, Any]) -> "Text":
    from rich.text import Text

    standby = group.get("standby")
    names = ", ".join(map(str, standby)) if isinstance(standby, list) else str(standby or "")
    state = str(group.get("state", "-"))
    line = Text.assemble((f"{group.get('name', '-')}", "bold"), ": ", (state, _style(state)))
    line.append(f", epoch {group.get('epoch', '-')}, primary {group.get('primary') or 'none'}")
    line.append(f", standby {names or 'none'}")
    if group.get("blocked"):
        seconds = _duration(group.get("blocked_for_s"))
        line.append(f"\n  BLOCKED for {seconds}: a hung primary is left alone until ", "bold red")
        line.append("'supervisor ack'", "bold red")
    unkillable = group.get("unkillable")
    for name in unkillable if isinstance(unkillable, list) else []:
        line.append(f"\n  {name} cannot be killed: see 'supervisor fence {name}'", "bold red")
    for cache in _items(group, "cache"):
        line.append(f"\n  cache {cache.get('device', '-')}: {_process(cache)}, ")
        line.append(f"weights {_size(cache.get('weights_bytes'))}, ")
        line.append(f"KV {_size(cache.get('kv_bytes'))}, {_count(cache.get('attached'))} attached")
    for memory in _items(group, "device_memory"):
        line.append(f"\n  memory {memory.get('device', '-')}: {_device_memory(memory)}")
    return line


def _device_memory(memory: Mapping[str, Any]) -> str:
    """The card as the driver reports it: an engine's figure is without what it shares."""
    error, age_s = memory.get("error"), memory.get("age_s")
    if not isinstance(memory.get("total_bytes"), int):
        return f"not known ({error or 'no figures'})"
    text = f"{_size(memory.get('free_bytes'))} of {_size(memory.get('total_bytes'))} free"
    uses = [(str(e.get("name", "-")), e.get("used_bytes")) for e in _items(memory, "engines")]
    uses.append(("others", memory.get("others_bytes")))
    named = [f"{name} {_size(used)}" for name, used in uses if isinstance(used, int)]
    text += f"; the driver says {', '.join(named)}" if named else ""
    return text + (f"; {_duration(age_s)} ago: {error}" if error else "")


def _engine_table(group: Mapping[str, Any]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("engine", "role", "state", "verdict", "pid", "restarts", "up"):
        right = heading in ("pid", "restarts", "up")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for engine in _items(group, "engines"):
        row = [str(engine.get(key) or "-") for key in ("name", "role", "state", "verdict", "pid")]
        restarts, uptime = engine.get("restarts"), engine.get("uptime_s")
        if not engine.get("pid"):
            row[3], uptime = "-", None  # nobody is there to be healthy
        cells: Iterable[Text] = [Text(cell, style=_style(cell)) for cell in row]
        table.add_row(*cells, str(restarts if restarts is not None else "-"), _duration(uptime))
    return table


def _style(word: str) -> str:
    lowered = word.lower()
    return "green" if lowered in _GOOD else "bold red" if lowered in _BAD else ""


def _size(value: object) -> str:
    from supervisor.topology.findings import readable

    return readable(value) if isinstance(value, int) else "-"


def _count(value: object) -> str:
    return str(len(value)) if isinstance(value, list) else str(value if value is not None else "-")


def _duration(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "-"
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{seconds:.1f}s"
