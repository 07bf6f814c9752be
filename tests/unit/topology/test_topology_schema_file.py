"""What is printed from the models is current, and says the same as the models."""

import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from docs.generate import PAGES, ROOT
from supervisor.topology import load
from supervisor.topology.jsonschema import SCHEMA_FILE, json_schema
from supervisor.topology.schema import (
    Topology,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from supervisor.topology.shape import Leaf, Section, sections, shape_at, write_default
from tests.unit.topology.site import Site

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_printed_page_is_current(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == PAGES[name](), "run make docs"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_topology_fits_the_json_schema(path: Path) -> None:
    schema = json.loads((ROOT / SCHEMA_FILE).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema)


def test_the_demo_topology_loads() -> None:
    group = load(ROOT / "configs/demo.yaml", {}).groups[0]
    assert (group.kv.slots, group.kv.max_length, group.engines[2].kv.slots) == (16, 2048, 8)


@pytest.mark.parametrize(
    "changes",
    [{"slots: 4": "slot: 4"}, {"standby}": "stanby}"}, {"8000}": "8000, park_timeout: 3}"}],
)
def test_the_json_schema_refuses_what_the_models_refuse(
    site: Site, changes: dict[str, str]
) -> None:
    data = yaml.safe_load(site.write_correct(changes).read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, json_schema())


def test_every_default_is_written_as_the_file_takes_it() -> None:
    for name, definition in json_schema()["$defs"].items():
        for key, entry in definition.get("properties", {}).items():
            if "default" in entry and "$ref" not in entry:
                jsonschema.validate(entry["default"], entry), f"{name}.{key}"


def test_a_boolean_is_written_as_yaml_has_it() -> None:
    field = Topology.model_fields["core_dumps"]
    assert write_default(field) == "false"
    assert shape_at(("core_dumps",)) == Leaf("true", choices=("true", "false"))


def test_every_key_has_a_meaning() -> None:
    """A key without a sentence is a key that nobody can set with confidence."""
    for path, section in sections():
        for key, field in section.model.model_fields.items():
            assert field.description, f"{path}.{key} has no docstring"


@pytest.mark.parametrize("text", ["100ms", "2s", "1m", "30m", "2h", "1500ms", "0s"])
def test_durations_are_written_as_they_are_read(text: str) -> None:
    assert format_duration(float(str(parse_duration(text)))) == text


@pytest.mark.parametrize("text", ["0B", "512MiB", "2GiB", "1TiB", "1000B"])
def test_sizes_are_written_as_they_are_read(text: str) -> None:
    assert format_size(int(str(parse_size(text)))) == text


@pytest.mark.parametrize("text", ["5", "ms", "5 days", "-1s", "1e3s", "٣s", "", "9" * 400 + "s"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_the_shape_knows_every_key() -> None:
    assert isinstance(shape_at(("groups", 0, "engines", 1, "kv")), Section)
    role = shape_at(("groups", 0, "engines", 1, "role"))
    assert isinstance(role, Leaf)
    assert role.choices == ("primary", "standby", "batch")
    assert shape_at(("groups", "x")) is None
    assert shape_at(("nothing",)) is None
