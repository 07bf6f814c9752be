"""From a file and an environment to a topology, or to everything that is wrong with it.

`load` is for whoever needs the values: the file and the rules between its values. `check` also
looks at the machine. Both say every error at once; only `load` raises.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from supervisor.errors import ConfigurationError
from supervisor.topology.document import Document, read_document
from supervisor.topology.findings import Finding, Issue, Place, Severity
from supervisor.topology.machine import LocalMachine, Machine
from supervisor.topology.overrides import apply_overrides
from supervisor.topology.schema import Topology
from supervisor.topology.semantics import check_semantics
from supervisor.topology.surroundings import check_surroundings
from supervisor.topology.validation import Validated, validate

__all__ = ["TopologyError", "check", "load", "read"]


class TopologyError(ConfigurationError):
    """The topology file has errors; `findings` holds each of them."""

    code = "topology"

    def __init__(self, path: Path, findings: list[Finding]) -> None:
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        count = "one error" if len(errors) == 1 else f"{len(errors)} errors"
        super().__init__(
            f"{path} has {count}, first: {errors[0]}",
            hint=f"see them all with 'supervisor check {path}'",
            details={"findings": [str(finding) for finding in findings]},
        )
        self.findings = findings


@dataclass(frozen=True, slots=True)
class _Read:
    document: Document
    validated: Validated

    def locate(self, issues: Iterable[Issue]) -> list[Finding]:
        """Findings of the issues that do not follow from a value that is wrong itself."""
        return [self.document.locate(i) for i in issues if not self._follows(i)]

    def _follows(self, issue: Issue) -> bool:
        places = (issue.place, *issue.needs)
        return any(_touches(place, done) for place in places for done in self.validated.repaired)


def _touches(place: Place, repaired: Place) -> bool:
    """Whether one of the two lies inside the other."""
    length = min(len(place), len(repaired))
    return place[:length] == repaired[:length]


def read(path: Path, environ: Mapping[str, str]) -> tuple[Topology | None, list[Finding]]:
    """The topology as far as it can be read, and everything wrong with the file itself."""
    source, findings = _read(path, environ)
    return source.validated.topology, findings


def load(path: Path, environ: Mapping[str, str]) -> Topology:
    """The topology of `path` with the overrides of `environ`.

    Raises:
        TopologyError: anything in the file is wrong; warnings do not count.
    """
    topology, findings = read(path, environ)
    if topology is None or any(finding.severity is Severity.ERROR for finding in findings):
        raise TopologyError(path, findings)
    return topology


def check(
    path: Path, environ: Mapping[str, str], *, machine: Machine | None = None
) -> list[Finding]:
    """Everything that is wrong with the file or keeps it from running here, in file order."""
    source, findings = _read(path, environ)
    if source.validated.topology is not None:
        issues = check_surroundings(source.validated.topology, machine or LocalMachine())
        findings += source.locate(issues)
    return _sorted(findings)


def _read(path: Path, environ: Mapping[str, str]) -> tuple[_Read, list[Finding]]:
    document = read_document(path)
    apply_overrides(document, environ)
    source = _Read(document, validate(document.data))
    issues = [issue for issue in source.validated.issues if issue.place not in document.unread]
    findings = [*document.findings, *map(document.locate, issues)]
    if source.validated.topology is not None:
        findings += source.locate(check_semantics(source.validated.topology))
    return source, _sorted(findings)


def _sorted(findings: list[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda f: (f.line, f.column, f.path, f.what))
