"""What every run of `benchmarks.h200` does: clock, book, checkpoints, systems and their logs."""

import argparse
import datetime
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.checkpoints import MODELS, make_checkpoint, model_bytes
from benchmarks.gpu_card import Card
from benchmarks.gpu_situation import Situation
from benchmarks.gpu_system import Figure, GpuShape, gpu_system, requests_for
from benchmarks.h200_book import Book
from benchmarks.report import commit, this_machine
from cache.errors import UnderstudyError

__all__ = ["LONG_PROMPTS", "SIZES", "Run"]

LONG_PROMPTS: Final = (8_000, 8_000, 8_000, 10_000, 12_000, 16_000, 20_000, 28_000)
_TINY: Final = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2000, "moe_intermediate_size": 64,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


SIZES: Final = {"kills": 21, "tokens": 2800, "scale": 1.0, "layers": None, "rehearse": False}
"""Options that change what is measured, and what they are in a whole run."""


class Run:
    """One run: what is asked for, what is done, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace, card: Card) -> None:
        self._deadline_s = time.monotonic() + arguments.deadline
        self._only = set(arguments.only)
        self._again: bool = arguments.again
        self.scratch: Path = arguments.scratch
        self.kills: int = arguments.kills
        self._layers: int | None = arguments.layers
        self.prompts = [max(64, int(n * arguments.scale)) for n in LONG_PROMPTS]
        self.tokens: int = arguments.tokens
        self._options = {k: v for k in SIZES if (v := getattr(arguments, k)) != SIZES[k]}
        self._systems = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self.book = Book.open(arguments.out)
        self.is_rehearsal: bool = arguments.rehearse
        self.card = card
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self._head: dict[str, Any] = {
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

    def is_done(self, name: str) -> bool:
        """Whether this experiment is asked for, and need not be run for it."""
        if self._again or (self._only and name not in self._only):
            return False
        return self.book.has(name, commit=self._head["commit"], options=self._options)

    def is_open(self, name: str) -> bool:
        """Whether this experiment is asked for and not done already."""
        return (not self._only or name in self._only) and not self.is_done(name)

    def wants(self, name: str, *, needs_s: float) -> bool:
        """Whether this experiment is to be run, and has the time."""
        if not self.is_open(name):
            return False
        if self.left_s < needs_s:
            self.left_out.append(name)
        return self.left_s >= needs_s

    def note(self, name: str, text: str, work: Callable[[], list[Figure]]) -> None:
        """Run one experiment and write down what came of it, an error included."""
        began = time.monotonic()
        try:
            figures = [asdict(figure) for figure in work()]
        except Exception as error:  # noqa: BLE001 - the next experiment may well succeed
            self.note_failure(name, text, error)
            return
        entry: dict[str, Any] = {"text": text, "figures": figures}
        if self._options:
            entry["options"] = self._options
        entry["seconds"] = round(time.monotonic() - began, 1)
        entry["commit"], entry["date"] = self._head["commit"], self._head["date"]
        self.book.write_figures(name, entry, self._head)

    def note_failure(self, name: str, text: str, error: Exception) -> None:
        """Write down that an experiment, or its system, failed."""
        sys.stdout.write("".join(traceback.format_exception(error)))
        self.failed.append(name)
        failure = {
            "error": f"{type(error).__name__}: {error}"[:600],
            "commit": self._head["commit"],
            "date": self._head["date"],
        }
        self.book.write_failure(name, text, failure, self._head)

    def shape_of(self, name: str) -> dict[str, Any]:
        """A model's configuration, shortened for a rehearsal."""
        config = dict(MODELS[name])
        if self._layers:
            config["num_hidden_layers"] = self._layers
        if self.is_rehearsal:
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
        folder = make_checkpoint(self._room_for(model, config), config)
        gib = model_bytes(config) / (1 << 30)
        sys.stdout.write(f"{model}: {gib:.1f} GiB made in {time.monotonic() - began:.1f} s\n")
        self._systems += 1
        home = self.scratch / f"run-{model}-{self._systems}"
        if self.is_rehearsal:
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

    def _room_for(self, model: str, config: dict[str, Any]) -> Path:
        """Where a checkpoint goes, once there is the space for it."""
        folder = self.scratch / model
        self.scratch.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.scratch).free, model_bytes(config)
        if not (folder / ".complete").exists() and free < needed:
            raise UnderstudyError(
                f"{model} takes {needed / (1 << 30):.0f} GiB, {self.scratch} has "
                f"{free / (1 << 30):.0f} GiB left",
                hint="make room, name another folder with --scratch, or leave it out with --only",
            )
        return folder


def keep_logs(home: Path, target: Path) -> None:
    """The end of each log, in one file: systems are thrown away."""
    parts = []
    paths = sorted([*home.rglob("*.log"), *home.rglob("*.out"), *home.rglob("events.jsonl")])
    for path in paths:
        text = path.read_text("utf-8", "replace")[-60_000:]
        parts += [f"===== {path.name}", text]
    target.write_text("\n".join(parts), "utf-8")
    shutil.rmtree(home, ignore_errors=True)
