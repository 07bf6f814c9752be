"""What to do about one group now: a frozen snapshot in, actions and one sentence out.

Invariants
    1. Pure: the same snapshot gives the same decision.
    2. Nobody is promoted while another engine of the group may still act as primary: `Promote`
       only ever stands behind a `Fence` of the old primary in the same recovery, or where no
       serving engine is left that is not proven dead.
    3. Recovery actions run in order and stop at the first that fails; chores are independent of
       one another and of recovery, and nothing slow is ever a recovery action.
    4. A dead primary is always replaced. A judgement (HUNG, or a wrong answer to the canary) is
       limited by intensity, then BLOCKED.
    5. While paused: no signal, no start, no promotion.
"""

from dataclasses import dataclass
from typing import Final

from supervisor.core.states import ALIVE, EngineState
from supervisor.core.verdict import Verdict

__all__ = [
    "AssignBatch",
    "AssignStandby",
    "Chore",
    "CutRoute",
    "Decision",
    "EndCache",
    "EndZygote",
    "EngineView",
    "Fence",
    "Freeze",
    "GiveUp",
    "GroupSnapshot",
    "Promote",
    "PublishRoute",
    "RecoveryAction",
    "StartCache",
    "StartEngine",
    "StartZygote",
    "decide",
]

_S = EngineState
_BAD: Final = frozenset({Verdict.DEAD, Verdict.HUNG})


@dataclass(frozen=True, slots=True)
class EngineView:
    """One configured engine, as far as decisions depend on it."""

    name: str
    is_batch: bool
    state: EngineState
    verdict: Verdict = Verdict.HEALTHY
    may_start: bool = True  # back-off is over
    has_given_up: bool = False
    is_proven: bool = True  # its last known-answer check was right
    is_being_fenced: bool = False  # somebody waits for the evidence already
    is_gone: bool = False  # the end of its process was seen
    may_act: bool = True  # unless proven dead: it was told to be primary, or nobody knows its role
    is_held: bool = False  # the operator froze it, and has not said otherwise


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group, as far as decisions depend on it."""

    name: str
    epoch: int
    engines: tuple[EngineView, ...]
    preferred_primary: str  # from the topology; only counts at the very first start
    is_paused: bool = False
    is_judging_blocked: bool = False  # the intensity of failovers by judgement is used up
    has_stray: bool = False  # an engine that no unit owns may still act as primary
    zygote_is_ready: bool = True
    zygote_is_silent: bool = False  # alive and does not answer
    zygote_may_start: bool = False  # dead, and its back-off is over
    zygote_has_given_up: bool = False  # then engines start cold
    cache_is_silent: bool = False
    cache_may_start: bool = False  # dead, empty or not held by us, and its back-off is over

    @property
    def primary(self) -> EngineView | None:
        """The engine that holds the role, or is about to give it up or take it."""
        serving = (_S.PRIMARY, _S.DEMOTING, _S.PROMOTING)
        return next((e for e in self.engines if e.state in serving), None)


@dataclass(frozen=True, slots=True)
class CutRoute:
    """Stop every gateway worker from talking to the primary of the group."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill the engine's whole tree and wait for evidence that it can never act again."""

    engine: str

    def __str__(self) -> str:
        return f"fencing {self.engine}"


@dataclass(frozen=True, slots=True)
class Promote:
    """Make the engine primary at this epoch."""

    engine: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PublishRoute:
    """Tell the gateways who serves now."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Fork (or spawn) a new instance."""

    engine: str

    def __str__(self) -> str:
        return f"starting {self.engine}"


@dataclass(frozen=True, slots=True)
class AssignStandby:
    """Give a proven engine the standby role."""

    engine: str

    def __str__(self) -> str:
        return f"{self.engine} becomes standby"


@dataclass(frozen=True, slots=True)
class AssignBatch:
    """Give a proven engine the batch role."""

    engine: str

    def __str__(self) -> str:
        return f"{self.engine} becomes the batch engine"


@dataclass(frozen=True, slots=True)
class Freeze:
    """The operator's word outlives the process that it was about, and the supervisor too."""

    engine: str

    def __str__(self) -> str:
        return f"{self.engine} is frozen again"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Died young too often: leave it to the operator."""

    engine: str

    def __str__(self) -> str:
        return f"{self.engine} died young too often, giving up"


@dataclass(frozen=True, slots=True)
class StartZygote:
    """Start the group's zygote again."""

    def __str__(self) -> str:
        return "starting the zygote"


@dataclass(frozen=True, slots=True)
class EndZygote:
    """Kill a zygote that lives and does not answer; a new one is started for it."""

    def __str__(self) -> str:
        return "the zygote does not answer, ending it"


@dataclass(frozen=True, slots=True)
class StartCache:
    """Bring the cache daemon to serve, with the memory that we hold if we hold any."""

    def __str__(self) -> str:
        return "starting the cache daemon"


@dataclass(frozen=True, slots=True)
class EndCache:
    """Kill a daemon that lives and does not answer; the next one gets the same memory."""

    def __str__(self) -> str:
        return "the cache daemon does not answer, ending it"


