"""Schedules: what goes wrong when. Drawn from a seed, printed as sentences, applied to a world."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from supervisor.observe.journal import JournalState
from tests.sim.driver import Keeper
from tests.sim.fakeengine import FakeEngine
from tests.sim.shapes import Shape
from tests.sim.world import Proc, Trap, World

__all__ = ["Applier", "Schedule", "Step", "draw"]

LAST_FAULT_S: Final = 14.0
_FOREVER: Final = -1.0


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
    )
    begin_s = rng.choice((0.0, 2.5, 2.5, 2.5))  # some faults hit the very first start
    span_s = rng.choice((0.05, 1.0, 4.0, LAST_FAULT_S - begin_s))
    count = rng.randint(1, 7) if rng.random() < 0.9 else rng.randint(8, 25)  # a storm
    steps = [_draw_step(rng, shape, begin_s, span_s) for _ in range(count)]
    if rng.random() < 0.15:  # two operators at once
        steps += [s for s in steps if s.kind in _ORDERS]
    if any(s.kind == "pause" for s in steps) and rng.random() < 0.5:
        steps.append(Step(begin_s + rng.uniform(0, LAST_FAULT_S - begin_s), "unpause"))
    return Schedule(seed, shape, tuple(sorted(steps, key=lambda s: s.at_s)), rng.random() < 0.5)


def _draw_step(rng: random.Random, shape: Shape, begin_s: float, span_s: float) -> Step:
    at_s = round(begin_s + rng.uniform(0, span_s), 4)
    kind = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    if kind == "trap":
        return _draw_trap(rng, shape, at_s)
    engines = [*shape.engines, "primary", "primary", "standby"]
    helpers = ["zygote-chat", "gateway-0", *(["cache-chat"] if shape.has_cache else [])]
    target, amount = "", 0.0
    match kind:
        case "kill" | "stop" | "slow" | "unkillable":
            target = rng.choice([*engines, *engines, *helpers])
            amount = rng.choice((0.3, 1.0, 3.0))
            if kind == "unkillable" and rng.random() < 0.3:
                amount = _FOREVER
        case "doom":
            target, amount = rng.choice([*shape.engines, *helpers]), rng.randint(1, 6)
        case "starve":
            target, amount = rng.choice([*engines, *helpers]), rng.choice((0.2, 0.6, 2.0))
        case "hang" | "wrong" | "unhealthy":
            target, amount = rng.choice(engines), rng.choice((0.2, 0.6, 2.0))
        case "restart" | "resume" | "promote" | "failover" | "attest":
            target = rng.choice(shape.engines)
        case "evict" | "hold" | "freeze" | "thaw":
            target = "batch" if shape.has_batch else "b"
        case "stall" | "pressure":
            amount = rng.choice((0.05, 0.3, 1.0, 5.0))
        case "failing_forks" | "failing_loads" | "refused_starts":
            amount = rng.randint(1, 5)
    return Step(at_s, kind, target, amount)


def _draw_trap(rng: random.Random, shape: Shape, at_s: float) -> Step:
    verb = rng.choice(("assume", "assume", "assume", "fence", "routes", "fork", "canary",
                       "donate", "attach", "load", "hello", "descriptors"))  # fmt: skip
    action = rng.choice(("kill", "kill", "stop", "crash", "stall", "lose"))
    target = rng.choice(["", *shape.engines]) if verb in ("assume", "fence", "canary") else ""
    return Step(at_s, f"{action}_on", target, 0.5, verb, rng.choice(("before", "after")))


_ORDERS: Final = frozenset({
    "promote", "failover", "evict", "hold", "resume", "freeze", "thaw", "restart", "pause",
})  # fmt: skip
_WEIGHTS: Final = {
    "kill": 24, "stop": 10, "hang": 6, "wrong": 3, "slow": 4, "starve": 2, "unhealthy": 2,
    "unkillable": 4, "doom": 3, "crash": 6, "stall": 3, "trap": 12, "pressure": 3,
    "failing_forks": 2, "failing_loads": 1, "refused_starts": 2,
    "attest": 3, "lost_journal": 1, "pause": 3, "unpause": 2, "promote": 6, "failover": 4,
    "evict": 3, "hold": 1, "resume": 3, "freeze": 3, "thaw": 2, "restart": 4, "ack": 1, "wake": 3,
}  # fmt: skip


class Applier:
    """Makes the steps of a schedule happen."""

    def __init__(self, world: World, keeper: Keeper) -> None:
        self._world = world
        self._keeper = keeper
        self._apply: dict[str, Callable[[Step], None]] = {
            "kill": self._kill, "stop": self._stop, "wake": self._wake, "hang": self._hang,
            "starve": self._starve, "wrong": self._wrong, "unhealthy": self._unhealthy,
            "slow": self._slow, "unkillable": self._unkillable, "doom": self._doom,
            "crash": lambda _: self._keeper.life.kill(),
            "stall": lambda s: self._world.clock.stall(s.amount),
            "pressure": self._pressure, "failing_forks": self._failing_forks,
            "failing_loads": self._failing_loads, "refused_starts": self._refused_starts,
            "lost_journal": self._lost_journal,
        }  # fmt: skip

    def apply(self, step: Step) -> None:
        """Now."""
        self._world.judge.note(f"step: {step}")
        if step.kind.endswith("_on"):
            trap = Trap(step.verb, step.phase, step.target, lambda p: self._spring(step, p))
            self._world.traps.append(trap)
        elif step.kind in self._apply:
            self._apply[step.kind](step)
        elif not self._keeper.life.is_gone:
            self._order(step)

    def _find(self, target: str) -> Proc | None:
        if target not in ("primary", "standby"):
            return self._world.find(target)
        fit = [p for p in self._world.living() if isinstance(p, FakeEngine) and p.role == target]
        return fit[-1] if fit else None

    def _blemish(self, step: Step) -> Proc | None:
        proc = self._find(step.target)
        if proc is not None:
            proc.is_blemished = step.kind
        return proc

    # ------------------------------------------------------------------- faults

    def _kill(self, step: Step) -> None:
        if (proc := self._blemish(step)) is not None:
            proc.kill()

    def _stop(self, step: Step) -> None:
        if (proc := self._blemish(step)) is not None:
            proc.stop()
            if step.amount < 3:
                self._world.clock.after(step.amount, proc.wake)

    def _wake(self, _: Step) -> None:
        for proc in self._world.living():
            if proc.is_blemished == "stop":
                proc.wake()

    def _hang(self, step: Step) -> None:
        if isinstance(proc := self._blemish(step), FakeEngine):
            proc.hang()
            if step.amount < 2:
                self._world.clock.after(step.amount, proc.go_on)

    def _starve(self, step: Step) -> None:
        proc = self._find(step.target)  # no blemish: a starved engine must not be killed
        if isinstance(proc, FakeEngine):
            proc.is_starved = True
            self._world.clock.after(step.amount, proc.go_on)
        elif proc is not None:
            self._starve_helper(proc, 4 * step.amount)

    def _starve_helper(self, proc: Proc, length_s: float) -> None:
        proc.starved_since_ns, proc.slow_s = self._world.clock.now_ns, 1.5

        def recover() -> None:
            proc.delay_ns = proc.look().run_delay_ns
            proc.starved_since_ns, proc.slow_s = None, 0.0

        self._world.clock.after(length_s, recover)

    def _wrong(self, step: Step) -> None:
        life = self._keeper.life
        saved = self._keeper.disk.state.canaries.get(life.group.name)
        if (saved if life.is_gone else life.group.golden) is None:
            return  # the first answer is the right one: nobody could know better
        if isinstance(proc := self._blemish(step), FakeEngine):
            proc.answers_wrong = True

    def _unhealthy(self, step: Step) -> None:
        proc = self._find(step.target)  # no blemish: /health alone is no reason to kill
        if isinstance(proc, FakeEngine):
            proc.is_unhealthy = True

    def _slow(self, step: Step) -> None:
        if (proc := self._blemish(step)) is not None:
            proc.slow_s = step.amount

            def recover() -> None:
                proc.slow_s = 0.0

            self._world.clock.after(3.0, recover)

    def _unkillable(self, step: Step) -> None:
        if (proc := self._blemish(step)) is not None:
            proc.evidence_delay_s = step.amount
            proc.kill()

    def _doom(self, step: Step) -> None:
        self._world.doomed[step.target] += int(step.amount)
        if (proc := self._find(step.target)) is not None:
            proc.is_blemished = step.kind
            proc.kill()

    def _pressure(self, step: Step) -> None:
        self._world.pressure = 3

        def relax() -> None:
            self._world.pressure = 0

        self._world.clock.after(step.amount, relax)

    def _failing_forks(self, step: Step) -> None:
        self._world.failing_forks += int(step.amount)

    def _failing_loads(self, step: Step) -> None:
        self._world.failing_loads += int(step.amount)

    def _refused_starts(self, step: Step) -> None:
        self._world.refused_starts += int(step.amount)

    def _lost_journal(self, _: Step) -> None:
        """The supervisor dies and its state file with it."""
        self._keeper.life.kill()
        self._keeper.disk.state = JournalState()
        self._world.judge.journal_was_lost = True
        self._world.judge.is_paused = False
        engines = [p for p in self._world.living() if isinstance(p, FakeEngine)]
        if any(e.answers_wrong for e in engines):
            # Nobody knows the right answer any more: whoever differs from the first one goes.
            self._world.judge.operator_touched.update(("a", "b", "c", "batch"))

    def _spring(self, step: Step, proc: Proc) -> None:
        self._world.judge.note(f"trap: {step.kind} {step.phase} {step.verb} at {proc}")
        match step.kind:
            case "kill_on":
                proc.is_blemished = step.kind
                proc.kill()
            case "stop_on":
                proc.is_blemished = "stop"
                proc.stop()
            case "crash_on":
                self._keeper.life.kill()
            case "stall_on":
                self._world.clock.stall(step.amount)
            case "lose_on":
                proc.is_blemished = step.kind
                proc.lose_answers += 1

    # ----------------------------------------------------------------- operator

    def _order(self, step: Step) -> None:
        life, to = self._keeper.life, step.target
        commands = life.controller
        match step.kind:
            case "promote":
                life.order(f"promote {to}", commands.promote(None, to, None, False), "a", "b", "c")
            case "failover":
                life.order(f"failover {to}", commands.failover(None, to, None, False),
                           "a", "b", "c")  # fmt: skip
            case "evict" | "hold":
                work = commands.evict(to, step.kind == "hold", False)
                life.order(f"evict {to}", work, to)
            case "resume":
                life.order(f"resume {to}", commands.resume(to, False), to)
            case "freeze":
                life.order(f"freeze {to}", commands.freeze(to), to)
            case "thaw":
                life.order(f"thaw {to}", commands.thaw(to), to)
            case "restart":
                life.order(f"restart {to}", commands.restart(to), to)
            case "attest":
                life.order(f"fence {to}", commands.fence(to, True), to)
            case "ack":
                life.order("ack", commands.ack(None))
            case "pause":
                life.order("pause", commands.pause())
            case "unpause":
                self._world.judge.is_paused = False
                life.order("unpause", commands.unpause())
            case _:
                raise AssertionError(step)

    # ------------------------------------------------------------------ healing

    def heal(self, *, wakes: bool) -> None:
        """No new fault from here on; what hangs stays so, or (`wakes`) goes on by itself."""
        world = self._world
        world.judge.note("no more faults" + (", everything stopped goes on" if wakes else ""))
        world.traps.clear()
        world.doomed.clear()
        world.failing_forks = world.failing_loads = world.refused_starts = 0
        world.pressure = 0
        for proc in world.living():
            proc.slow_s = 0.0
            proc.lose_answers = 0
            if isinstance(proc, FakeEngine) and (wakes or proc.is_starved):
                proc.go_on()
            if wakes and proc.is_blemished in ("stop", "stop_on"):
                proc.wake()
        if not self._keeper.life.is_gone:
            self._order(Step(0, "unpause"))
