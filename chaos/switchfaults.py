"""Faults in the middle of a switchover: of an order to promote, or of a promotion under way."""

import signal
import threading
import time
from typing import Final, Literal

from cache.errors import UnderstudyError
from chaos.client import wait_until
from chaos.faultmodel import (
    DEADLY,
    FaultModel,
    Injury,
    Role,
    SignalName,
    World,
    streams_elsewhere,
)
from supervisor.topology.schema import Seconds

__all__ = ["HitSwitchoverFault", "KillPromotingFault", "PromoteTwiceFault"]

_ORDER_S: Final = 30.0

_ANSWER_S: Final = _ORDER_S + 5.0
"""The order's own deadline ends the wait for its answer; a busy machine notices it later."""

_ANSWERS: Final = frozenset({200, 409, 412, 503, 504})
"""What an order to promote may be answered: done, refused with a reason, or given up in time."""


class KillPromotingFault(FaultModel):
    """The primary dies, and its successor dies in the middle of its own promotion."""

    kind: Literal["kill_promoting"] = "kill_promoting"
    signal: SignalName = "KILL"

    def inject(self, world: World) -> Injury:
        """The standby is stopped first, so that its promotion takes long enough to be hit."""
        primary, standby = world.locate("primary"), world.locate("standby")
        name = standby.instance.rpartition("-")[0]
        world.send(standby, signal.SIGSTOP)
        at_ns = time.monotonic_ns()
        world.send(primary, signal.SIGKILL)

        def is_promoting() -> bool:
            status = world.system.status()
            engines = status.group.engines if status is not None else []
            return any(e.name == name and e.state == "promoting" for e in engines)

        wait_until(is_promoting, f"{name} being promoted", timeout_s=5)
        world.send(standby, signal.Signals[f"SIG{self.signal}"])
        return Injury(at_ns, (primary, standby), is_deadly=True)


class PromoteTwiceFault(FaultModel):
    """Two operators order a switchover at the same moment."""

    kind: Literal["promote_twice"] = "promote_twice"

    def inject(self, world: World) -> Injury:
        """Both must be answered; one may be refused."""
        answers: list[int | OSError] = []
        at_ns = time.monotonic_ns()
        threads = [threading.Thread(target=_promote, args=(world, answers)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=_ANSWER_S)
        note = f"answered {', '.join(sorted(map(_shown, answers)))}"
        is_fine = set(answers) <= {200, 409, 412} and 200 in answers and len(answers) == 2
        return Injury(at_ns, note=note, problem="" if is_fine else f"two promotions: {note}")


class HitSwitchoverFault(FaultModel):
    """An operator orders a switchover, and in the middle of it somebody is killed or stopped."""

    kind: Literal["hit_switchover"] = "hit_switchover"
    target: Role
    signal: SignalName = "KILL"
    delay: Seconds = 0.0

    def inject(self, world: World) -> Injury:
        """The order must be answered, with what it came to or with why it was refused."""
        target = world.locate(self.target)
        may_break_off = self.target == "supervisor" or world.system.status() is None
        is_deadly = self.signal in DEADLY
        breaks = is_deadly and self.target == "gateway"
        spared = streams_elsewhere(world, {target.pid}) if breaks else ()
        answers: list[int | OSError] = []
        thread = threading.Thread(target=_promote, args=(world, answers))
        thread.start()
        time.sleep(self.delay)
        at_ns = time.monotonic_ns()
        was_there = world.send(target, signal.Signals[f"SIG{self.signal}"])
        thread.join(timeout=_ANSWER_S)
        if not was_there:
            raise UnderstudyError(f"{target.role} was gone before the signal")
        shown = "-".join(map(_shown, answers)) or "never"
        is_fine = bool(answers) and all(_is_answer(a, may_break_off) for a in answers)
        return Injury(at_ns, (target,), breaks, is_deadly, spared=spared,
                      note=f"{self.delay * 1000:g} ms, answered {shown}",
                      problem="" if is_fine else f"the order to promote: {shown}")  # fmt: skip


def _promote(world: World, answers: list[int | OSError]) -> None:
    """Order a switchover; the answer goes to the list."""
    try:
        reply = world.system.admin.request("POST", "/v1/promote", {}, timeout_s=_ORDER_S)
        answers.append(reply.status)
    except OSError as error:
        answers.append(error)


def _is_answer(answer: int | OSError, may_break_off: bool) -> bool:
    """Done, or refused with a reason; a connection breaks only with its supervisor."""
    if isinstance(answer, OSError):
        return may_break_off and isinstance(answer, ConnectionError | FileNotFoundError)
    return answer in _ANSWERS


def _shown(answer: int | OSError) -> str:
    return str(answer) if isinstance(answer, int) else type(answer).__name__
