"""What goes wrong: the steps of a schedule, done to the world."""

from collections.abc import Callable
from signal import SIGSEGV

from tests.sim.driver import Keeper
from tests.sim.fakeengine import FakeEngine
from tests.sim.orders import order
from tests.sim.proc import Proc
from tests.sim.schedule import Step
from tests.sim.shapes import group_of
from tests.sim.world import Trap, World

__all__ = ["Applier"]


class Applier:
    """Makes the steps of a schedule happen; orders are given, faults are done here."""

    def __init__(self, world: World, keeper: Keeper) -> None:
        self._world = world
        self._keeper = keeper
        self._apply: dict[str, Callable[[Step], None]] = {
            "kill": self._kill, "segv": self._segv, "stop": self._stop, "wake": self._wake,
            "hang": self._hang, "sever": self._sever,
            "starve": self._starve, "wrong": self._wrong, "unhealthy": self._unhealthy,
            "slow": self._slow, "unkillable": self._unkillable, "doom": self._doom,
            "crash": lambda _: self._keeper.life.kill(),
            "stall": lambda s: self._world.clock.stall(s.amount),
            "pressure": self._pressure, "failing_forks": self._failing_forks,
            "failing_loads": self._failing_loads, "refused_starts": self._refused_starts,
            "damage": self._damage, "reboot": self._reboot, "full_disk": self._full_disk,
            "born_wrong": self._born_wrong, "no_descriptors": self._no_descriptors,
            "clock_jump": self._clock_jump,
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
            order(self._keeper, step)

    def _find(self, target: str) -> Proc | None:
        if target not in ("primary", "standby"):
            return self._world.find(target)
        fit = [
            p for p in self._world.living() if (p.group, getattr(p, "role", "")) == ("chat", target)
        ]
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

    def _segv(self, step: Step) -> None:
        """It crashes by its own fault; the gateways are told who has crashed."""
        if (proc := self._blemish(step)) is not None:
            proc.wait_status = SIGSEGV.value
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

    def _is_answer_known(self, target: str) -> bool:
        """Else a wrong first answer would be the group's: nobody could know better."""
        life, name = self._keeper.life, group_of(target)
        saved = self._keeper.disk.state.canaries.get(name)
        return (saved if life.is_gone else life.group_of(name).golden) is not None

    def _wrong(self, step: Step) -> None:
        if not self._is_answer_known(step.target):
            return
        if isinstance(proc := self._blemish(step), FakeEngine):
            proc.answers_wrong = True

    def _born_wrong(self, step: Step) -> None:
        """The next instances answer wrongly from the start on."""
        if self._is_answer_known(step.target):
            self._world.born_wrong[step.target] += int(step.amount)

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

    def _sever(self, step: Step) -> None:
        """Its control connections break. No blemish: a process that lives is not ended for that."""
        proc = self._find(step.target)
        for client in tuple(proc.connections) if proc is not None else ():
            client.lost()

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

    def _no_descriptors(self, step: Step) -> None:
        """A supervisor can open nothing new; what it needs to see deaths and fence is kept."""
        self._world.has_descriptors = False

        def relax() -> None:
            self._world.has_descriptors = True

        self._world.clock.after(step.amount, relax)

    def _full_disk(self, step: Step) -> None:
        """Nothing is written any more; on some file systems no socket can be made either."""
        world, disk = self._world, self._keeper.disk
        disk.is_full = True
        world.takes_sockets = world.takes_sockets and step.verb != "sockets"

        def relax() -> None:
            disk.is_full = False
            world.takes_sockets = True

        self._world.clock.after(step.amount, relax)

    def _clock_jump(self, step: Step) -> None:
        self._world.clock.unix_offset_s += step.amount

    def _damage(self, step: Step) -> None:
        """The supervisor dies, and the next one finds that its state file is not what it was."""
        self._keeper.life.kill()
        self._keeper.disk.damage = step.verb
        if step.verb != "foreign":  # that one still knows the epochs, and whether we are paused
            self._world.judge.journal_was_lost = True
            self._world.judge.is_paused = False

    def _reboot(self, _: Step) -> None:
        """The machine starts again: no process is left, and the journal is of another boot."""
        self._keeper.life.kill()
        self._keeper.disk.damage = "foreign"
        self._world.born_wrong.clear()
        for proc in self._world.living():
            proc.is_blemished = "reboot"
            proc.vanish()

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

    # ------------------------------------------------------------------ healing

    def heal(self, *, wakes: bool) -> None:
        """No new fault from here on; what hangs stays so, or (`wakes`) goes on by itself."""
        world = self._world
        world.judge.note("no more faults" + (", everything stopped goes on" if wakes else ""))
        world.traps.clear()
        world.doomed.clear()
        world.born_wrong.clear()
        self._keeper.disk.is_full = False
        world.takes_sockets = True
        world.has_descriptors = True
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
            order(self._keeper, Step(0, "unpause"))
