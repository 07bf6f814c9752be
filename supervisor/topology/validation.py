"""Data against the models: pydantic's complaints in our words, and what is usable all the same.

A file with one misspelt role should still be told about its taken port, so wrong values are
replaced (by the default, or by a placeholder) until the models take the rest. Where that was done
is remembered: later checks that depend on a replaced value stay silent.
"""

import copy
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from supervisor.topology.findings import Issue, Place, closest, dotted, one_of
from supervisor.topology.schema import Topology
from supervisor.topology.shape import Items, Leaf, Section, Shape, shape_at

__all__ = ["Validated", "validate"]

_MAX_ROUNDS: Final = 8
"""Each round repairs everything that pydantic could see; nested placeholders need a second."""
_PLAIN: Final = re.compile(r"[A-Za-z/.-][\w/.=-]*")
"""Words that YAML takes for text as they are."""


@dataclass(frozen=True, slots=True)
class Validated:
    """The outcome: what is wrong, and the topology as far as it can be read."""

    issues: tuple[Issue, ...]
    topology: Topology | None
    """Whole when there are no issues; repaired otherwise; None when beyond repair."""
    repaired: frozenset[Place]
    """Places whose value is not the file's."""


def validate(data: object) -> Validated:
    """Check `data` against the models; never raises for any plain data."""
    if not isinstance(data, dict):
        return Validated((), None, frozenset())
    issues: dict[tuple[Place, str], Issue] = {}
    repaired: set[Place] = set()
    data = copy.deepcopy(data)
    for _ in range(_MAX_ROUNDS):
        try:
            topology = Topology.model_validate(data)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                place = tuple(detail["loc"])
                if not _inside(place, repaired):
                    issue = _issue(detail, place)
                    issues.setdefault((place, detail["type"]), issue)
                repaired.add(place)
                _repair(data, place, unknown=detail["type"] == "extra_forbidden")
        else:
            return Validated(tuple(issues.values()), topology, frozenset(repaired))
    return Validated(tuple(issues.values()), None, frozenset(repaired))


def _inside(place: Place, repaired: set[Place]) -> bool:
    return any(place[: len(done)] == done for done in repaired)


# --- words -------------------------------------------------------------------------------------


def _issue(detail: ErrorDetails, place: Place) -> Issue:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return _unknown_key(place)
    if kind == "missing":
        return _missing_key(place)
    words = _WORDS.get(kind, _other)
    what, instead = words(value, detail, shape_at(place))
    return Issue(place, what, instead)


def _unknown_key(place: Place) -> Issue:
    *around, key = place
    section = shape_at(tuple(around))
    known = section.keys if isinstance(section, Section) else {}
    meant = closest(key, known)
    if meant:
        instead = f"write {meant}"
    elif elsewhere := _elsewhere(str(key), place):
        instead = f"write it under {elsewhere}"
    else:
        instead = f"write one of {', '.join(known)}"
    return Issue(place, "unknown key", instead, at_key=True)


def _elsewhere(key: str, place: Place) -> str | None:
    """The nearest other section that knows `key`: `hang_after` belongs under `health`."""
    for length in range(len(place) - 1, -1, -1):
        found = _search(shape_at(place[:length]), key, place[:length])
        if found is not None:
            return dotted(found) or "the top level"
    return None


def _search(shape: Shape | None, key: str, place: Place) -> Place | None:
    if not isinstance(shape, Section):
        return None
    if key in shape.keys:
        return place
    found = (_search(inner, key, (*place, name)) for name, inner in shape.keys.items())
    return next((hit for hit in found if hit is not None), None)


def _missing_key(place: Place) -> Issue:
    *around, key = place
    shape = shape_at(place)
    match shape:
        case Leaf(choices=choices) if choices:
            value = f"{key}: {one_of(choices)}"
        case Leaf(example=example):
            value = f"{key}: {example}"
        case Items():
            value = f"{key}: [...]"
        case _:
            value = f"{key}: {{...}}"
    return Issue(tuple(around), f"the key {key!r} is missing", f"write {value}")


Words = tuple[str, str]


def _own_words(value: object, detail: ErrorDetails, shape: Shape | None) -> Words:
    """A parser of ours complained: `what; write ...` already."""
    what, _, instead = str(detail.get("ctx", {}).get("error", "")).partition("; ")
    return (what, instead) if instead else _other(value, detail, shape)


def _choice(value: object, detail: ErrorDetails, shape: Shape | None) -> Words:
    choices = shape.choices if isinstance(shape, Leaf) else ()
    if not choices:
        return _other(value, detail, shape)
    what = f"{_shown(value)} is not one of {', '.join(choices)}"
    return what, f"write {closest(value, choices) or one_of(choices)}"


def _pattern(value: object, detail: ErrorDetails, _shape: Shape | None) -> Words:
    if "cuda" in str(detail.get("ctx", {}).get("pattern", "")):
        return f"{_shown(value)} is not a device", "write cpu or cuda:0"
    return (
        f"{_shown(value)} is not a name",
        "write lower-case letters, digits and inner hyphens, at most 40, such as chat-a",
    )


def _number(value: object, _detail: ErrorDetails, _shape: Shape | None) -> Words:
    return f"{_shown(value)} is not a whole number", "write digits only, such as 8"


