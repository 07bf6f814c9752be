"""The page about the topology file, from the models: key, type with unit, default, reason."""

from typing import Final

from pydantic.fields import FieldInfo

from supervisor.topology.overrides import PREFIX
from supervisor.topology.shape import Items, Leaf, Section, Shape, sections, write_default

__all__ = ["config_page"]

_HEAD = f"""\
# The topology file

<!-- Printed from supervisor/topology/schema.py by `make docs`; edit the docstrings there. -->

One YAML file describes one supervisor; `configs/demo.yaml` is an example. `supervisor check FILE`
says everything that is wrong with it, `supervisor plan FILE` what it would start.

- Durations carry a unit (`ms`, `s`, `m`, `h`), sizes too (`KiB`, `MiB`, `GiB`, `TiB`, or decimal
  `KB`, `MB`, `GB`, `TB`, or `B`). A bare number is an error: its unit would be a guess.
- Scalars follow YAML 1.2: `off`, `yes` and `12:30` are text; only `true` and `false` are booleans.
- Relative paths resolve against the working directory of the command.
- An unknown key is an error with a suggestion. A key given twice is an error.
- Editors complete keys with `configs/topology.schema.json`: put
  `# yaml-language-server: $schema=PATH/topology.schema.json` in the first line.

## Environment

Any value can be overridden by a variable: `{PREFIX}` and the path of the key in capitals, joined
by two underscores. Entries of lists go by their index or their name (hyphens as underscores). The
value is YAML.

```
{PREFIX}GATEWAY__LISTEN=127.0.0.1:8001
{PREFIX}GROUPS__0__KV__SLOTS=8
{PREFIX}GROUPS__CHAT__ENGINES__CHAT_A__BALLAST=2GiB
```

A variable with that prefix that fits nothing is an error, so a spelling mistake does not pass.
"""

_PLAIN: Final = {"8": "number", "run/demo": "path", "127.0.0.1:8000": "address"}
"""What a plain value is called, by the example of its leaf."""


def config_page() -> str:
    """The text of `docs/CONFIG.md`."""
    return "\n".join([_HEAD, *(_section(path, section) for path, section in sections())])


def _section(path: str, section: Section) -> str:
    title = f"`{path}`" if path else "Top level"
    lines = [f"## {title}", "", _sentence(section.model.__doc__), ""]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, shape in section.keys.items():
        field = section.model.model_fields[key]
        row = (f"`{key}`", _kind(shape, field), _default(shape, field), _meaning(shape, field))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
    return "\n".join([*lines, ""])


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _meaning(shape: Shape, field: FieldInfo) -> str:
    text = _sentence(field.description)
    if not text and isinstance(shape, Section):
        text = _sentence(shape.model.__doc__)
    return text


def _kind(shape: Shape, field: FieldInfo) -> str:
    match shape:
        case Section():
            return "section"
        case Items(item=Section()):
            return "list of sections"
        case Items(item=item):
            return f"list of {_kind(item, field)}"
        case Leaf():
            return _leaf_kind(shape, field)


def _leaf_kind(leaf: Leaf, field: FieldInfo) -> str:
    if leaf.choices:
        return " or ".join(f"`{choice}`" for choice in leaf.choices)
    if leaf.unit:
        return {"s": "duration", "bytes": "size"}[leaf.unit]
    return _PLAIN.get(leaf.example, "text") + _bounds(field)


def _bounds(field: FieldInfo) -> str:
    """`, 1 to 64` from the constraints of a number."""
    found: dict[str, object] = {}
    for item in field.metadata:
        for name in ("ge", "le", "multiple_of"):
            if (value := getattr(item, name, None)) is not None:
                found[name] = value
    if "ge" not in found:
        return ""
    text = f", {found['ge']} to {found['le']}" if "le" in found else f", {found['ge']} or more"
    return text + (f", a multiple of {found['multiple_of']}" if "multiple_of" in found else "")


def _default(shape: Shape, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(shape, Section):
        return "see below"
    return f"`{write_default(field)}`" if field.get_default() not in (None, "") else "none"
