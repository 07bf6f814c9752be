"""Schedules: what goes wrong when, and what operators order. Drawn from a seed, told as sentences.

`faults` and `orders` make the steps happen.
"""

import random
from dataclasses import dataclass
from typing import Final

from tests.sim.shapes import Shape

__all__ = ["LAST_FAULT_S", "Schedule", "Step", "draw"]

LAST_FAULT_S: Final = 14.0
_FOREVER: Final = -1.0
_DAMAGES: Final = ("corrupt", "torn", "empty", "foreign", "future", "gone")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that goes wrong, or that the operator orders."""

    at_s: float
    kind: str
    target: str = ""  # a unit, or a role: primary, standby
    amount: float = 0.0
    verb: str = ""
    phase: str = ""

    def __str__(self) -> str:
        extra = f" {self.amount:g}" if self.amount else ""
        trap = f" {self.phase} {self.verb}" if self.verb else ""
        return f"{self.at_s:7.3f} s  {self.kind} {self.target}{extra}{trap}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A seed for the latencies, a shape, and the steps."""

    seed: int
    shape: Shape
    steps: tuple[Step, ...]
    heals: bool = True  # stopped and hung processes go on after the last fault


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    shape = Shape(
        workers=rng.choice((1, 1, 2)),
        standbys=rng.choice((1, 1, 1, 2)),
        has_batch=rng.random() < 0.7,
        has_ladder=rng.random() < 0.3,
        has_cache=rng.random() < 0.85,
        has_load=rng.random() < 0.85,
        has_neighbour=rng.random() < 0.15,
    )
    begin_s = rng.choice((0.0, 2.5, 2.5, 2.5))  # some faults hit the very first start
    span_s = rng.choice((0.05, 1.0, 4.0, LAST_FAULT_S - begin_s))
    count = rng.randint(1, 7) if rng.random() < 0.9 else rng.randint(8, 25)  # a storm
    steps = [_draw_step(rng, shape, begin_s, span_s) for _ in range(count)]
    if rng.random() < 0.15:  # two operators give the same orders
        steps += [s for s in steps if s.kind in _ORDERS]
    if rng.random() < 0.15:
        steps += _draw_race(rng, shape, rng.choice(steps).at_s)
    if any(s.kind == "pause" for s in steps) and rng.random() < 0.5:
        steps.append(Step(begin_s + rng.uniform(0, LAST_FAULT_S - begin_s), "unpause"))
    return Schedule(seed, shape, tuple(sorted(steps, key=lambda s: s.at_s)), rng.random() < 0.5)


def _draw_race(rng: random.Random, shape: Shape, at_s: float) -> list[Step]:
    """Two operators who know nothing of one another, within some milliseconds."""
    kinds = rng.choices(sorted(_ORDERS), k=rng.randint(2, 5))
    return [
        Step(round(at_s + rng.uniform(0, 0.03), 4), kind, _draw_target(rng, shape, kind))
        for kind in kinds
    ]


def _draw_target(rng: random.Random, shape: Shape, kind: str) -> str:
    """The engine that an order is about."""
    if kind in ("restart", "resume", "promote", "failover", "attest", "fence"):
        return rng.choice(shape.engines)
    if kind in ("evict", "hold", "freeze", "thaw"):
        return "batch" if shape.has_batch else "b"
    return ""


def _draw_step(rng: random.Random, shape: Shape, begin_s: float, span_s: float) -> Step:
    at_s = round(begin_s + rng.uniform(0, span_s), 4)
    kind = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    if kind == "trap":
        return _draw_trap(rng, shape, at_s)
    engines = [*shape.engines, "primary", "primary", "standby"]
    target, amount, verb = _draw_target(rng, shape, kind), 0.0, ""
    match kind:
        case "kill" | "segv" | "stop" | "slow" | "unkillable" | "sever":
            target = rng.choice([*engines, *engines, *shape.helpers])
            amount = rng.choice((0.3, 1.0, 3.0))
            if kind == "unkillable" and rng.random() < 0.3:
                amount = _FOREVER
        case "born_wrong":
            target, amount = rng.choice(shape.engines), rng.randint(1, 3)
        case "doom":
            target, amount = rng.choice([*shape.engines, *shape.helpers]), rng.randint(1, 6)
        case "starve":
            target, amount = rng.choice([*engines, *shape.helpers]), rng.choice((0.2, 0.6, 2.0))
        case "hang" | "wrong" | "unhealthy":
            target, amount = rng.choice(engines), rng.choice((0.2, 0.6, 2.0))
        case "stall" | "pressure" | "full_disk" | "no_descriptors":
            longest_s = 15.0 if kind == "no_descriptors" else 1.0
            amount = rng.choice((0.05, 0.3, 5.0, longest_s))
            verb = "sockets" if kind == "full_disk" and rng.random() < 0.5 else ""
        case "clock_jump":
            amount = rng.choice((-86400.0, -3.0, 3.0, 86400.0))
        case "damage":
            verb = rng.choice(_DAMAGES)
        case "failing_forks" | "failing_loads" | "refused_starts":
            amount = rng.randint(1, 5)
    return Step(at_s, kind, target, amount, verb)


def _draw_trap(rng: random.Random, shape: Shape, at_s: float) -> Step:
    verb = rng.choice(("assume", "assume", "assume", "fence", "routes", "fork", "canary",
                       "donate", "attach", "load", "hello", "descriptors"))  # fmt: skip
    action = rng.choice(("kill", "kill", "stop", "crash", "stall", "lose"))
    target = rng.choice(["", *shape.engines]) if verb in ("assume", "fence", "canary") else ""
    return Step(at_s, f"{action}_on", target, 0.5, verb, rng.choice(("before", "after")))


_ORDERS: Final = frozenset({
    "promote", "failover", "evict", "hold", "resume", "freeze", "thaw", "restart", "pause",
    "unpause", "ack", "attest", "fence",
})  # fmt: skip
_WEIGHTS: Final = {
    # processes
    "kill": 20, "segv": 5, "stop": 10, "hang": 6, "wrong": 3, "born_wrong": 2, "slow": 4,
    "starve": 2, "unhealthy": 2, "unkillable": 4, "doom": 3, "trap": 12, "pressure": 3, "wake": 3,
    "sever": 3,
    # the supervisor and its files
    "crash": 6, "stall": 3, "damage": 2, "reboot": 1, "full_disk": 2, "clock_jump": 1,
    # a machine that refuses
    "failing_forks": 2, "failing_loads": 1, "refused_starts": 2, "no_descriptors": 2,
    # operators
    "attest": 3, "fence": 1, "pause": 3, "unpause": 2, "promote": 6, "failover": 4, "evict": 3,
    "hold": 1, "resume": 3, "freeze": 3, "thaw": 2, "restart": 4, "ack": 2, "end": 1,
}  # fmt: skip
