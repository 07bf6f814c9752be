"""Parameters of requests, checked at the edge.

Each may stand in the query or in the JSON body, not in both with different values; unknown names
are refused, so that a misspelt `dry_run` never carries something out.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AckParameters",
    "EventsParameters",
    "EvictParameters",
    "FenceParameters",
    "GroupParameters",
    "NoParameters",
    "Parameters",
    "PromoteParameters",
    "ResumeParameters",
]

Name = Annotated[str, Field(min_length=1, max_length=100)]


class Parameters(BaseModel):
    """Base of all parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NoParameters(Parameters):
    """This request takes none."""


class PromoteParameters(Parameters):
    """Which group changes its primary."""

    group: Name | None = None
    """Name of the group; may be left out when there is only one."""
    to: Name | None = None
    """Engine that becomes primary; default: the standby."""
    expected_epoch: Annotated[int, Field(ge=0)] | None = None
    """Refuse with 409 unless this is the group's epoch: the caller's picture may be old."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""


class EvictParameters(Parameters):
    """How the batch engine gives way."""

    hold: bool = False
    """Stay away until `resume`, whatever the batch policy says."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""


class FenceParameters(Parameters):
    """What the operator attests."""

    confirm: bool = False
    """Yes: this process can never run again, so its group may go on without it. Without it the
    answer is 412 and says what would be attested."""


class ResumeParameters(Parameters):
    """How an engine comes back."""

    dry_run: bool = False
    """Say what would be done, and do nothing."""


class AckParameters(Parameters):
    """What the operator has seen."""

    group: Name | None = None
    """Name of the group; default: all."""


class GroupParameters(Parameters):
    """Which group is asked about."""

    group: Name | None = None
    """Name of the group; may be left out when there is only one."""


class EventsParameters(Parameters):
    """Which events."""

    since: Annotated[int, Field(ge=0)] | None = None
    """Only events behind this sequence number. Default: all in memory, or, when following, only
    new ones."""
    limit: Annotated[int, Field(ge=1, le=2000)] = 1000
    """At most so many, the newest; without effect when following."""
    follow: bool | None = None
    """Keep the connection and send events as they come, as server-sent events. Default: no, but
    yes for a client that accepts `text/event-stream` alone."""
