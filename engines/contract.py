"""What every engine offers: control, generation, progress. Torch-free; both ends import it.

Three sockets in `state_dir/run`, all named after the instance:

`<instance>.sock`  control (`cache.rpc`, protocol `understudy-engine`), served from a thread that
                   never runs the model; the supervisor connects, and connects again after its own
                   restart.
`<instance>.gen`   generation: one connection per request, length-prefixed JSON of the tagged
                   structs below (`GatewayFrame` one way, `EngineFrame` the other).
`<instance>.http`  HTTP: `/health` (200 when it can serve or stand by, else 503) and `/metrics`.

Control verb      parameters -> result (descriptors)
hello             Hello -> EngineStatus
status            - -> EngineStatus
assume            Assume -> Assumed           role and epoch come from the supervisor alone
canary            - -> CanaryResult           known prompt on private memory, legal in any role
progress.open     - -> null (one memfd: `ProgressPage`)
release_gateway   ReleaseGateway -> null      that gateway worker died: free its parked slots
descriptors       - -> Descriptors (weights, KV extents, slot table): for a donation
cache.rejoin      - -> null                   the daemon was restarted: register there again
drain             - -> Drained                take no new request for `DRAIN_LEASE_S`; ask again
                                              until none is open, then take the role away
shutdown          - -> null                   leave in order; exit status 0

Event `state` (EngineStatus) is sent whenever state, role or epoch change.

Rules of generation
    1. A request is answered only by the engine that holds the role and exactly the epoch named.
    2. The engine commits a token to the slot table before it sends it.
    3. `Cancel` means the client is gone: the slot is freed. End of file without it means the
       gateway cut the route or died: the slot is parked for `adopt_grace_s`, then freed.
    4. A second `Generate` with the same request id supersedes the first stream.
    5. `Delta.index` counts output tokens before this delta; deltas are contiguous. `Delta.chars`
       counts the characters (code points) of all text up to and including this delta.
    6. On resume the engine sends only tokens behind `resume.token_ids` and text behind
       `resume.chars`. Text is a pure function of the ids.
    7. A gateway that does not read stops its own row, and no other.
    8. A stream that was accepted as not `resumable` ends with its engine: the gateway begins anew
       as long as its client has got nothing, and else ends with an error. Such an engine knows no
       token ids: its deltas have text only.
"""

from typing import Any, Final, Literal

import msgspec

from cache.protocol import KvOpened, LoadSpec, Manifest

__all__ = [
    "CONTROL_PROTOCOL",
    "CONTROL_VERSION",
    "DRAIN_LEASE_S",
    "GENERATE_VERSION",
    "ZYGOTE_PROTOCOL",
    "ZYGOTE_VERSION",
    "Accepted",
    "Assume",
    "Assumed",
    "CanaryResult",
    "Cancel",
    "ChildRecord",
    "Children",
    "CommandSpec",
    "Delta",
    "Descriptors",
    "DeviceMemory",
    "Drained",
    "End",
    "EngineFrame",
    "EngineSpec",
    "EngineState",
    "EngineStatus",
    "Fork",
    "GatewayFrame",
    "Generate",
    "GenerateBody",
    "GenerateError",
    "ProgressPage",
    "ReleaseGateway",
    "Resume",
    "Role",
    "Usage",
    "ZygoteHello",
    "ZygoteSpec",
]

CONTROL_PROTOCOL: Final = "understudy-engine"
CONTROL_VERSION: Final = 1
GENERATE_VERSION: Final = 1
ZYGOTE_PROTOCOL: Final = "understudy-zygote"
ZYGOTE_VERSION: Final = 1

DRAIN_LEASE_S: Final = 3.0
"""A supervisor that dies while an engine drains must not leave one that refuses everybody."""

Role = Literal["none", "primary", "standby", "batch"]
EngineState = Literal["starting", "ready", "standby", "serving", "stopping", "failed"]
"""`ready`: attached and proven, waits for a role. `serving`: primary or batch."""


class EngineSpec(msgspec.Struct, frozen=True):
    """Everything an engine needs to start. The zygote gets it in `Fork`, a cold start in a file."""

    name: str
    group: str
    instance: str
    run_dir: str  # absolute; sockets are made here
    cache_socket: str | None  # None: cache mode `off`, the engine loads privately
    load: LoadSpec
    on_mismatch: Literal["reload", "fail"]
    slots: int
    max_length: int
    private_kv: bool  # batch engines: a region of their own that dies with them
    max_queue: int
    adopt_grace_s: float
    attach_timeout_s: float
    ballast_bytes: int = 0
    niceness: int = 0
    max_unsent_tokens: int = 512  # per stream; above it the row pauses until the gateway reads


