"""Life of an engine as the supervisor sees it: every legal move, in one table.

The state belongs to the *configured* engine (its name), not to one process: an instance comes and
goes between STARTING and STOPPED. `docs/fsm.md` is printed from `TRANSITIONS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supervisor.errors import SupervisorError

__all__ = [
    "ALIVE",
    "SERVING",
    "TRANSITIONS",
    "EngineState",
    "Facts",
    "IllegalTransitionError",
    "StateEvent",
    "Transition",
    "next_state",
]


class EngineState(StrEnum):
    """Where an engine is in its life."""

    ABSENT = "absent"  # nothing was started yet in this run
    STARTING = "starting"  # a process exists; it attaches, binds and proves itself
    READY = "ready"  # proven, without a role
    STANDBY = "standby"  # KV read-only, proven, may be promoted
    PROMOTING = "promoting"  # told to take over, not confirmed yet
    PRIMARY = "primary"
    DEMOTING = "demoting"  # a planned switchover: gives its slots up at a step boundary
    BATCH = "batch"
    FROZEN = "frozen"  # stopped by command: memory kept, no compute; never HUNG
    FENCING = "fencing"  # condemned; evidence of death is outstanding
    STOPPED = "stopped"  # proven dead; will be started again when policy allows
    EVICTED = "evicted"  # proven dead by command; stays away until resumed
    FATAL = "fatal"  # died young too often; the operator must restart it
    UNKILLABLE = "unkillable"  # SIGKILL without evidence; never routed, memory never reused


class StateEvent(StrEnum):
    """What happened, in the past tense."""

    SPAWNED = "spawned"
    ADOPTED = "adopted"  # found alive by a new supervisor; its role is confirmed by later events
    PROVEN = "proven"
    STANDBY_CONFIRMED = "standby_confirmed"
    BATCH_CONFIRMED = "batch_confirmed"
    PROMOTION_ORDERED = "promotion_ordered"
    PRIMARY_CONFIRMED = "primary_confirmed"
    DEMOTION_ORDERED = "demotion_ordered"
    FROZEN = "frozen"
    THAWED = "thawed"
    CONDEMNED = "condemned"
    FENCE_PROVEN = "fence_proven"
    FENCE_TIMED_OUT = "fence_timed_out"
    HARMLESSNESS_ATTESTED = "harmlessness_attested"  # by the operator: it can never act again
    EVICTION_COMPLETED = "eviction_completed"
    RESUMED = "resumed"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a guard may look at."""

    predecessor_fenced: bool = False  # nobody else can act as primary of this group
    known_answer_matches: bool = False


def always(_: Facts) -> bool:
    """No condition."""
    return True


def predecessor_is_fenced(facts: Facts) -> bool:
    """One primary per epoch: the old one is proven dead, has given up, or never was."""
    return facts.predecessor_fenced


def known_answer_matches(facts: Facts) -> bool:
    """A 200 proves nothing: the engine has answered the canary as its group does."""
    return facts.known_answer_matches


Guard = Callable[[Facts], bool]


@dataclass(frozen=True, slots=True)
class Transition:
    """One legal move."""

    source: EngineState
    event: StateEvent
    guard: Guard
    target: EngineState


_S, _E = EngineState, StateEvent

ALIVE: Final = frozenset({
    _S.STARTING, _S.READY, _S.STANDBY, _S.PROMOTING, _S.PRIMARY, _S.DEMOTING, _S.BATCH, _S.FROZEN,
})  # fmt: skip
"""States in which a process is expected to live."""

SERVING: Final = frozenset({_S.PROMOTING, _S.PRIMARY, _S.DEMOTING})
"""States in which the engine may hold the KV arena read-write."""

TRANSITIONS: Final[tuple[Transition, ...]] = (
    *(
        Transition(source, _E.SPAWNED, always, _S.STARTING)
        for source in (_S.ABSENT, _S.STOPPED)
    ),
    Transition(_S.ABSENT, _E.ADOPTED, always, _S.READY),
    Transition(_S.STARTING, _E.PROVEN, known_answer_matches, _S.READY),
    Transition(_S.READY, _E.STANDBY_CONFIRMED, always, _S.STANDBY),
    Transition(_S.READY, _E.BATCH_CONFIRMED, always, _S.BATCH),
    Transition(_S.READY, _E.PRIMARY_CONFIRMED, predecessor_is_fenced, _S.PRIMARY),
    *(
        Transition(source, _E.PROMOTION_ORDERED, predecessor_is_fenced, _S.PROMOTING)
        for source in (_S.READY, _S.STANDBY)
    ),
    Transition(_S.PROMOTING, _E.PRIMARY_CONFIRMED, always, _S.PRIMARY),
    Transition(_S.PRIMARY, _E.DEMOTION_ORDERED, always, _S.DEMOTING),
    Transition(_S.DEMOTING, _E.STANDBY_CONFIRMED, always, _S.STANDBY),
    Transition(_S.BATCH, _E.FROZEN, always, _S.FROZEN),
    Transition(_S.FROZEN, _E.THAWED, always, _S.BATCH),
    *(
        Transition(source, _E.CONDEMNED, always, _S.FENCING)
        for source in EngineState
        if source in ALIVE
    ),
    *(
        Transition(source, _E.FENCE_PROVEN, always, _S.STOPPED)
        for source in (_S.FENCING, _S.UNKILLABLE)
    ),
    Transition(_S.FENCING, _E.FENCE_TIMED_OUT, always, _S.UNKILLABLE),
    Transition(_S.UNKILLABLE, _E.HARMLESSNESS_ATTESTED, always, _S.STOPPED),
    *(
        Transition(source, _E.EVICTION_COMPLETED, always, _S.EVICTED)
        for source in (_S.STOPPED, _S.FATAL, _S.ABSENT)
    ),
    *(
        Transition(source, _E.RESUMED, always, _S.STOPPED)
        for source in (_S.EVICTED, _S.FATAL)
    ),
    Transition(_S.STOPPED, _E.GIVEN_UP, always, _S.FATAL),
)  # fmt: skip

_BY_KEY: Final = {(t.source, t.event): t for t in TRANSITIONS}


class IllegalTransitionError(SupervisorError):
    """An event arrived in a state where the table has no row for it, or its guard refused."""

    code = "illegal_transition"

    def __init__(self, engine: str, state: EngineState, event: StateEvent, story: str) -> None:
        super().__init__(
            f"{engine} is {state}, {event} is not possible there",
            hint="this is a bug; please report it with the engine's story",
            details={"story": story},
        )


def next_state(
    state: EngineState, event: StateEvent, facts: Facts, *, engine: str = "", story: str = ""
) -> EngineState:
    """The state after `event`.

    Raises:
        IllegalTransitionError: no such row, or its guard says no.
    """
    row = _BY_KEY.get((state, event))
    if row is None or not row.guard(facts):
        raise IllegalTransitionError(engine, state, event, story)
    return row.target
