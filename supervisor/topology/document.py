"""A YAML file as plain data that remembers where everything stood.

PyYAML's node graph carries lines and columns; its constructor throws them away, so this module
builds the data itself and keeps a mark per place. Scalars follow YAML 1.2: `off` and `12:30` are
text, only `true` and `false` are booleans (`cache: {mode: off}` must mean what it says).

Invariants
    1. Reading never raises on any content: everything wrong becomes a finding.
    2. Work is bounded: file size, number of nodes (aliases multiply them) and depth.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from supervisor.topology.findings import Finding, Issue, Place, Severity, dotted

__all__ = ["MAX_FILE_BYTES", "Document", "Mark", "parse_value", "read_document"]

MAX_FILE_BYTES: Final = 256 << 10
_MAX_NODES: Final = 50_000
_MAX_DEPTH: Final = 50

_EXAMPLE: Final = "write at least version, name, state_dir and groups (see configs/demo.yaml)"


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and nothing else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way to hold them)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]{1,18}$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18})(?:[eE][-+]?[0-9]{1,3})?$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the file, both from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Document:
    """The data of one file and where each part of it stands."""

    file: str
    data: object = None
    findings: list[Finding] = field(default_factory=list)
    """What was wrong with the file as YAML."""
    values: dict[Place, Mark] = field(default_factory=dict)
    keys: dict[Place, Mark] = field(default_factory=dict)
    variables: dict[Place, str] = field(default_factory=dict)
    """Places whose value came from an environment variable."""
    unread: set[Place] = field(default_factory=set)
    """Places whose value could not be read and has its finding already; the data has None."""

    def locate(self, issue: Issue) -> Finding:
        """The issue with file, line and column of its place, or of the nearest one around it."""
        file, mark = self._find(issue.place, at_key=issue.at_key)
        path = dotted(issue.place)
        return Finding(
            file, mark.line, mark.column, path, issue.what, issue.instead, issue.severity
        )

    def _find(self, place: Place, *, at_key: bool) -> tuple[str, Mark]:
        for length in range(len(place), -1, -1):
            around = place[:length]
            if around in self.variables:
                return self.variables[around], Mark(0, 0)
            marks = self.keys if at_key and around == place else self.values
            if around in marks:
                return self.file, marks[around]
        return self.file, Mark(1, 1)


def read_document(path: Path) -> Document:
    """Read and build `path`; problems are in the result's findings."""
    document = Document(str(path))
    text = _read_text(path, document)
    if text is not None:
        _build(text, document)
    return document


def parse_value(text: str) -> object:
    """One value as YAML: a scalar, or a flow list of scalars. For environment overrides.

    Raises:
        ValueError: not YAML, or a mapping.
    """
    document = Document("")
    _build(text, document, root_must_be_mapping=False)
    if document.findings:
        raise ValueError(document.findings[0].what)
    return document.data


def _complain(document: Document, mark: Mark, what: str, instead: str, place: Place = ()) -> None:
    document.findings.append(
        Finding(document.file, mark.line, mark.column, dotted(place), what, instead, Severity.ERROR)
    )


