"""The JSON Schema of the topology file, for editors; printed from the models.

An editor that knows it completes keys and shows their meaning. Rules between values are not in
it: those are `supervisor check`'s.
"""

import json
from typing import Any, Final

from pydantic.fields import FieldInfo

from supervisor.topology.schema import Topology
from supervisor.topology.shape import sections, write_default

__all__ = ["SCHEMA_FILE", "json_schema", "schema_text"]

SCHEMA_FILE: Final = "configs/topology.schema.json"


def json_schema() -> dict[str, Any]:
    """The schema as data, with defaults as they are written in the file."""
    schema = Topology.model_json_schema(mode="validation")
    models = {section.model.__name__: section.model for _, section in sections()}
    definitions = {**schema.get("$defs", {}), Topology.__name__: schema}
    for name, definition in definitions.items():
        definition.pop("title", None)
        for key, entry in definition.get("properties", {}).items():
            _tidy(entry, models[name].model_fields[key])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Understudy topology",
        **schema,
    }


def schema_text() -> str:
    """The content of `configs/topology.schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _tidy(entry: dict[str, Any], field: FieldInfo) -> None:
    """No title that repeats the key; the default as text where the file has text."""
    entry.pop("title", None)
    entry.pop("default", None)
    default = None if field.is_required() else field.get_default()
    if isinstance(default, list):
        entry["default"] = [str(item) for item in default]
    elif entry.get("type") == "string" and default is not None:
        entry["default"] = write_default(field)
    elif isinstance(default, int | str):
        entry["default"] = default
