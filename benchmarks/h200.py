"""What one GPU gives: takeover, switchover, batch, memory, loading, speed. One command.

`python -m benchmarks.h200` makes its checkpoints (random weights of real shapes) below `--scratch`,
starts the real system with the real gateway, and runs the experiments in the order of their value
until time is up. It needs a GPU with 141 GB, 84 GiB free in the scratch folder (a memory file
system; 27 GiB without the 70B model) and some 25 minutes. The figures of loading come last, from
`python -m benchmarks.h200_load`, into `h200_load.json` and `h200_load.md`.

Each result is on disk as soon as it is known. A second run at the same commit goes on where the
first one ended; `--again` measures anew. Figures of other commits stay until their experiment has
been measured anew, and a run that fails never replaces figures.

Texts are compared with those of an undisturbed run of the same streams: a stream that was
recomputed differently, lost or repeated a token ends the experiment as failed.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from benchmarks.gpu_beside import batch_ladder, beside_others
from benchmarks.gpu_card import NoCard, open_card
from benchmarks.gpu_experiments import (
    kill_primary,
    memory_of_parts,
    speed_of_library,
    speed_of_system,
    stop_and_switch,
    undisturbed,
)
from benchmarks.gpu_redundancy import kill_alone, kill_standby, kill_with_zygote, restarts
from benchmarks.gpu_situation import Situation
from benchmarks.gpu_system import Figure
from benchmarks.h200_run import LONG_PROMPTS, SIZES, Run
from benchmarks.report import ROOT
from cache.errors import UnderstudyError
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

_FIRST: Final = ("undisturbed", "kill", "standby", "stop-switch", "memory", "beside", "batch")
"""All on one running system."""
_OTHERS: Final = {"qwen3-235b-fp8-4-layers": "fp8_block", "llama-70b-fp8": "fp8_block"}
EXPERIMENTS: Final = (*_FIRST, "speed", *(name for name, *_ in _RESTARTS), *_OTHERS, "load")
_SAME: Final = "Texts equal to those of an undisturbed run."


class WholeRun(Run):
    """The experiments in their order."""

    def all(self) -> None:
        """Everything, the most valuable first."""
        if any(self.is_open(name) for name in _FIRST):
            if self.left_s > 60:
                self._first_system()
            else:
                self.left_out += filter(self.is_open, _FIRST)
        self._speed()
        # A small model's checkpoint is gone before the large one's is made: they share the space.
        self._restarts("llama-8b")
        self._other_model("qwen3-235b-fp8-4-layers")
        shutil.rmtree(self.scratch / "qwen3-235b-fp8-4-layers", ignore_errors=True)
        self._restarts("llama-70b-fp8")
        self._other_model("llama-70b-fp8")
        self._load()

    def _first_system(self) -> None:
        text = ("Llama-8B shape, bfloat16, eight streams of 8k to 28k prompt tokens, standby "
                "parked: the reference.")  # fmt: skip
        try:
            with self.system(
                "llama-8b", batch=True, max_tokens=self.tokens, prompts=self.prompts
            ) as at:
                self.note("undisturbed", text, lambda: undisturbed(at))
                if at.texts:
                    self._beside_reference(at)
        except Exception as error:  # noqa: BLE001 - other systems may well start, or stop, better
            self.note_failure("undisturbed", text, error)

    def _beside_reference(self, at: Situation) -> None:
        """What is measured on the first system, once there are texts to compare with."""
        if self.wants("kill", needs_s=60):
            self.note("kill", f"SIGKILL of the primary, again and again, under those streams. "
                      f"{_SAME}", lambda: kill_primary(at, kills=self.kills))  # fmt: skip
        if self.wants("standby", needs_s=60):
            self.note("standby", f"SIGKILL of the standby while eight short streams decode. "
                      f"{_SAME}",
                      lambda: kill_standby(at, kills=max(2, self.kills // 2)))  # fmt: skip
        if self.wants("stop-switch", needs_s=130):
            self.note("stop-switch", f"SIGSTOP of the primary, and planned switchovers, under "
                      f"eight short streams. {_SAME}",
                      lambda: stop_and_switch(at, stops=self.kills, switches=20))  # fmt: skip
        if self.wants("batch", needs_s=50):
            self.note("batch", "Giving way. Texts equal to those of an undisturbed run, as far as "
                      "they came before the eviction.",
                      lambda: batch_ladder(at, rounds=10))  # fmt: skip
        if self.wants("beside", needs_s=75):
            self.note("beside", "Eight short streams beside others on the card; every row twice, "
                      "in turn. Texts equal to those of the first row.",
                      lambda: beside_others(at))  # fmt: skip
        if self.wants("memory", needs_s=30):
            self.note("memory", "Device memory by part.", lambda: memory_of_parts(at))

    def _speed(self) -> None:
        if not self.wants("speed", needs_s=130):
            return

        def measure() -> list[Figure]:
            with self.system("llama-8b", slots=32, max_length=2048, standby=False, max_tokens=256,
                             prompts=[128] * 32) as at:  # fmt: skip
                ours = speed_of_system(at, (1, 8, 32))
                folder = at.folder
            theirs = [] if self.is_rehearsal else speed_of_library(folder, (1, 8, 32))
            return [*ours, *theirs]

        self.note("speed", "Decode tokens per second, all streams together; prompts of 128 tokens. "
                  "Ours: texts equal in every round and at every batch size.", measure)  # fmt: skip

    def _restarts(self, of_model: str) -> None:
        """What a standby, a zygote and a cache are good for: the same death without them."""
        for name, model, mode, ways in _RESTARTS:
            if model == of_model and self.wants(name, needs_s=100):
                text = (
                    f"Without a standby: eight short streams, {model}, cache mode {mode}. {_SAME}"
                )
                self.note(name, text, partial(self._restart, model, mode, ways))

    def _restart(self, model: str, mode: str, ways: Ways) -> list[Figure]:
        shape = {
            "quantization": "fp8_block" if "fp8" in model else "none",
            "standby": False, "cache_mode": mode, "max_length": 2048,
        }  # fmt: skip
        with self.system(model, max_tokens=600, prompts=[128] * 8, **shape) as at:
            found = [restarts(at, what, fault, rounds=rounds) for what, fault, rounds in ways]
        return list(chain.from_iterable(found))

    def _other_model(self, model: str) -> None:
        if not self.wants(model, needs_s=90):
            return

        def measure() -> list[Figure]:
            prompts = [max(64, int(n / 8 * self.prompts[0] / LONG_PROMPTS[0]))
                       for n in LONG_PROMPTS]  # fmt: skip
            with self.system(model, quantization=_OTHERS[model], max_length=8192, max_tokens=600,
                             prompts=prompts) as at:  # fmt: skip
                return [*undisturbed(at), *kill_primary(at, kills=6)]

        self.note(model, f"{model}, streams of 1k to 3.5k prompt tokens. {_SAME}", measure)

    def _load(self) -> None:
        """The other command, in a process of its own: it makes a CUDA context."""
        if self.is_rehearsal or not self.wants("load", needs_s=150):
            return

        def measure() -> list[Figure]:
            limit_s = min(540.0, self.left_s)
            command = [
                *(sys.executable, "-m", "benchmarks.h200_load", "--out", str(self.book.folder)),
                *("--work", str(self.scratch), "--deadline", str(limit_s)),
            ]
            # Its steps look at the clock only before they begin.
            done = subprocess.run(command, cwd=ROOT, timeout=limit_s + 90, check=False)
            if done.returncode:
                raise UnderstudyError(
                    f"h200_load ended with {done.returncode}; its output says why"
                )
            return []

        text = (
            "Figures of loading and mapping: `h200_load.md`, by `python -m benchmarks.h200_load`."
        )
        self.note("load", text, measure)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None,
                        help="folder of the results (docs/benchmarks; in a rehearsal, one in the "
                             "scratch folder)")  # fmt: skip
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/understudy"),  # noqa: S108
                        help="folder of checkpoints and state (%(default)s)")  # fmt: skip
    parser.add_argument("--deadline", type=float, default=3600.0, metavar="S",
                        help="seconds for everything (%(default).0f)")  # fmt: skip
    parser.add_argument("--only", type=_names, default=(), metavar="NAME,...",
                        help=f"some of {', '.join(EXPERIMENTS)}")  # fmt: skip
    parser.add_argument("--again", action="store_true",
                        help="measure what was measured at this commit, too")  # fmt: skip
    parser.add_argument("--kills", type=int, default=SIZES["kills"],
                        help="of the primary; half as many of standbys (%(default)s)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=SIZES["tokens"],
                        help="tokens of each long stream")  # fmt: skip
    parser.add_argument("--scale", type=float, default=SIZES["scale"],
                        help="shortens the prompts (rehearsal)")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="tiny models, without a GPU")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers (rehearsal)")
    arguments = parser.parse_args(argv)
    if arguments.out is None:
        is_whole = not arguments.rehearse
        arguments.out = ROOT / "docs" / "benchmarks" if is_whole else arguments.scratch / "results"
    return arguments


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if unknown := set(names).difference(EXPERIMENTS):
        raise argparse.ArgumentTypeError(
            f"no such experiment: {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}"
        )
    return names


def main() -> int:
    """Measure; 0 when every experiment that was run came through."""
    arguments = parsed()
    try:
        card = NoCard() if arguments.rehearse else open_card()
        run = WholeRun(arguments, card)
    except UnderstudyError as error:
        sys.stderr.write(f"error: {error.stable_code}: {error}\n")
        return 2
    if done := list(filter(run.is_done, EXPERIMENTS)):
        sys.stdout.write(f"measured at this commit already (else --again): {', '.join(done)}\n")
    run.all()
    card.release()
    if run.left_out:
        sys.stdout.write(f"left out for want of time: {', '.join(run.left_out)}\n")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
