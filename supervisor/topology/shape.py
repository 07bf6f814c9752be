"""The models as a tree of keys: what may stand where, and how each leaf is written.

Derived from `supervisor.topology.schema` once. Suggestions for unknown keys, environment
overrides and `docs/CONFIG.md` all walk this tree, so none of them keeps a list of its own.
"""

import types
import typing
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from supervisor.topology import schema
from supervisor.topology.findings import Place

__all__ = [
    "Items",
    "Leaf",
    "Section",
    "Shape",
    "sections",
    "shape_at",
    "topology_shape",
    "write_default",
]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A single value."""

    example: str
    """A value that the schema takes, as it is written in the file."""
    choices: tuple[str, ...] = ()
    unit: str = ""
    """What the value is measured in once parsed: `s`, `bytes`, or nothing."""


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    item: "Shape"


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping with known keys."""

    model: type[BaseModel]
    keys: dict[str, "Shape"]
    required: frozenset[str]


Shape = Leaf | Items | Section


@cache
def topology_shape() -> Section:
    """The tree of the whole file."""
    return _section(schema.Topology)


def shape_at(place: Place) -> Shape | None:
    """What stands at `place`, or None when no such key exists."""
    shape: Shape | None = topology_shape()
    for part in place:
        match shape:
            case Section(keys=keys):
                shape = keys.get(str(part))
            case Items(item=item) if isinstance(part, int):
                shape = item
            case _:
                return None
    return shape


def sections() -> list[tuple[str, Section]]:
    """Every mapping of the file with the path of its keys, such as `groups[].kv`."""
    found: list[tuple[str, Section]] = []

    def walk(shape: Shape, path: str) -> None:
        match shape:
            case Section(keys=keys):
                found.append((path, shape))
                for key, inner in keys.items():
                    walk(inner, f"{path}.{key}" if path else key)
            case Items(item=item):
                walk(item, f"{path}[]")

    walk(topology_shape(), "")
    return found


def write_default(field: FieldInfo) -> str:
    """A field's default as it would be written in the file; empty when it is required."""
    if field.is_required():
        return ""
    unit = _unit(field.annotation, field.metadata)
    return _written(field.get_default(call_default_factory=True), unit)


def _section(model: type[BaseModel]) -> Section:
    fields = model.model_fields
    keys = {name: _shape(field.annotation, field.metadata) for name, field in fields.items()}
    required = frozenset(name for name, field in fields.items() if field.is_required())
    return Section(model, keys, required)


def _shape(annotation: Any, metadata: list[Any]) -> Shape:  # noqa: ANN401 (a type expression)
    annotation, metadata = _bare(annotation, metadata)
    if get_origin(annotation) is list:
        return Items(_shape(get_args(annotation)[0], []))
    if isinstance(annotation, type):
        if issubclass(annotation, schema.ListenAddress):
            return Leaf("127.0.0.1:8000")
        if issubclass(annotation, BaseModel):
            return _section(annotation)
        if issubclass(annotation, StrEnum):
            return Leaf(next(iter(annotation)).value, tuple(annotation))
    if get_origin(annotation) is typing.Literal:
        choices = tuple(str(choice) for choice in get_args(annotation))
        return Leaf(choices[0], choices)
    return _plain(annotation, _unit(annotation, metadata))


def _plain(annotation: object, unit: str) -> Leaf:
    if annotation is bool:
        return Leaf("true", ("true", "false"))
    examples = {"s": "10s", "bytes": "2GiB"}
    if unit:
        return Leaf(examples[unit], unit=unit)
    return Leaf({int: "8", Path: "run/demo"}.get(typing.cast("type", annotation), "demo"))


def _bare(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:  # noqa: ANN401
    """Strip `Annotated` and `| None`, gathering the metadata on the way."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *more = get_args(annotation)
            metadata = [*metadata, *more]
        elif origin in (Union, types.UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        else:
            return annotation, metadata


def _unit(annotation: Any, metadata: list[Any]) -> str:  # noqa: ANN401
    _, metadata = _bare(annotation, metadata)
    parsers = {getattr(item, "func", None) for item in metadata}
    if schema.parse_duration in parsers:
        return "s"
    return "bytes" if schema.parse_size in parsers else ""


def _written(value: object, unit: str) -> str:
    if value is None:
        return "none"
    if unit == "s":
        return schema.format_duration(float(str(value)))
    if unit == "bytes":
        return schema.format_size(int(str(value)))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_written(item, '') for item in value)}]"
    return str(value)
