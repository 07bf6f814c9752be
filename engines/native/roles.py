"""Which role may follow which. The supervisor alone assigns roles; the engine only checks.

An engine with private memory of its own has no peer to adopt from, so it can be anything once;
`batch` is for such engines alone, because their slots must not lie in the serving pair's arena.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cache.errors import StaleEpochError
from engines.contract import Role
from engines.errors import RoleNotPossibleError

__all__ = ["TRANSITIONS", "RoleFacts", "check_assume"]


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """What decides whether a role can be taken."""

    role: Role
    epoch: int
    has_shared_memory: bool


def always(_facts: RoleFacts) -> bool:
    """No condition."""
    return True


def has_memory_of_its_own(facts: RoleFacts) -> bool:
    """Batch work may not take slots of the serving pair."""
    return not facts.has_shared_memory


Guard = Callable[[RoleFacts], bool]

TRANSITIONS: Final[dict[tuple[Role, Role], Guard]] = {
    ("none", "standby"): always,
    ("none", "primary"): always,
    ("none", "batch"): has_memory_of_its_own,
    ("standby", "primary"): always,
    ("primary", "standby"): always,
    # The same role again, at the same or a later epoch: orders are repeated after a restart.
    ("standby", "standby"): always,
    ("primary", "primary"): always,
    ("batch", "batch"): always,
}


def check_assume(facts: RoleFacts, wanted: Role, epoch: int) -> None:
    """Whether the engine may take this role now.

    Raises:
        StaleEpochError: the order is older than one obeyed before.
        RoleNotPossibleError: no such transition.
    """
    if epoch < facts.epoch:
        raise StaleEpochError(ours=epoch, seen=facts.epoch)
    guard = TRANSITIONS.get((facts.role, wanted))
    if guard is None:
        raise RoleNotPossibleError(
            f"an engine with role {facts.role} cannot become {wanted}",
            hint="restart it and assign the role to the new instance",
        )
    if not guard(facts):
        raise RoleNotPossibleError(
            f"an engine on shared KV memory cannot become {wanted}",
            hint="start it with a private KV region",
        )
