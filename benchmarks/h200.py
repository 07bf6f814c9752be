"""What one GPU gives: takeover, switchover, batch, memory, loading, speed. One command.

`python -m benchmarks.h200 --out DIR [--deadline SECONDS] [--only NAME,...]` makes its checkpoints
(random weights of real shapes) below `--scratch`, starts the real system with the real gateway,
and runs the experiments below in the order of their value until time is up. Each result is on
disk as soon as it is known; a second run goes on where the first one ended.

Every text is compared with that of an undisturbed run of the same streams: a stream that was
recomputed differently, lost or repeated a token ends the experiment as failed.
"""

import argparse
import datetime
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from benchmarks.checkpoints import MODELS, make_checkpoint, model_bytes
from benchmarks.gpu_experiments import (
    Situation,
    batch_ladder,
    beside_others,
    kill_primary,
    memory_of_parts,
    speed_of_library,
    speed_of_system,
    stop_and_switch,
    undisturbed,
)
from benchmarks.gpu_redundancy import kill_alone, kill_standby, kill_with_zygote, restarts
from benchmarks.gpu_system import Card, Figure, GpuShape, NoCard, gpu_system, requests_for
from benchmarks.report import ROOT, commit, this_machine
from chaos.system import RunningSystem

Ways = Sequence[tuple[str, Callable[[RunningSystem], int], int]]
"""Name, fault and rounds of each way to restart."""

_RESTARTS: Final[Sequence[tuple[str, str, str, Ways]]] = (
    ("restart", "llama-8b", "daemon",
     (("zygote", kill_alone, 3), ("cold start", kill_with_zygote, 1))),
    ("restart-plain", "llama-8b", "off",
     (("zygote, no cache", kill_alone, 2), ("cold start, no cache", kill_with_zygote, 1))),
    ("restart-70b", "llama-70b-fp8", "daemon", (("zygote", kill_alone, 2),)),
    ("restart-70b-plain", "llama-70b-fp8", "off",
     (("zygote, no cache", kill_alone, 1), ("cold start, no cache", kill_with_zygote, 1))),
)  # fmt: skip
"""Name of the experiment, model, mode of the cache, ways."""

