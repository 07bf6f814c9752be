"""Prints `docs/fsm.md`: the life of an engine, from the transition table itself."""

from supervisor.core.states import TRANSITIONS, EngineState

__all__ = ["fsm_page"]

_HEAD = """\
# The life of an engine

Printed from `supervisor/core/states.py`; do not edit. An event in a state without a row here is
refused as a bug, with the engine's story in the error.

```mermaid
stateDiagram-v2
    [*] --> absent
"""


def fsm_page() -> str:
    """The text of `docs/fsm.md`: a diagram and the table behind it."""
    arrows = [f"    {t.source} --> {t.target}: {t.event}" for t in TRANSITIONS]
    rows = [
        f"| {t.source} | {t.event} | {t.guard.__name__.replace('_', ' ')} | {t.target} |"
        for state in EngineState
        for t in TRANSITIONS
        if t.source is state
    ]
    table = ["| state | event | only if | next state |", "|---|---|---|---|", *rows]
    return _HEAD + "\n".join([*arrows, "```", "", *table]) + "\n"
