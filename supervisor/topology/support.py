"""What this build can run, in one place: lift a limit here when the code behind it exists.

The schema describes the product; a release may implement less of it. What is not there yet is an
error of its own, so nobody looks for a mistake in a correct file.
"""

from collections.abc import Iterator
from typing import Final

from supervisor.topology.findings import Issue
from supervisor.topology.schema import Topology

__all__ = ["MAX_TENSOR_PARALLEL", "unsupported"]

MAX_TENSOR_PARALLEL: Final[int] = 1
"""Ranks of one engine."""


def unsupported(topology: Topology) -> Iterator[Issue]:
    """Correct wishes that this build cannot fulfil."""
    for index, group in enumerate(topology.groups):
        place = ("groups", index)
        if group.tensor_parallel > MAX_TENSOR_PARALLEL and not group.runs_commands:
            what = f"tensor_parallel {group.tensor_parallel} is not supported yet by this build"
            instead = f"write {MAX_TENSOR_PARALLEL}"
            yield Issue((*place, "tensor_parallel"), what, instead)
