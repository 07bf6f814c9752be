"""What a run looked like: `report.json` for programs, `report.html` for people.

The page is one file without scripts or links: a timeline (who was primary, faults, phases, each
stream's tokens), the latency table, and every check.
"""

import html
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from chaos.checkers import Verdict
from chaos.figures import LatencyRow, latency_rows
from chaos.guarantees import reigns
from chaos.history import Command, Fault, History, Process, Sample, Stream

__all__ = ["write_report"]

_WIDTH: Final = 1600
_LEFT: Final = 130
_LANE: Final = 18
_MAX_STREAMS: Final = 160
_COLOURS: Final = ("#2f6f9f", "#b8672b", "#3f8f5f", "#8a4f9e", "#a03c4c", "#5f6f2f")
_STYLE: Final = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em;color:#222;max-width:1700px}
table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 12px 2px 0;text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.held{color:#2a7d46}.broken{color:#b3261e;font-weight:600}.skipped{color:#888}
svg{border:1px solid #ddd;background:#fff;max-width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:#333}
"""


def write_report(directory: Path, history: History, verdict: Verdict) -> Path:
    """Write both files; the path of the page."""
    rows = latency_rows(history)
    summary = {
        "scenario": history.meta.scenario,
        "title": history.meta.title,
        "seed": history.meta.seed,
        "machine": history.meta.machine,
        "passed": verdict.is_passed,
        "judged": verdict.is_judged,
        "result": verdict.sentence(),
        "checks": [asdict(outcome) for outcome in verdict.outcomes],
        "latency_ms": [asdict(row) for row in rows],
        "faults": [msgspec.to_builtins(fault) for fault in history.all(Fault)],
        "streams": len(history.all(Stream)),
    }
    (directory / "report.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    page = directory / "report.html"
    page.write_text(_page(history, verdict, rows), "utf-8")
    return page


def _page(history: History, verdict: Verdict, rows: list[LatencyRow]) -> str:
    meta = history.meta
    colour = "held" if verdict.is_passed else "broken"
    machine = ", ".join(f"{k} {v}" for k, v in meta.machine.items())
    parts = [
        "<!doctype html><meta charset=utf-8>",
        f"<title>{_text(meta.scenario)}</title><style>{_STYLE}</style>",
        f"<h1>{_text(meta.title)}</h1>",
        f"<p><code>python -m chaos run --scenario {_text(meta.scenario)} --seed {meta.seed}</code>",
        f"<p class={colour}>{_text(verdict.sentence())}<p>{_text(machine)}",
        "<h2>Timeline</h2>",
        _Timeline(history).svg(),
        "<h2>Latency</h2>",
        _latency_table(rows),
        "<h2>Checks</h2>",
        _checks(verdict),
        "<h2>Faults and orders</h2>",
        _steps(history),
    ]
    return "\n".join(parts) + "\n"


def _latency_table(rows: list[LatencyRow]) -> str:
    head = "".join(f"<th class=n>{name}" for name in ("samples", "p50 ms", "p99 ms", "worst ms"))
    lines = [f"<table><tr><th>what{head}"]
    for row in rows:
        spread = row.spread
        numbers = (f"{spread.p50:.1f}", f"{spread.p99:.1f}", f"{spread.worst:.1f}")
        cells = "".join(f"<td class=n>{number}" for number in (spread.count, *numbers))
        lines.append(f"<tr><td>{_text(row.what)}{cells}")
    return "\n".join([*lines, "</table>"])


def _checks(verdict: Verdict) -> str:
    lines = ["<table>"]
    for outcome in verdict.outcomes:
        problems = "<br>".join(_text(problem) for problem in outcome.problems)
        lines.append(
            f"<tr><td class={outcome.state}>{outcome.state}<td>{outcome.kind}"
            f"<td>{_text(outcome.name)}<td>{problems}"
        )
    return "\n".join([*lines, "</table>"])


def _steps(history: History) -> str:
    zero_ns = history.meta.started_ns
    rows: list[tuple[int, str, str]] = [
        (f.at_ns, f.label, ", ".join(t.instance for t in f.targets)) for f in history.all(Fault)
    ]
    rows += [(c.at_ns, f"order: {c.label}", f"{c.status} {c.text}") for c in history.all(Command)]
    lines = [
        f"<tr><td class=n>{(at_ns - zero_ns) / 1e9:.3f} s<td>{_text(what)}<td>{_text(more)}"
        for at_ns, what, more in sorted(rows)
    ]
    return "\n".join(["<table>", *lines, "</table>"])


class _Timeline:
    """The picture: lanes from top to bottom, time from left to right."""

    def __init__(self, history: History) -> None:
        self._history = history
        moments = [s.started_ns for s in history.all(Stream)]
        moments += [f.at_ns for f in history.all(Fault)]
        self._from_ns = min(moments, default=history.meta.started_ns) - 500_000_000
        self._until_ns = max(history.ended_ns, self._from_ns + 1)
        self._y = 30
        self._parts: list[str] = []

    def svg(self) -> str:
        """Draw it."""
        self._axis()
        self._primaries()
        self._phases()
        self._processes()
        self._states()
        self._streams()
        self._faults()
        height = self._y + 20
        body = "\n".join(self._parts)
        return f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">{body}</svg>'

    def _x(self, at_ns: int) -> float:
        share = (at_ns - self._from_ns) / (self._until_ns - self._from_ns)
        return round(_LEFT + max(0.0, min(1.0, share)) * (_WIDTH - _LEFT - 10), 1)

    def _lane(self, name: str) -> int:
        y = self._y
        self._parts.append(f'<text x="4" y="{y + 12}">{_text(name)}</text>')
        self._y += _LANE
        return y

    def _box(self, y: int, span: tuple[int, int], colour: str, title: str, text: str = "") -> None:
        x, end = self._x(span[0]), self._x(span[1])
        self._parts.append(
            f'<rect x="{x}" y="{y + 2}" width="{max(1.0, round(end - x, 1))}" height="{_LANE - 5}" '
            f'fill="{colour}"><title>{_text(title)}</title></rect>'
        )
        if text and end - x > 30:
            self._parts.append(
                f'<text x="{x + 4}" y="{y + 12}" style="fill:#fff">{_text(text)}</text>'
            )

    def _axis(self) -> None:
        seconds = (self._until_ns - self._from_ns) / 1e9
        step = next(
            s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if seconds / s <= 20 or s == 500
        )
        for index in range(int(seconds // step) + 1):
            at_ns = self._from_ns + int(index * step * 1e9)
            shown = (at_ns - self._history.meta.started_ns) / 1e9
            self._parts.append(f'<text x="{self._x(at_ns)}" y="14">{shown:.0f} s</text>')

    def _primaries(self) -> None:
        y = self._lane("primary")
        colours: dict[str, str] = {}
        for reign in reigns(self._history):
            colour = colours.setdefault(reign.engine, _COLOURS[len(colours) % len(_COLOURS)])
            title = f"{reign.engine} pid {reign.pid} epoch {reign.epoch}"
            self._box(y, (reign.from_ns, reign.until_ns), colour, title, f"e{reign.epoch}")

    def _phases(self) -> None:
        """Each phase of each takeover, as the supervisor measured it, back from its completion."""
        y = self._lane("phases")
        for event in self._history.events("failover_completed", "switchover_completed"):
            phases = {k: float(v) for k, v in dict(event.event.get("phases_ms", {})).items()}
            end_ns = event.at_ns
            for index, (name, ms) in reversed(list(enumerate(phases.items()))):
                if name in {"total", "first_token"}:
                    continue
                span = (end_ns - round(ms * 1e6), end_ns)
                title = f"{name} {ms:.1f} ms: {event.event.get('text')}"
                self._box(y, span, _COLOURS[index % len(_COLOURS)], title)
                end_ns = span[0]

    def _processes(self) -> None:
        names = sorted({p.instance.rpartition("-")[0] for p in self._history.all(Process)})
        for name in names:
            y = self._lane(name)
            for life in self._history.all(Process):
                if life.instance.rpartition("-")[0] == name:
                    span = (life.seen_ns, life.last_alive_ns)
                    self._box(y, span, "#b9c4cc", f"{life.instance} pid {life.pid}")

    def _states(self) -> None:
        y = self._lane("not whole")
        run: list[Sample] = []
        for sample in [*self._history.samples(), None]:
            if sample is not None and not sample.is_whole:
                run.append(sample)
            elif run:
                until_ns = sample.at_ns if sample is not None else run[-1].at_ns
                self._box(y, (run[0].at_ns, until_ns), "#e0a030", run[0].state or "no answer")
                run = []

    def _streams(self) -> None:
        streams = sorted(self._history.all(Stream), key=lambda s: s.started_ns)[:_MAX_STREAMS]
        for stream in streams:
            y = self._y
            self._y += 5
            colour = "#b3261e" if stream.error else "#8fb8a0"
            span = (stream.started_ns, stream.ended_ns or self._history.ended_ns)
            x, end = self._x(span[0]), self._x(span[1])
            self._parts.append(
                f'<rect x="{x}" y="{y + 1}" width="{max(1.0, end - x):.1f}" height="1" '
                f'fill="{colour}"><title>{_text(stream.name)}</title></rect>'
            )
            marks = "".join(f"M{x} {y}v3" for x in self._token_marks(stream))
            self._parts.append(f'<path d="{marks}" stroke="#2a7d46" stroke-width="0.7"/>')

    def _token_marks(self, stream: Stream) -> Iterator[float]:
        last = -1.0
        for at_ns in stream.arrivals_ns:
            x = self._x(at_ns)
            if x - last >= 0.8:  # several tokens within a pixel are one mark
                yield x
                last = x

    def _faults(self) -> None:
        marks: list[tuple[int, str, str]] = [
            (f.at_ns, f.label, "#b3261e") for f in self._history.all(Fault)
        ]
        marks += [(c.at_ns, c.label, "#3050a0") for c in self._history.all(Command)]
        for index, (at_ns, label, colour) in enumerate(sorted(marks)):
            x = self._x(at_ns)
            self._parts.append(
                f'<line x1="{x}" x2="{x}" y1="18" y2="{self._y}" stroke="{colour}" '
                f'stroke-width="1" stroke-dasharray="3 3"><title>{_text(label)}</title></line>'
                f'<text x="{x + 2}" y="{self._y + 12 - 11 * (index % 2)}" '
                f'style="fill:{colour}">{_text(label[:26])}</text>'
            )
        self._y += 16


def _text(value: Any) -> str:  # noqa: ANN401 - anything that prints
    return html.escape(str(value))
