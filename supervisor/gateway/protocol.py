"""Between supervisor and gateway worker: routes one way, observations the other. Versioned.

The worker listens at `state_dir/run/<instance>.sock` (`cache.rpc`, protocol `understudy-gateway`);
the supervisor connects, and connects again after its own restart, and pushes the full table.

verb      parameters -> result (descriptors)
hello     Hello -> GatewayStatus
routes    Routes -> RoutesAck       the table replaces the old one; the answer means it is in force
status    - -> GatewayStatus
listener  - -> null (the listening socket): for a supervisor that came back
drain     - -> null                 accept nothing new, finish what runs, then exit 0

Events: `first_token` (FirstToken) once per group and epoch, when the first token of a stream that
was cut arrives from the new engine; `stats` (GatewayStatus) once a second.

Invariants
    1. Epochs only rise: a table with a lower epoch for a group is refused (`stale_epoch`).
    2. When `routes` is answered, no frame of an engine that is no longer named reaches a client.
    3. A cut closes the connection *without* `Cancel`: the slot stays for whoever adopts it.
"""

import math
from typing import Final

import msgspec

__all__ = [
    "OVERHEAD_BUCKETS_S",
    "PROTOCOL",
    "TTFT_BUCKETS_S",
    "VERSION",
    "FirstToken",
    "GatewayLimits",
    "GatewaySpec",
    "GatewayStatus",
    "GroupCounters",
    "GroupRoute",
    "RouteTarget",
    "Routes",
    "RoutesAck",
]

PROTOCOL: Final = "understudy-gateway"
VERSION: Final = 1

TTFT_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    math.inf,
)  # fmt: skip
"""Upper bounds of `GroupCounters.ttft_buckets`, one count each; the last counts everything."""

OVERHEAD_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0, math.inf,
)  # fmt: skip
"""Upper bounds of `GroupCounters.overhead_buckets`: the worker's own share of the time to first
token (reading, checking, encoding), of requests that neither waited nor were tried again."""


class GatewayLimits(msgspec.Struct, frozen=True):
    """Bounds of one worker; meaning and defaults: `supervisor.topology.schema.Gateway`."""

    max_body_bytes: int
    max_connections: int
    max_parked: int
    park_timeout_s: float
    resume_deadline_s: float
    client_timeout_s: float


class GatewaySpec(msgspec.Struct, frozen=True):
    """Start of a worker: `python -m supervisor.gateway SPECFILE`, the listener inherited as fd."""

    instance: str
    control_socket: str
    listen_fd: int
    limits: GatewayLimits


class RouteTarget(msgspec.Struct, frozen=True):
    """One engine that serves."""

    instance: str
    generate_socket: str
    epoch: int


class GroupRoute(msgspec.Struct, frozen=True):
    """Where requests of one group go now. None: nowhere, requests park.

    Model ids: `group` reaches the primary, `group:batch` the batch engine (when `has_batch`).
    """

    group: str
    epoch: int
    max_length: int
    primary: RouteTarget | None
    has_batch: bool = False
    batch: RouteTarget | None = None
    created: int = 0  # unix time, for /v1/models
    crashed: list[str] = []  # the newest instances that ended by their own fault (poison)
    unexplained: list[str] = []  # instances that died a moment ago, nobody knows yet how


class Routes(msgspec.Struct, frozen=True):
    """The full table; `sequence` rises with every push."""

    sequence: int
    groups: list[GroupRoute]


class RoutesAck(msgspec.Struct, frozen=True):
    """The table of this sequence is in force: a newer one than what was sent, if there was one."""

    sequence: int
    streams_cut: int


class FirstToken(msgspec.Struct, frozen=True):
    """The first token behind a cut reached this worker."""

    group: str
    epoch: int
    monotonic_ns: int
    source: str  # as in engines.contract.Accepted: slot | replay | fresh


class GroupCounters(msgspec.Struct, frozen=True):
    """Counters of one model id since the worker started.

    `model` is empty for requests that were refused before they named a model that exists.
    """

    model: str
    requests: int = 0
    streams_open: int = 0  # now, not since the start
    parked: int = 0  # now
    resumed_slot: int = 0
    resumed_replay: int = 0
    retried: int = 0
    tokens: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0  # streams that ended with an error event
    poisoned: int = 0  # requests ended because engines crashed while they had them
    refused: dict[str, int] = {}  # by HTTP status
    ttft_buckets: list[int] = []  # cumulative counts for `supervisor.gateway.TTFT_BUCKETS_S`
    ttft_sum_s: float = 0.0
    overhead_buckets: list[int] = []  # cumulative counts for `OVERHEAD_BUCKETS_S`
    overhead_sum_s: float = 0.0


class GatewayStatus(msgspec.Struct, frozen=True):
    """A worker as it sees itself."""

    instance: str
    pid: int
    sequence: int
    epochs: dict[str, int]
    connections: int
    loop_lag_s: float
    groups: list[GroupCounters] = []
    draining: bool = False
    tasks: int = 0  # unfinished ones of its event loop
