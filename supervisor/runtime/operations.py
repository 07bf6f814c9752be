"""Operations: what was done to a group, with the time of each phase; the last 200 are kept."""

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from supervisor.admin.controller import Operation, OperationState
from supervisor.runtime.machine import Clock

__all__ = ["PHASES", "OpenOperation", "OperationLog"]

_KEPT: Final = 200
PHASES: Final = ("detect", "fence", "promote", "verify", "route", "first_token", "total")


@dataclass
class OpenOperation:
    """An operation under way. Phases are measured on CLOCK_MONOTONIC, end to end."""

    id: str
    kind: str  # failover | switchover | evict | resume | freeze | thaw | restart
    group: str
    engine: str
    cause: str
    clock: Clock
    started_ns: int  # monotonic: when it began, or when what caused it was last seen alive
    started_unix_s: float
    phases_ms: dict[str, float] = field(default_factory=dict)
    state: OperationState = "running"
    epoch: int = 0
    text: str = ""
    error: str = ""
    cut_streams: int = 0
    adopted: int = 0  # slots that the new primary found
    _mark_ns: int = 0

    def __post_init__(self) -> None:
        self._mark_ns = self.started_ns

    def phase(self, name: str, *, until_ns: int | None = None) -> float:
        """Close a phase now (or at `until_ns`); the next one begins there. Returns its ms."""
        now_ns = until_ns if until_ns is not None else self.clock.monotonic_ns()
        took_ms = (now_ns - self._mark_ns) / 1e6
        self.phases_ms[name] = self.phases_ms.get(name, 0.0) + took_ms
        self._mark_ns = now_ns
        return took_ms

    def finish(self, state: OperationState, *, error: str = "") -> None:
        """Mark the end; `total` so far."""
        self.state = state
        self.error = error
        self.phases_ms["total"] = (self._mark_ns - self.started_ns) / 1e6

    def first_token(self, at_ns: int) -> None:
        """The first token behind the cut reached a gateway at `at_ns`."""
        self.phase("first_token", until_ns=max(at_ns, self._mark_ns))
        self.phases_ms["total"] = (self._mark_ns - self.started_ns) / 1e6

    def phases_s(self) -> dict[str, float]:
        """Phases in seconds, for the metrics."""
        return {name: ms / 1000 for name, ms in self.phases_ms.items()}

    def rounded_ms(self) -> dict[str, float]:
        """Phases in ms, rounded for an event."""
        return {name: round(ms, 3) for name, ms in self.phases_ms.items()}

    def frozen(self) -> Operation:
        """As the admin API shows it."""
        return Operation(
            id=self.id,
            kind=self.kind,
            group=self.group,
            engine=self.engine,
            state=self.state,
            cause=self.cause,
            started=self.started_unix_s,
            duration_ms=round(self.phases_ms.get("total", 0.0), 3),
            phases_ms={k: round(v, 3) for k, v in self.phases_ms.items()},
            epoch=self.epoch,
            text=self.text,
            error=self.error,
        )


class OperationLog:
    """Ids and the recent past."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counter = itertools.count(1)
        self._operations: deque[OpenOperation] = deque(maxlen=_KEPT)
        self._prefix = f"{int(clock.time()):x}"

    def open(
        self, kind: str, *, group: str, engine: str, cause: str, started_ns: int | None = None
    ) -> OpenOperation:
        """Begin an operation."""
        operation = OpenOperation(
            id=f"{self._prefix}-{next(self._counter)}",
            kind=kind,
            group=group,
            engine=engine,
            cause=cause,
            clock=self._clock,
            started_ns=started_ns if started_ns is not None else self._clock.monotonic_ns(),
            started_unix_s=self._clock.time(),
        )
        self._operations.append(operation)
        return operation

    def find(self, operation_id: str) -> Operation | None:
        """One operation by id."""
        return next((o.frozen() for o in self._operations if o.id == operation_id), None)

    def newest(self, group: str, kind: str) -> OpenOperation | None:
        """The newest operation of this kind."""
        of_kind = (o for o in reversed(self._operations) if o.group == group and o.kind == kind)
        return next(of_kind, None)

    def waiting_for_token(self, group: str, epoch: int) -> OpenOperation | None:
        """The newest operation that led to this epoch and has no first token yet."""
        for operation in reversed(self._operations):
            if operation.group == group and operation.epoch == epoch:
                return None if "first_token" in operation.phases_ms else operation
        return None

    def history(self) -> list[dict[str, object]]:
        """The recent past, oldest first."""
        return [msgspec.to_builtins(o.frozen()) for o in self._operations]
