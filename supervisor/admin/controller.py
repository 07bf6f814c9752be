"""What the admin API asks of the supervisor: a port that the runtime implements.

The server checks who asks and what the request says; the controller decides whether it may
happen now. It raises the errors of `supervisor.errors`, each with its HTTP status:
`PreconditionError` (412), `ConflictError` (409, also for an old `expected_epoch`),
`NotFoundError` (404).
"""

from typing import Any, Literal, Protocol

import msgspec

__all__ = ["Controller", "Operation", "OperationState"]

OperationState = Literal["running", "done", "failed", "refused", "planned"]
"""`planned`: what a dry run would do; nothing was touched."""


class Operation(msgspec.Struct, frozen=True):
    """One command and what came of it. Failovers that the supervisor began itself are some too."""

    id: str
    kind: str  # promote, failover, evict, ...
    group: str = ""
    engine: str = ""
    state: OperationState = "done"
    cause: str = ""
    started: float = 0.0  # unix time, seconds
    duration_ms: float | None = None
    phases_ms: dict[str, float] = {}
    epoch: int | None = None  # in force afterwards
    text: str = ""  # one sentence for people
    error: str = ""


class Controller(Protocol):
    """The supervisor's side. All calls come on its event loop; none may block it."""

    def status(self) -> dict[str, Any]:
        """The body of `GET /v1/status`; returns at once, from what is known.

        Each group has `primary`, the name of the engine that serves now or None, and `standby`,
        the names of those that could take over now: load balancers act on them.
        """

    async def topology(self) -> dict[str, Any]:
        """The topology in force, defaults included."""

    async def promote(
        self, group: str | None, to: str | None, expected_epoch: int | None, dry_run: bool
    ) -> Operation:
        """Planned switchover: the standby (or `to`) takes over, the primary becomes standby.

        `group` None: the only one; with several a ConflictError or PreconditionError names them.
        """

    async def failover(
        self, group: str | None, to: str | None, expected_epoch: int | None, dry_run: bool
    ) -> Operation:
        """Forced: the primary is fenced though it may be well."""

    async def evict(self, engine: str, hold: bool, dry_run: bool) -> Operation:
        """A batch engine gives its memory back; with `hold` it stays away until resumed."""

    async def resume(self, engine: str, dry_run: bool) -> Operation:
        """An evicted or given-up engine is started again."""

    async def freeze(self, engine: str) -> Operation:
        """A batch engine stops computing at once and keeps its memory."""

    async def thaw(self, engine: str) -> Operation:
        """A frozen engine goes on."""

    async def restart(self, engine: str) -> Operation:
        """An engine is replaced by a new process."""

    async def fence(self, engine: str, confirm: bool) -> Operation:
        """The operator attests that an UNKILLABLE engine can never act again.

        Without `confirm` a PreconditionError says what would be attested.
        """

    async def pause(self) -> Operation:
        """From now on nothing is started, stopped or promoted automatically."""

    async def unpause(self) -> Operation:
        """Automation goes on."""

    async def ack(self, group: str | None) -> Operation:
        """The operator has seen it: a BLOCKED group may fail over by judgement again.

        Whatever has given up (FATAL engines, the zygote) is tried again too.
        """

    async def stop(self) -> Operation:
        """Begin to stop everything, and return: the answer must still reach the caller."""

    async def history(self) -> list[dict[str, Any]]:
        """Past operations, newest last."""

    async def operation(self, operation_id: str) -> Operation | None:
        """One operation, or None when it is not known (any more)."""

    async def is_live(self) -> bool:
        """Whether the supervisor itself works; False makes its keeper restart it."""

    async def readiness(self) -> dict[str, bool]:
        """For each group, whether clients are served."""
