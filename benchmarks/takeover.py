"""From the death of the primary to the next token at the client, beside what else one could do.

`python -m benchmarks.takeover` (or `make benchmark`) runs, one after the other on the same
machine and with the same streams:

    standby     Understudy as it is meant: SIGKILL, SIGSTOP and planned switchover; and how soon
                there is redundancy again, without ballast: an engine that has to fill gigabytes
                of private memory is not ready before it has done so
    zygote      no standby: the supervisor forks a new engine, weights and KV are still in memory
    cold        no standby, and no zygote either: a new process with all its imports
    plain       as `cold`, and no weight cache: the engine reads the checkpoint by itself, and
                recomputes the streams, since its KV died with it

Every engine carries ballast: the kernel tears a process down in proportion to its memory, and an
engine of a few megabytes would flatter the result. Every text is compared with that of an
undisturbed run; a wrong one ends the measurement.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.report import ROOT, Row, write_report
from cache.errors import UnderstudyError
from chaos.judge import Interruption, Spread, check_streams, interruptions, reference_texts
from chaos.streams import StreamFleet, StreamRequest, make_requests
from chaos.system import RunningSystem, SystemOptions

RESTORED_TIMEOUT_S: Final = 120.0
TEXT: Final = """\
Streams run through the gateway; a sample is one stream in one round, taken at the client from the
signal (or the order) to the first token behind the gap that it tore. `longest gap` also counts what
comes within half a second: old memory is freed and a new standby starts on the same cores.
{streams} streams of {tokens} tokens, half greedy and half at temperature 1; every engine holds
{ballast} of ballast. Clients, gateway and engines share the cores named above, so this is an upper
bound; the load average of the last minute before the run was {load:.1f}. Every text was equal to
that of an undisturbed run. Made by `python -m benchmarks.takeover`."""


@dataclass(slots=True)
class Samples:
    """What one scenario gave."""

    name: str
    rounds: list[list[Interruption]] = field(default_factory=list)
    restored_ms: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)

    @property
    def gap(self) -> Spread:
        """The longest time without a token, over all streams of all rounds."""
        return Spread.of([one.gap_ms for round_ in self.rounds for one in round_])

    @property
    def next_token(self) -> Spread:
        """From the signal to the next token, over all streams of all rounds."""
        return Spread.of([one.next_token_ms for round_ in self.rounds for one in round_])


class Bench:
    """One running system, its streams, and the rounds that are run on it."""

    def __init__(self, system: RunningSystem, requests: list[StreamRequest]) -> None:
        self._system = system
        self._requests = requests
        self._texts = reference_texts(system.base_url, requests)

    def measure(
        self, name: str, fault: Callable[[RunningSystem], int], *, rounds: int, seed: int = 3
    ) -> Samples:
        """Run a fault again and again, each time at another moment of the streams."""
        samples = Samples(name)
        moments = random.Random(seed)  # noqa: S311 -- the same moments in every run
        for number in range(rounds):
            self._system.wait_whole(timeout_s=RESTORED_TIMEOUT_S)
            tokens = moments.randrange(4, self._requests[0].max_tokens // 2)
            with StreamFleet(self._system.base_url, self._requests) as fleet:
                fleet.wait_tokens(tokens)
                old = self._system.process("primary")
                moment_ns = fault(self._system)
                self._system.wait_whole(timeout_s=RESTORED_TIMEOUT_S, not_led_by=old)
                samples.restored_ms.append((time.monotonic_ns() - moment_ns) / 1e6)
                records = fleet.wait_done()
            check_streams(records, self._texts)
            samples.rounds.append(interruptions(records, moment_ns))
            samples.phases_ms.append(self._phases())
            spread = samples.next_token
            sys.stdout.write(
                f"{name} {number + 1}/{rounds}: p50 {spread.p50:.1f} ms, worst "
                f"{spread.worst:.1f} ms, whole again after {samples.restored_ms[-1]:.0f} ms\n"
            )
            sys.stdout.flush()
        return samples

    def _phases(self) -> dict[str, float]:
        history = self._system.admin.history()
        return history[-1].phases_ms if history else {}


def kill_primary(system: RunningSystem) -> int:
    """SIGKILL."""
    return system.kill("primary")[1]


def hang_primary(system: RunningSystem) -> int:
    """SIGSTOP: alive, silent, and to be found out."""
    return system.kill("primary", signal.SIGSTOP)[1]


def switch_over(system: RunningSystem) -> int:
    """The planned change of roles."""
    moment_ns = time.monotonic_ns()
    system.admin.post("/v1/promote", timeout_s=30)
    return moment_ns


def kill_primary_and_zygote(system: RunningSystem) -> int:
    """Nothing is left to fork from: the new engine imports everything again."""
    primary = system.process("primary")
    system.kill("zygote")
    return system.kill_process(primary)


def run_standby(arguments: argparse.Namespace, requests: list[StreamRequest]) -> list[Samples]:
    """The system as it is meant."""
    with new_system(SystemOptions(ballast=arguments.ballast)) as system:
        bench = Bench(system, requests)
        samples = [
            bench.measure("standby: SIGKILL", kill_primary, rounds=arguments.kills),
            bench.measure("standby: SIGSTOP", hang_primary, rounds=arguments.hangs),
            bench.measure("standby: switchover", switch_over, rounds=arguments.switchovers),
        ]
    with new_system(SystemOptions()) as system:
        bench = Bench(system, requests)
        light = bench.measure("standby, no ballast: SIGKILL", kill_primary, rounds=arguments.hangs)
    return [*samples, light]


def run_alternative(
    name: str,
    options: SystemOptions,
    fault: Callable[[RunningSystem], int],
    arguments: argparse.Namespace,
    requests: list[StreamRequest],
) -> Samples:
    """A system without a standby, whose primary is killed."""
    with new_system(options) as system:
        return Bench(system, requests).measure(name, fault, rounds=arguments.restarts)


def new_system(options: SystemOptions) -> RunningSystem:
    """A system in a fresh folder below the temporary directory."""
    return RunningSystem(Path(tempfile.mkdtemp(prefix="understudy-bench-")), options)


def rows_of(samples: Sequence[Samples]) -> list[Row]:
    """The table: what a client felt, then what the operator waited for."""
    targets = {
        "standby: SIGKILL": "p99 <= 100 ms",
        "standby: SIGSTOP": "p99 <= 600 ms",
        "standby: switchover": "p99 <= 100 ms",
    }
    rows = [
        Row(f"{s.name} -> next token", len(s.rounds), s.next_token, targets.get(s.name, ""))
        for s in samples
    ]
    rows += [
        Row(f"{s.name}, longest gap", len(s.rounds), s.gap) for s in samples if s.name in targets
    ]
    kill, light = samples[0], samples[3]
    for name, one, target in (
        ("SIGKILL -> redundant again", kill, ""),
        ("SIGKILL -> redundant again, no ballast", light, "<= 1 s"),
    ):
        rows.append(Row(name, len(one.rounds), Spread.of(one.restored_ms), target))
    for phase in ("detect", "fence", "promote", "verify", "route", "first_token"):
        values = [phases[phase] for phases in kill.phases_ms if phase in phases]
        if values:
            rows.append(Row(f"of which {phase}, at the supervisor", len(values), Spread.of(values)))
    return rows


def main() -> int:
    """Measure and write; 1 when something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hangs", type=int, default=10)
    parser.add_argument("--switchovers", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=5, help="rounds of each alternative")
    parser.add_argument("--ballast", default="2GiB", help="private memory of each engine")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    arguments = parser.parse_args()
    arguments.load = os.getloadavg()[0]
    requests = make_requests(arguments.streams, max_tokens=arguments.tokens)
    alone = SystemOptions(standby=False, ballast=arguments.ballast)
    without_cache = SystemOptions(standby=False, ballast=arguments.ballast, cache_mode="off")
    try:
        samples = run_standby(arguments, requests)
        for name, options, fault in (
            ("no standby, zygote", alone, kill_primary),
            ("no standby, cold", alone, kill_primary_and_zygote),
            ("no standby, cold, no cache (plain)", without_cache, kill_primary_and_zygote),
        ):
            if arguments.restarts:
                samples.append(run_alternative(name, options, fault, arguments, requests))
    except UnderstudyError as error:
        sys.stderr.write(f"error: {error.stable_code}: {error}\n")
        return 1
    path = write_report(
        arguments.out,
        "takeover",
        title="Takeover",
        rows=rows_of(samples),
        text=TEXT.format(**vars(arguments)),
        data=[asdict(one) for one in samples],
    )
    sys.stdout.write(path.read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