class CommandSpec(msgspec.Struct, frozen=True):
    """Start of a command engine: `python -m engines.command SPECFILE`."""

    name: str
    group: str
    instance: str
    run_dir: str  # absolute; sockets are made here
    command: list[str]  # with `{port}` or `{socket}`
    max_open: int  # requests that may be at the server at once; above it `queue_full`
    start_timeout_s: float  # until the server answers a first request
    hang_after_s: float
    python_path: str | None = None  # the server's own PYTHONPATH: ours is none of its business


class DeviceMemory(msgspec.Struct, frozen=True):
    """GPU memory as one engine sees it. Weights and KV arena are the cache daemon's to report."""

    reserved_bytes: int  # this process: private KV, buffers and graphs; not the bare context
    free_bytes: int  # of the whole GPU
    total_bytes: int


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine as it sees itself."""

    name: str
    instance: str
    pid: int
    state: EngineState
    role: Role
    epoch: int
    exact: bool  # the self-check proved that rows depend on neither neighbours nor row index
    active: int = 0  # rows that decode
    parked: int = 0  # adopted or cut off, waiting for their gateway
    queued: int = 0
    slots: int = 0
    attach_ms: float | None = None
    start_ms: float | None = None
    cache_registered: bool = False
    error: str = ""
    device_memory: DeviceMemory | None = None  # None on the CPU, and before `ready`
    resumable: bool = True  # whether its streams go on at a successor


class Assume(msgspec.Struct, frozen=True):
    """Take this role. An epoch lower than the engine's own is refused (`stale_epoch`).

    The predecessor must be fenced. On a GPU that is not all: what it had queued may still run and
    write until the kernel has taken its context down. Adopted streams go on meanwhile (the same
    bits land at the same places), but no slot is given to another request before the writer named
    in the slot table has been reaped. The engine sees to that itself; nobody needs to tell it.

    standby -> primary: raise the KV mapping, read the slot table, adopt. primary -> standby: stop
    at a step boundary, commit, drop the mapping to read-only, end streams without freeing slots.
    """

    role: Literal["primary", "standby", "batch"]
    epoch: int


class Assumed(msgspec.Struct, frozen=True):
    """Done."""

    role: Role
    epoch: int
    adopted: list[str] = []  # request ids, hex
    map_ms: float = 0.0
    adopt_ms: float = 0.0


class CanaryResult(msgspec.Struct, frozen=True):
    """Token ids of the built-in prompt: one prefill chunk and one decode step."""

    token_ids: list[int]
    duration_ms: float
    monotonic_ns: int


class ReleaseGateway(msgspec.Struct, frozen=True):
    """This gateway worker is dead; nobody will resume its streams."""

    gateway: str


class Drained(msgspec.Struct, frozen=True):
    """How far the engine is; a role that it takes later ends the draining."""

    open: int  # requests that are still answered


class Descriptors(msgspec.Struct, frozen=True):
    """What a donation needs; descriptors in the order of `cache.protocol.Donate`."""

    manifest: Manifest
    spec: LoadSpec
    kv: KvOpened | None


# ---------------------------------------------------------------- generation


class GenerateBody(msgspec.Struct, frozen=True):
    """A request, already checked by the gateway. Exactly one of prompt and messages is set."""

    kind: Literal["completion", "chat"]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None  # None: completions 16 (OpenAI's default), chat up to max_length
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop: list[str] = []
    ignore_eos: bool = False


class Resume(msgspec.Struct, frozen=True):
    """What the client has already got. The body then needs neither prompt nor messages.

    An engine that holds the stream in a slot knows its prompt: `prompt_ids` may be left out, so
    that a takeover does not wait for them (0.1 MB for 16k tokens). Who has no such slot answers
    `prompt_needed`, and is asked again with the ids.
    """

    prompt_ids: list[int] | None
    token_ids: list[int]
    chars: int
    prompt_tokens: int = 0  # how many ids were left out


class Generate(msgspec.Struct, frozen=True, tag="generate", tag_field="type"):
    """The first frame of a connection."""

    version: int
    request_id: str  # 128 random bits of the gateway, hex
    epoch: int
    gateway: str  # instance of the gateway worker
    body: GenerateBody
    seed: int  # 0 <= seed < 2**63; drawn by the gateway where the client gave none
    resume: Resume | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel", tag_field="type"):
    """The client is gone: free the slot."""


GatewayFrame = Generate | Cancel


class Usage(msgspec.Struct, frozen=True):
    """Token counts, as OpenAI's API reports them."""

    prompt_tokens: int
    completion_tokens: int