LONG_PROMPTS: Final = (8_000, 8_000, 8_000, 10_000, 12_000, 16_000, 20_000, 28_000)
_TINY: Final = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2000, "moe_intermediate_size": 64,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Book:
    """Results by experiment; every entry is written at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / "h200.json"
        self.entries: dict[str, Any] = {}
        if self._path.exists():
            self.entries = json.loads(self._path.read_text("utf-8"))["experiments"]

    def has(self, name: str) -> bool:
        """Whether this is measured already."""
        return "figures" in self.entries.get(name, {})

    def write(self, name: str, entry: dict[str, Any], head: dict[str, Any]) -> None:
        """Add one experiment, and print it."""
        self.entries[name] = entry
        whole = {**head, "experiments": self.entries}
        self._path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        (self.folder / "h200.md").write_text(page(whole), "utf-8")
        sys.stdout.write(f"== {name} ({entry['seconds']:.0f} s) {entry.get('error', '')}\n")
        for figure in entry.get("figures", []):
            line = "   {what}: p50 {p50} p99 {p99} worst {worst} {unit} n={count} {note}\n"
            sys.stdout.write(line.format(**figure))
        sys.stdout.flush()


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
        "Random weights of real shapes; streams run through the real gateway, half greedy and half "
        "at temperature 1; every text is equal to that of an undisturbed run. A sample is one "
        "stream at one event, or one event.",
        "",
    ]
    for name, entry in whole["experiments"].items():
        lines += [f"## {name}", "", entry.get("text", ""), ""]
        if entry.get("commit", whole["commit"]) != whole["commit"]:
            lines += [f"Measured at {entry['date']}, commit {entry['commit']}.", ""]
        if "error" in entry:
            lines += [f"Failed: {entry['error']}", ""]
        if entry.get("figures"):
            lines += ["| what | samples | p50 | p99 | worst | unit | target |",
                      "|---|--:|--:|--:|--:|---|---|"]  # fmt: skip
        for f in entry.get("figures", []):
            what = f"{f['what']} ({f['note']})" if f["note"] else f["what"]
            lines.append(f"| {what} | {f['count']} | {f['p50']:,} | {f['p99']:,} "
                         f"| {f['worst']:,} | {f['unit']} | {f['target']} |")  # fmt: skip
        lines.append("")
    return "\n".join(lines)


class Run:
    """The order of things, and the clock."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._deadline_s = time.monotonic() + arguments.deadline
        self._only = set(arguments.only.split(",")) if arguments.only else None
        self._scratch: Path = arguments.scratch
        self._kills: int = arguments.kills
        self._layers: int | None = arguments.layers
        self._prompts = [max(64, int(n * arguments.scale)) for n in LONG_PROMPTS]
        self._tokens: int = arguments.tokens
        self.book = Book(arguments.out)
        self._is_rehearsal: bool = arguments.rehearse
        self.card = NoCard() if self._is_rehearsal else Card()
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self._head = {
            "date": now.isoformat(),
            "commit": commit(),
            "card": self.card.name,
            "driver": self.card.driver,
            "machine": asdict(this_machine()),
        }

    @property
    def left_s(self) -> float:
        """Time that is left."""
        left: float = self._deadline_s - time.monotonic()
        return left

    def wants(self, name: str, *, needs_s: float) -> bool:
        """Whether this experiment is to be run, and has the time."""
        chosen = self._only is None or name in self._only
        return chosen and not self.book.has(name) and self.left_s > needs_s

    def note(self, name: str, text: str, work: Callable[[], list[Figure]]) -> None:
        """Run one experiment and write down what came of it, an error included."""
        began = time.monotonic()
        entry: dict[str, Any] = {"text": text}
        try:
            entry["figures"] = [asdict(figure) for figure in work()]
        except Exception as error:  # noqa: BLE001 - the next experiment may well succeed
            entry["error"] = f"{type(error).__name__}: {error}"[:600]
            sys.stdout.write(traceback.format_exc())
        entry["seconds"] = round(time.monotonic() - began, 1)
        entry["commit"], entry["date"] = self._head["commit"], self._head["date"]
        self.book.write(name, entry, self._head)

    def shape_of(self, name: str) -> dict[str, Any]:
        """A model's configuration, shortened for a rehearsal."""
        config = dict(MODELS[name])
        if self._layers:
            config["num_hidden_layers"] = self._layers
        if self._is_rehearsal:
            config |= _TINY
            config.pop("quantization_config", None)
        return config

    @contextmanager
    def system(
        self,
        model: str,
        *,
        max_tokens: int,
        prompts: list[int],
        **shape: Any,  # noqa: ANN401
    ) -> Iterator[Situation]:
        """A running system with this model; afterwards its logs are kept and it is gone."""
        config = self.shape_of(model)
        began = time.monotonic()
        folder = make_checkpoint(self._scratch / model, config)
        gib = model_bytes(config) / (1 << 30)
        sys.stdout.write(f"{model}: {gib:.1f} GiB made in {time.monotonic() - began:.1f} s\n")
        home = self._scratch / f"run-{model}-{len(self.book.entries)}"
        if self._is_rehearsal:
            shape |= {"device": "cpu", "quantization": "none", "max_length": 4096}
        system = gpu_system(home, GpuShape(folder, **shape))
        empty_mib = self.card.settled_mib()
        requests = requests_for(prompts, max_tokens=max_tokens, vocabulary=config["vocab_size"])
        try:
            with system:
                ready_s = time.monotonic() - began
                sys.stdout.write(f"{model}: whole {ready_s:.1f} s after the start\n")
                yield Situation(system, self.card, requests, config, folder, empty_mib)
        finally:
            keep_logs(home, self.book.folder / f"logs-{home.name}.txt")

    def all(self) -> None:
        """Everything, the most valuable first."""
        names = ("undisturbed", "kill", "standby", "stop-switch", "memory", "beside", "batch")
        if any(self.wants(name, needs_s=60) for name in names):
            self._first_system()
        self._speed()
        self._restarts()
        for model, quantization in (
            ("qwen3-235b-fp8-4-layers", "fp8_block"),
            ("llama-70b-fp8", "fp8_block"),
        ):
            self._other_model(model, quantization)

    def _first_system(self) -> None:
        with self.system(
            "llama-8b", batch=True, max_tokens=self._tokens, prompts=self._prompts
        ) as at:
            self.note("undisturbed", "Llama-8B shape, bfloat16, eight streams of 8k to 28k prompt "
                      "tokens, standby parked.", lambda: undisturbed(at))  # fmt: skip
            if not at.texts:
                return
            if self.wants("kill", needs_s=60):
                self.note("kill", "SIGKILL of the primary, again and again, under those streams.",
                          lambda: kill_primary(at, kills=self._kills))  # fmt: skip
            if self.wants("standby", needs_s=40):
                self.note("standby", "SIGKILL of the standby while eight short streams decode.",
                          lambda: kill_standby(at, kills=max(2, self._kills // 2)))  # fmt: skip
            if self.wants("stop-switch", needs_s=120):
                self.note("stop-switch", "SIGSTOP of the primary, and planned switchovers.",
                          lambda: stop_and_switch(at, stops=self._kills, switches=20))  # fmt: skip
            if self.wants("batch", needs_s=30):
                self.note("batch", "Giving way.", lambda: batch_ladder(at, rounds=4))
            if self.wants("beside", needs_s=40):
                self.note("beside", "Eight short streams beside others on the card.",
                          lambda: beside_others(at))  # fmt: skip
            if self.wants("memory", needs_s=20):
                self.note("memory", "Device memory by part.", lambda: memory_of_parts(at))

    def _speed(self) -> None:
        if not self.wants("speed", needs_s=55):
            return

        def measure() -> list[Figure]:
            with self.system("llama-8b", slots=32, max_length=2048, standby=False, max_tokens=256,
                             prompts=[128] * 32) as at:  # fmt: skip
                ours = speed_of_system(at, (1, 8, 32))
                folder = at.folder
            return [*ours, *speed_of_library(folder, (1, 8, 32))]

        self.note("speed", "Decode tokens per second, all streams together; prompts of 128 tokens.",
                  measure)  # fmt: skip

    def _restarts(self) -> None:
        """What a standby, a zygote and a cache are good for: the same death without them."""
        for name, model, mode, ways in _RESTARTS:
            if self.wants(name, needs_s=100):
                text = f"Without a standby: eight short streams, {model}, cache mode {mode}."
                self.note(name, text, partial(self._restart, model, mode, ways))

    def _restart(self, model: str, mode: str, ways: Ways) -> list[Figure]:
        shape = {
            "quantization": "fp8_block" if "fp8" in model else "none",
            "standby": False, "cache_mode": mode, "max_length": 2048,
        }  # fmt: skip
        with self.system(model, max_tokens=600, prompts=[128] * 8, **shape) as at:
            found = [restarts(at, what, fault, rounds=rounds) for what, fault, rounds in ways]
        return list(chain.from_iterable(found))

    def _other_model(self, model: str, quantization: str) -> None:
        if not self.wants(model, needs_s=90):
            return

        def measure() -> list[Figure]:
            prompts = [max(64, int(n / 8 * self._prompts[0] / LONG_PROMPTS[0]))
                       for n in LONG_PROMPTS]  # fmt: skip
            with self.system(model, quantization=quantization, max_length=8192, max_tokens=600,
                             prompts=prompts) as at:  # fmt: skip
                return [*undisturbed(at), *kill_primary(at, kills=6)]

        text = f"{model}, streams of 1k to 3.5k prompt tokens."
        self.note(model, text, measure)


def keep_logs(home: Path, target: Path) -> None:
    """The end of each log, in one file: systems are thrown away."""
    parts = []
    paths = sorted([*home.rglob("*.log"), *home.rglob("*.out"), *home.rglob("events.jsonl")])
    for path in paths:
        text = path.read_text("utf-8", "replace")[-60_000:]
        parts += [f"===== {path.name}", text]
    target.write_text("\n".join(parts), "utf-8")
    shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    """Measure; 0 when every experiment that was run came through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/understudy"))  # noqa: S108
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="names of experiments, with commas")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=2800, help="tokens of each long stream")
    parser.add_argument("--scale", type=float, default=1.0, help="shortens the prompts (rehearsal)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, without a GPU")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers (rehearsal)")
    run = Run(parser.parse_args())
    run.all()
    run.card.release()
    return 1 if any("error" in entry for entry in run.book.entries.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
