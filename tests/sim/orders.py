"""What operators order: steps of a schedule, given to the admin port of a living supervisor."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from supervisor.admin.controller import Operation
from supervisor.runtime.controller import RuntimeController
from tests.sim.driver import Keeper
from tests.sim.schedule import Step
from tests.sim.shapes import group_of, serving_of

__all__ = ["order"]

_Order = Callable[[RuntimeController, str], Coroutine[Any, Any, Operation]]

_ORDERS: Final[dict[str, _Order]] = {
    "promote": lambda c, to: c.promote(group_of(to), to, None, False),
    "failover": lambda c, to: c.failover(group_of(to), to, None, False),
    "evict": lambda c, to: c.evict(to, False, False),
    "hold": lambda c, to: c.evict(to, True, False),
    "resume": lambda c, to: c.resume(to, False),
    "freeze": lambda c, to: c.freeze(to),
    "thaw": lambda c, to: c.thaw(to),
    "restart": lambda c, to: c.restart(to),
    "attest": lambda c, to: c.fence(to, True),
    "fence": lambda c, to: c.fence(to, False),  # asks what would be attested
    "ack": lambda c, _: c.ack(None),
    "pause": lambda c, _: c.pause(),
    "unpause": lambda c, _: c.unpause(),
    "end": lambda c, _: c.stop(),
}

_TAKEOVERS: Final = frozenset({"promote", "failover"})
_HARMLESS: Final = frozenset({"attest", "fence", "ack", "pause", "unpause", "end"})
"""They give nobody leave to end an engine (a stop does, and says so to the machine itself)."""


def order(keeper: Keeper, step: Step) -> None:
    """Let an operator give the order of this step."""
    life, kind, to = keeper.life, step.kind, step.target
    if kind in ("unpause", "end"):  # from now on processes may be signalled
        keeper.world.judge.is_paused = False
    touched = () if kind in _HARMLESS else serving_of(to) if kind in _TAKEOVERS else (to,)
    life.order(kind, to, _ORDERS[kind](life.controller, to), *touched)