RecoveryAction = CutRoute | Fence | Promote | PublishRoute
Chore = (
    Fence
    | StartEngine
    | AssignStandby
    | AssignBatch
    | Freeze
    | GiveUp
    | StartZygote
    | EndZygote
    | StartCache
    | EndCache
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Ordered recovery, independent chores, and why."""

    recovery: tuple[RecoveryAction, ...]
    chores: tuple[Chore, ...]
    sentence: str


def decide(snap: GroupSnapshot) -> Decision:
    """What to do about this group now."""
    if snap.is_paused:
        return Decision((), (), "paused by the operator: nothing is started, stopped or promoted")
    recovery, sentence = _recovery(snap)
    fenced_by_recovery = {a.engine for a in recovery if isinstance(a, Fence)}
    chores = tuple(c for c in _chores(snap) if getattr(c, "engine", "") not in fenced_by_recovery)
    promoted = {a.engine for a in recovery if isinstance(a, Promote)}
    chores = tuple(c for c in chores if getattr(c, "engine", "") not in promoted)
    if not sentence:
        sentence = "; ".join(str(c) for c in chores) or "no action"
    return Decision(recovery, chores, sentence)


def _recovery(snap: GroupSnapshot) -> tuple[tuple[RecoveryAction, ...], str]:
    obstacle = _who_may_act(snap)
    candidate = None if obstacle else _candidate(snap)
    if snap.primary is not None:
        return _replacement(snap, snap.primary, candidate, obstacle)
    if candidate is None or _first_is_coming(snap):
        return (), ""
    return (
        (Promote(candidate.name, snap.epoch + 1), PublishRoute()),
        f"there is no primary, promoting {candidate.name}",
    )


def _replacement(
    snap: GroupSnapshot, old: EngineView, candidate: EngineView | None, obstacle: str
) -> tuple[tuple[RecoveryAction, ...], str]:
    """The recovery from a primary that is dead, hung or wrong."""
    if old.verdict not in _BAD and old.is_proven:
        return (), ""
    is_judgement = old.verdict is not Verdict.DEAD
    if is_judgement and (snap.is_judging_blocked or candidate is None):
        # Without a successor it is left alone: killing it cannot help a stream.
        return (), ""
    what = f"{old.name} is {old.verdict}" if old.verdict in _BAD else f"{old.name} answers wrongly"
    fence = (CutRoute(), Fence(old.name))
    if candidate is None:
        why = "there is no standby to promote"
        if obstacle:
            why = f"nobody is promoted before {obstacle} is proven dead"
        return fence, f"{what}, {why}"
    promote = Promote(candidate.name, snap.epoch + 1)
    return (*fence, promote, PublishRoute()), f"{what}, promoting {candidate.name}"


def _candidate(snap: GroupSnapshot) -> EngineView | None:
    """The best successor: a proven standby, else a proven engine without a role.

    One that is ill only by what its `/health` says comes last: it knows the answer, and is better
    than nobody.
    """
    fit = [e for e in snap.engines if not e.is_batch and e.is_proven and e.verdict not in _BAD]
    well = [e for e in fit if e.verdict is not Verdict.DEGRADED]
    for among in (well, fit):
        for state in (_S.STANDBY, _S.READY):
            of_state = [e for e in among if e.state is state]
            preferred = [e for e in of_state if e.name == snap.preferred_primary]
            if of_state:
                return (preferred or of_state)[0]
    return None


def _who_may_act(snap: GroupSnapshot) -> str:
    """Who, beside the primary, might act as one and is not proven dead; empty: nobody.

    A standby that was never told to take over cannot: it has its memory read-only.
    """
    if snap.has_stray:
        return "a stray"
    unproven = (_S.FENCING, _S.UNKILLABLE)
    acting = (e for e in snap.engines if not e.is_batch and e.may_act)
    return next((e.name for e in acting if e.state in unproven), "")


def _first_is_coming(snap: GroupSnapshot) -> bool:
    """Whether nobody was ever promoted, and the one that the topology names is on its way."""
    if snap.epoch > 0:
        return False
    first = next((e for e in snap.engines if e.name == snap.preferred_primary), None)
    return first is not None and first.state in (_S.ABSENT, _S.STARTING)


def _chores(snap: GroupSnapshot) -> list[Chore]:
    chores: list[Chore] = []
    if snap.cache_is_silent:
        chores.append(EndCache())
    elif snap.cache_may_start:
        chores.append(StartCache())
    if snap.zygote_is_silent:
        chores.append(EndZygote())
    elif snap.zygote_may_start:
        chores.append(StartZygote())
    found = (_chore_for(engine, snap, snap.primary) for engine in snap.engines)
    chores.extend(chore for chore in found if chore is not None)
    return chores


def _chore_for(engine: EngineView, snap: GroupSnapshot, primary: EngineView | None) -> Chore | None:
    is_ill = engine.state in ALIVE and engine is not primary and _must_go(engine)
    if is_ill or _waits_for_burial(engine):
        return Fence(engine.name)
    if engine.state in (_S.ABSENT, _S.STOPPED):
        return _revive(engine, snap)
    if engine.state is _S.BATCH and engine.is_held:
        return Freeze(engine.name)
    if engine.state is not _S.READY:
        return None
    if engine.is_batch:
        return AssignBatch(engine.name)
    has_primary = primary is not None and primary.state is _S.PRIMARY
    return AssignStandby(engine.name) if has_primary else None


def _waits_for_burial(engine: EngineView) -> bool:
    """Condemned and nobody waits for the evidence; or it was unkillable, and died after all."""
    if engine.is_being_fenced:
        return False
    return engine.state is _S.FENCING or (engine.state is _S.UNKILLABLE and engine.is_gone)


def _revive(engine: EngineView, snap: GroupSnapshot) -> Chore | None:
    if engine.state is _S.STOPPED and engine.has_given_up:
        return GiveUp(engine.name)
    can_start = snap.zygote_is_ready or snap.zygote_has_given_up
    return StartEngine(engine.name) if engine.may_start and can_start else None


def _must_go(engine: EngineView) -> bool:
    """Dead ones need evidence; hung or wrong ones (never batch frozen by command) are replaced."""
    if engine.verdict is Verdict.DEAD:
        return True
    if engine.state in (_S.FROZEN, _S.STARTING):
        return False
    return engine.verdict is Verdict.HUNG or not engine.is_proven