class Accepted(msgspec.Struct, frozen=True, tag="accepted", tag_field="type"):
    """The request is valid and queued, or its stream goes on.

    `source`: `slot` (adopted, nothing recomputed), `replay` (prompt prefilled, delivered tokens
    forced through decode), `fresh`. `exact`: the continuation is bit-exact.
    """

    prompt_ids: list[int]  # empty behind a `resume`, which named them: takeovers wait for bytes
    epoch: int
    source: Literal["fresh", "slot", "replay"]
    exact: bool
    resumable: bool = True  # see rule 8


class Delta(msgspec.Struct, frozen=True, tag="delta", tag_field="type"):
    """New tokens; `text` may be empty while a character or a stop string is incomplete."""

    index: int
    token_ids: list[int]
    text: str
    chars: int


class End(msgspec.Struct, frozen=True, tag="end", tag_field="type"):
    """The stream is complete."""

    finish_reason: Literal["stop", "length"]
    usage: Usage


class GenerateError(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """The request cannot be served here.

    `resumable`: the gateway should wait for the next route and try again. `status` is the HTTP
    status for a client that has not seen a byte. Codes: `context_length_exceeded` (400),
    `invalid_request` (400), `queue_full` (429), `not_serving` and `stale_epoch` (resumable),
    `prompt_needed` (see `Resume`), `not_resumable` (502), `superseded`, `engine_failed`
    (resumable), `poison` (500).
    """

    code: str
    message: str
    status: int = 500
    resumable: bool = False
    retry_after_s: float | None = None


EngineFrame = Accepted | Delta | End | GenerateError


# ------------------------------------------------------------------- progress


class ProgressPage:
    """One page of shared words that only the engine's model thread writes.

    Every word is an aligned 8-byte store (memoryview cast to Q): readers need no lock. Words:
    steps (decode or prefill steps finished), tokens (committed), active, queued (requests that
    wait for a slot), step_started_ns and step_finished_ns (CLOCK_MONOTONIC), epoch, runnable (rows
    and requests that could make a step now: not parked, not waiting for a reader or for a slot that
    somebody else holds), handled (commands that the model thread has carried out). Only `posted`
    (commands given to it) is written by the thread that listens. Work that waits is `runnable > 0`
    or `posted != handled`; with it, `steps` must rise.

    The words `tree_*` are about processes below the engine's own, where the work is done by them
    (else zero): nanoseconds on a CPU and on run queues, and whether one is in state `R` or `T`.
    """

    SIZE_BYTES: Final = 4096
    MAGIC: Final = 0x5553_5047_0000_0001
    FIELDS: Final = (
        "steps", "tokens", "active", "queued", "step_started_ns", "step_finished_ns", "epoch",
        "runnable", "handled", "posted",
        "tree_on_cpu_ns", "tree_run_delay_ns", "tree_runnable", "tree_stopped",
    )  # fmt: skip

    def __init__(self, buffer: memoryview) -> None:
        self._words = buffer.cast("B").cast("Q")

    def format(self) -> None:
        """Mark a zero-filled page as ours (the engine, once)."""
        self._words[0] = self.MAGIC

    @property
    def is_valid(self) -> bool:
        """Whether the page was formatted by an engine of this version."""
        return self._words[0] == self.MAGIC

    def set(self, field: str, value: int) -> None:
        """Store one word."""
        self._words[1 + self.FIELDS.index(field)] = value

    def get(self, field: str) -> int:
        """Read one word."""
        return self._words[1 + self.FIELDS.index(field)]

    @property
    def has_work(self) -> bool:
        """Whether the engine could make progress now."""
        return self.get("runnable") > 0 or self.get("posted") != self.get("handled")

    def release(self) -> None:
        """Drop the view, so that the mapping below may be closed."""
        self._words.release()


# --------------------------------------------------------------------- zygote


class ZygoteSpec(msgspec.Struct, frozen=True):
    """Start of a zygote: `python -m engines.zygote SPECFILE`."""

    group: str
    instance: str
    control_socket: str
    load: LoadSpec


class ZygoteHello(msgspec.Struct, frozen=True):
    """The zygote's answer to hello: the socket exists only once everything is imported."""

    instance: str
    pid: int
    threads: int
    ready_ms: float


class Fork(msgspec.Struct, frozen=True):
    """Fork one engine; one descriptor, its log, comes beside it. Answer: ChildRecord.

    `marker` is what the child writes over its `UNDERSTUDY_INSTANCE` in place.
    """

    spec: EngineSpec
    marker: str


class ChildRecord(msgspec.Struct, frozen=True):
    """A child of the zygote; `status` is the wait status once it was reaped.

    Verbs: hello -> ZygoteHello, fork -> ChildRecord, children -> Children. Event `exited`
    (ChildRecord) goes to every client.
    """

    instance: str
    pid: int
    start_ticks: int
    status: int | None = None


class Children(msgspec.Struct, frozen=True):
    """Living children, and the last 100 that were reaped."""

    children: list[ChildRecord]