_TRUTHS: Final = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false",
                  "0": "false"}  # fmt: skip
"""Words for true and false elsewhere; here they are text and numbers, as in YAML 1.2."""


def _truth(value: object, _detail: ErrorDetails, _shape: Shape | None) -> Words:
    meant = _TRUTHS.get(str(value).lower(), "true or false")
    return f"{_shown(value)} is not true or false", f"write {meant}"


def _text(value: object, _detail: ErrorDetails, _shape: Shape | None) -> Words:
    if isinstance(value, bool | int | float):
        return f"{_shown(value)} is not text", f'write it in quotes: "{_shown(value)}"'
    if isinstance(value, dict) and list(value.values()) == [None]:  # {port}, and meant as text
        return f"{_shown(value)} is not text", f'write it in quotes: "{{{next(iter(value))}}}"'
    return f"{_shown(value)} is not text", "write text"


def _bound(value: object, detail: ErrorDetails, shape: Shape | None) -> Words:
    context = detail.get("ctx", {})
    lower, upper = context.get("ge"), context.get("le")
    unit = shape.unit if isinstance(shape, Leaf) else ""
    if lower is not None:
        return f"{_shown(value)} is too small", f"write {lower} or more"
    if upper is not None:
        return f"{_shown(value)} is too large", f"write {upper} or less"
    example = {"s": "100ms", "bytes": "1MiB"}.get(unit, "1")
    return f"{_shown(value)} is not positive", f"write more than zero, such as {example}"


def _multiple(value: object, detail: ErrorDetails, _shape: Shape | None) -> Words:
    step = int(detail.get("ctx", {}).get("multiple_of", 1))
    above = -(-cast("int", value) // step) * step
    return f"{_shown(value)} is not a multiple of {step}", f"write {max(above, step)}"


def _mapping(value: object, _detail: ErrorDetails, shape: Shape | None) -> Words:
    keys = list(shape.keys)[:3] if isinstance(shape, Section) else []
    example = ", ".join(f"{key}: ..." for key in keys)
    what = "is empty" if value is None else f"{_shown(value)} is not a mapping"
    return what, f"write {{{example}}}" + (" or leave the key out" if value is None else "")


def _list(value: object, _detail: ErrorDetails, shape: Shape | None) -> Words:
    example = "- {...}"
    if isinstance(shape, Items) and isinstance(shape.item, Leaf):
        example = f"[{_entries(value) if isinstance(value, str) else 'cpu'}]"
    what = "is empty" if value is None else f"{_shown(value)} is not a list"
    return what, f"write a list: {example}"


def _entries(text: str) -> str:
    """A single word, or a command line, as entries of a list in YAML."""
    try:
        words = shlex.split(text)
    except ValueError:  # an open quotation mark
        words = []
    if len(words) < 2:
        return _shown(text)
    return ", ".join(w if _PLAIN.fullmatch(w) else json.dumps(w) for w in words)


def _too_short(_value: object, _detail: ErrorDetails, _shape: Shape | None) -> Words:
    return "is an empty list", "write at least one entry"


def _other(value: object, detail: ErrorDetails, _shape: Shape | None) -> Words:
    return f"{_shown(value)}: {detail['msg']}", "see docs/CONFIG.md for what may stand here"


_WORDS: Final[dict[str, Callable[[object, ErrorDetails, Shape | None], Words]]] = {
    "value_error": _own_words,
    "enum": _choice,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "int_type": _number,
    "bool_type": _truth,
    "string_type": _text,
    "string_unicode": lambda *_: ("holds half a character", "write printable text"),
    "greater_than": _bound,
    "greater_than_equal": _bound,
    "less_than_equal": _bound,
    "multiple_of": _multiple,
    "model_type": _mapping,
    "list_type": _list,
    "too_short": _too_short,
}


def _shown(value: object) -> str:
    """The value as the reader wrote it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- repair ------------------------------------------------------------------------------------


def _repair(data: Any, place: Place, *, unknown: bool) -> None:  # noqa: ANN401 (parsed YAML)
    """Make `data` acceptable at `place`: drop the key, or put a placeholder there."""
    *around, last = place
    holder: Any = data
    for part in around:
        holder = holder[part]
    if isinstance(holder, dict) and (unknown or not _is_required(place)):
        holder.pop(last, None)
    else:
        holder[last] = _placeholder(place)


def _is_required(place: Place) -> bool:
    section = shape_at(place[:-1])
    return isinstance(section, Section) and str(place[-1]) in section.required


def _placeholder(place: Place) -> object:
    """Something valid that no check can mistake for the file's own: its place is remembered."""
    key = place[-1] if place else ""
    if key == "name":
        return "-".join(["unnamed", *(str(part) for part in _indices(place))])
    plain = {"role": "batch", "version": 1, "path": ".", "state_dir": "."}  # batch: fewest rules
    match shape_at(place):
        case Section(keys=keys, required=required):
            return {name: _placeholder((*place, name)) for name in keys if name in required}
        case Items():
            return [_placeholder((*place, 0))]
        case _:
            return plain.get(str(key), "cpu")  # an entry of `devices`


def _indices(place: Place) -> Iterator[int]:
    return (part for part in place if isinstance(part, int))
