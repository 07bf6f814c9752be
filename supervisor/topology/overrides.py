"""Environment variables that override the file: `UNDERSTUDY__GROUPS__CHAT__KV__SLOTS=8`.

The part behind the prefix is the path of a value, joined by two underscores, in capitals; an
entry of a list goes by its index or by its name (hyphens as underscores). The value is YAML.
Applied before validation, so a wrong value is reported like one in the file, naming the variable.
"""

from collections.abc import Mapping
from typing import Any, Final

from supervisor.topology.document import Document, parse_value
from supervisor.topology.findings import Finding, Place, closest, dotted
from supervisor.topology.shape import Items, Leaf, Section, Shape, topology_shape

__all__ = ["PREFIX", "apply_overrides"]

PREFIX: Final = "UNDERSTUDY__"


class _RefusedError(Exception):
    """This variable cannot be applied: what is wrong, and what to do instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what = what
        self.instead = instead


def apply_overrides(document: Document, environ: Mapping[str, str]) -> None:
    """Set the values that `environ` names in `document`; findings for those that cannot be."""
    if not isinstance(document.data, dict):
        return
    set_by: dict[Place, str] = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        try:
            place = _place(variable, document.data)
            _refuse_second(place, set_by)
            _set(document.data, place, _value(environ[variable]))
        except _RefusedError as refused:
            document.findings.append(Finding(variable, 0, 0, "", refused.what, refused.instead))
        else:
            set_by[place] = variable
            document.variables[place] = variable


def _refuse_second(place: Place, set_by: dict[Place, str]) -> None:
    if place in set_by:
        what = f"sets {dotted(place)}, as {set_by[place]} does"
        raise _RefusedError(what, "unset one of the two")


def _value(text: str) -> object:
    try:
        return parse_value(text)
    except ValueError as error:
        raise _RefusedError(f"{text!r} {error}", "write one value, quoted as in YAML") from error


def _place(variable: str, data: dict[str, Any]) -> Place:
    place: Place = ()
    shape: Shape = topology_shape()
    here: object = data
    for word in variable.removeprefix(PREFIX).split("__"):
        match shape:
            case Section(keys=keys):
                part: str | int = _key(word, keys, variable, place)
                shape = keys[str(part)]
                here = here.get(part) if isinstance(here, dict) else None
            case Items(item=item):
                part = _index(word, here, variable, place)
                shape = item
                here = here[part] if isinstance(here, list) else None
            case Leaf():
                raise _RefusedError(f"{dotted(place)} has nothing inside", _up_to(variable, place))
        place = (*place, part)
    if isinstance(shape, Section):
        example = next(iter(shape.keys)).upper()
        raise _RefusedError(f"{dotted(place)} is a section", f"name a key: {variable}__{example}")
    if isinstance(shape, Items) and not isinstance(shape.item, Leaf):
        raise _RefusedError(f"{dotted(place)} is a list", f"name an entry: {variable}__0__...")
    return place


def _key(word: str, keys: dict[str, Shape], variable: str, place: Place) -> str:
    if word.lower() in keys and word == word.upper():
        return word.lower()
    meant = closest(word, keys)
    known = ", ".join(key.upper() for key in keys)
    instead = f"set {_spelt(variable, place, meant)}" if meant else f"use one of {known}"
    where = dotted(place) or "the topology"
    raise _RefusedError(f"{where} has no key {word!r}", instead)


def _index(word: str, entries: object, variable: str, place: Place) -> int:
    entries = entries if isinstance(entries, list) else []
    names = [str(entry.get("name", "")) if isinstance(entry, dict) else "" for entry in entries]
    if word.isascii() and word.isdecimal() and len(word) < 6 and int(word) < len(entries):
        return int(word)
    spelt = [name.upper().replace("-", "_") for name in names]
    if word in spelt and word:
        return spelt.index(word)
    meant = closest(word, filter(None, spelt))
    what = f"{dotted(place)} has no entry {word!r}"
    known = ", ".join(spelt) or "none"
    instead = f"set {_spelt(variable, place, meant)}" if meant else f"entries are: {known}"
    raise _RefusedError(what, instead)


def _spelt(variable: str, place: Place, meant: str) -> str:
    """The variable with the word behind `place` replaced by the one that was meant."""
    words = variable.removeprefix(PREFIX).split("__")
    words[len(place)] = meant.upper()
    return PREFIX + "__".join(words)


def _up_to(variable: str, place: Place) -> str:
    words = variable.removeprefix(PREFIX).split("__")
    return f"set {PREFIX}{'__'.join(words[: len(place)])}"


def _set(data: dict[str, Any], place: Place, value: object) -> None:
    holder: Any = data
    for part in place[:-1]:
        inner = holder.get(part) if isinstance(holder, dict) else holder[part]
        if not isinstance(inner, dict | list):
            inner = holder[part] = {}
        holder = inner
    holder[place[-1]] = value
