"""The batch ladder: under pressure freeze, then evict; when it is quiet again thaw or resume.

Freezing is instant and reversible and keeps the memory; evicting gives the memory back. Steps up
follow pressure at once (freeze) or after `evict_after`; steps down wait for `resume_after` without
pressure, so that a load that comes in bursts does not make the engine flap.

What the operator did is never undone here: what is held (frozen by the operator, or evicted with
`--hold`) stays as it is. Whatever else is frozen was frozen by a ladder: by this one, or by that of
a supervisor that has crashed, whose work is gone on with. Its time counts anew from the first look.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supervisor.core.states import EngineState

__all__ = ["Condition", "Ladder", "LadderSettings", "LadderStep", "parse_condition"]

QUANTITIES: Final = ("queue", "active")
"""`queue`: requests that wait for a slot of the primary; `active`: its rows that decode."""

_CONDITION = re.compile(r"\s*(\w+)\s*(>=|>)\s*(\d+)\s*")


class LadderStep(StrEnum):
    """What to do with the batch engine."""

    FREEZE = "freeze"
    THAW = "thaw"
    EVICT = "evict"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Condition:
    """`quantity > bound` (a `>=` is stored as the next lower bound)."""

    quantity: str
    above: int

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether there is pressure now."""
        return values[self.quantity] > self.above


def parse_condition(text: str) -> Condition:
    """`"queue > 0"` as a condition.

    Raises:
        ValueError: not of the form `QUANTITY > NUMBER`, or an unknown quantity.
    """
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in QUANTITIES:
        raise ValueError(
            f"{text!r} is not a condition; write QUANTITY > NUMBER with one of "
            f"{', '.join(QUANTITIES)}, such as queue > 0"
        )
    return Condition(match[1], int(match[3]) - (1 if match[2] == ">=" else 0))


@dataclass(frozen=True, slots=True)
class LadderSettings:
    """A group's `batch` section. None switches a step off."""

    freeze_when: Condition | None
    evict_after_s: float | None
    resume_after_s: float | None


class Ladder:
    """Remembers since when there is pressure or quiet. Feed it at every sample."""

    def __init__(self, settings: LadderSettings) -> None:
        self._settings = settings
        self._frozen_since_s: float | None = None  # first seen so
        self._quiet_since_s: float | None = None
        self._last_state: EngineState | None = None

    def step(
        self, state: EngineState, values: Mapping[str, int], *, is_held: bool, now_s: float
    ) -> LadderStep | None:
        """What to do now, or None."""
        self._note_frozen(state, is_held=is_held, now_s=now_s)
        condition = self._settings.freeze_when
        if condition is None:  # today; a ladder of yesterday may have left one frozen
            return LadderStep.THAW if self._frozen_since_s is not None else None
        pressed = condition.holds(values)
        if pressed:
            self._quiet_since_s = None
        elif self._quiet_since_s is None or (
            state is EngineState.EVICTED and self._last_state is not EngineState.EVICTED
        ):
            self._quiet_since_s = now_s  # an eviction in quiet times lasts `resume_after` too
        self._last_state = state
        return self._up(state, now_s) if pressed else self._down(state, now_s, is_held=is_held)

    def _note_frozen(self, state: EngineState, *, is_held: bool, now_s: float) -> None:
        if state is not EngineState.FROZEN or is_held:
            self._frozen_since_s = None
        elif self._frozen_since_s is None:
            self._frozen_since_s = now_s

    def _up(self, state: EngineState, now_s: float) -> LadderStep | None:
        if state is EngineState.BATCH:
            return LadderStep.FREEZE
        since_s, limit_s = self._frozen_since_s, self._settings.evict_after_s
        if since_s is None or limit_s is None or now_s - since_s < limit_s:
            return None
        return LadderStep.EVICT

    def _down(self, state: EngineState, now_s: float, *, is_held: bool) -> LadderStep | None:
        limit_s, since_s = self._settings.resume_after_s, self._quiet_since_s
        if limit_s is None or since_s is None or now_s - since_s < limit_s:
            return None
        if self._frozen_since_s is not None:
            return LadderStep.THAW
        return LadderStep.RESUME if state is EngineState.EVICTED and not is_held else None