def _read_text(path: Path, document: Document) -> str | None:
    nowhere = Mark(0, 0)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _complain(document, nowhere, f"cannot be read: {reason}", "name a topology file")
        return None
    if len(raw) > MAX_FILE_BYTES:
        what = f"is longer than {MAX_FILE_BYTES >> 10} KiB"
        _complain(document, nowhere, what, "name a topology file")
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        mark = Mark(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        _complain(document, mark, what, "write the file in UTF-8")
        return None


def _build(text: str, document: Document, *, root_must_be_mapping: bool = True) -> None:
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = Mark(at.line + 1, at.column + 1) if at else Mark(1, 1)
        _complain(document, mark, f"is not YAML: {_sentence(error)}", _yaml_hint(error))
        return
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"character U+{_code_point(error.character):04X} is not allowed in YAML"
        _complain(document, Mark(line, 1), what, "write printable text")
        return
    except RecursionError:
        _complain(document, Mark(1, 1), "is nested too deeply", "write it flatter")
        return
    if node is None:
        if root_must_be_mapping:
            _complain(document, Mark(1, 1), "is empty", _EXAMPLE)
        return
    if root_must_be_mapping and not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        _complain(document, _mark(node), f"is {kind}, not a mapping of keys", _EXAMPLE)
        return
    _Builder(document).run(node)


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _code_point(character: object) -> int:
    return ord(character) if isinstance(character, str) else int(str(character))


def _sentence(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    return ", ".join(parts) or "syntax error"


def _yaml_hint(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "\\t" in problem:
        return "write spaces, not tabs"
    if "document" in problem or "document" in (error.context or ""):
        return "write one document, without a second '---'"
    if "alias" in problem:
        return "write the anchor (&name) before the alias (*name)"
    return "write `key: value`, and quote text that holds special characters"


class _TooMuchError(Exception):
    """The document expands to more nodes than a topology can need."""


class _Builder:
    """Turns a node graph into data and marks. One use."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._budget = _MAX_NODES
        self._open: set[int] = set()

    def run(self, node: yaml.Node) -> None:
        try:
            self._document.data = self._value(node, ())
        except _TooMuchError:
            _complain(
                self._document,
                _mark(node),
                f"is nested deeper than {_MAX_DEPTH} or expands to over {_MAX_NODES} values",
                "write the values out, without aliases of aliases",
            )

    def _value(self, node: yaml.Node, place: Place) -> object:
        self._budget -= 1
        if self._budget < 0 or len(place) > _MAX_DEPTH:
            raise _TooMuchError
        self._document.values.setdefault(place, _mark(node))
        if id(node) in self._open:
            self._document.unread.add(place)
            what = "contains itself"
            _complain(self._document, _mark(node), what, "write the value out", place)
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, place)
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*place, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, place)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.Node, place: Place) -> object:
        text, kind = str(node.value), node.tag.removeprefix("tag:yaml.org,2002:")
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text)
                case "float":
                    return float(text)
                case "str" | "merge":
                    return text
        except (ValueError, KeyError):  # an explicit tag such as `!!int abc`
            pass
        self._document.unread.add(place)
        what = f"{text!r} carries the tag {node.tag!r}"
        _complain(self._document, _mark(node), what, "write the plain value, without a tag", place)
        return None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, object]:
        result: dict[str, object] = {}
        seen: dict[str, Mark] = {}
        for name, key, value in self._pairs(node, place):
            where = (*place, name)
            if name in seen:
                what = f"key {name!r} occurs twice, first on line {seen[name].line}"
                _complain(self._document, _mark(key), what, "write it once", where)
                continue
            seen[name] = _mark(key)
            self._document.keys.setdefault(where, _mark(key))
            result[name] = self._value(value, where)
        self._merge(node, place, result)
        return result

    def _pairs(
        self, node: yaml.MappingNode, place: Place
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if isinstance(key, yaml.ScalarNode):
                yield str(key.value), key, value
            else:
                what = "a list or mapping stands where a key should"
                _complain(self._document, _mark(key), what, "write `key: value`", place)

    def _merge(self, node: yaml.MappingNode, place: Place, result: dict[str, object]) -> None:
        """`<<: *defaults`: keys that the mapping has not itself; marks point at the source."""
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                if not isinstance(source, yaml.MappingNode):
                    what = "'<<' merges something that is not a mapping"
                    instead = "write an alias of a mapping, such as <<: *defaults"
                    _complain(self._document, _mark(source), what, instead, place)
                    continue
                self._merge_from(source, place, result)

    def _merge_from(
        self, source: yaml.MappingNode, place: Place, result: dict[str, object]
    ) -> None:
        outer = dict(result)
        added = self._value(source, place)
        if isinstance(added, dict):
            result.clear()
            result.update({**added, **outer})
