"""The topology file as types: what every key means, its unit, its default and the reason for it.

pydantic at this edge only; the rest of the product reads these frozen models and nothing else
(no environment variable is read below `supervisor.topology`). Durations are seconds and sizes are
bytes once parsed; in the file both carry a unit (`400ms`, `10m`, `2GiB`).
"""

import ipaddress
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    model_validator,
)

__all__ = [
    "Admin",
    "Batch",
    "Bytes",
    "CacheSettings",
    "Engine",
    "EngineKind",
    "EngineRole",
    "Failover",
    "Gateway",
    "Group",
    "Health",
    "Kv",
    "Listen",
    "ListenAddress",
    "Model",
    "Seconds",
    "Topology",
    "format_duration",
    "format_size",
]

_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(ms|s|m|h)", re.ASCII)
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)", re.ASCII)
_DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE_UNITS: Final = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_duration(value: object) -> object:
    """`"400ms"` -> 0.4. A bare number is refused: its unit would be a guess."""
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        return float(match[1]) * _DURATION_UNITS[match[2]]
    raise ValueError(
        f"{value!r} is not a duration; write a number with a unit, such as 400ms, 2s, 10m or 1h"
    )


def parse_size(value: object) -> object:
    """`"2GiB"` -> 2147483648. A bare number is refused: its unit would be a guess."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        return int(float(match[1]) * _SIZE_UNITS[match[2]])
    raise ValueError(f"{value!r} is not a size; write a number with a unit, such as 512MiB or 2GiB")


def format_duration(seconds: float) -> str:
    """0.4 -> `400ms`: the shortest way to write it in the file."""
    for unit in ("h", "m", "s"):
        amount = seconds / _DURATION_UNITS[unit]
        if amount >= 1 and amount == int(amount):
            return f"{int(amount)}{unit}"
    return f"{seconds * 1000:g}ms" if seconds else "0s"


def format_size(size_bytes: int) -> str:
    """2147483648 -> `2GiB`: the shortest exact way to write it in the file."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _SIZE_UNITS[unit] and size_bytes % _SIZE_UNITS[unit] == 0:
            return f"{size_bytes // _SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def parse_listen(value: object) -> object:
    """`"127.0.0.1:8000"` or `"[::1]:8000"` -> host and port.

    Names other than `localhost` are refused: what they mean may change while we run.
    """
    if isinstance(value, str):
        host, separator, port = value.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if separator and port.isascii() and port.isdecimal() and len(port) <= 5:
            if int(port) > 65535:
                raise ValueError(f"port {port} does not exist; write one from 1 to 65535, or 0")
            if host == "localhost" or _is_ip_address(host):
                return {"host": host, "port": int(port)}
    raise ValueError(
        f"{value!r} is not an address; write IP:port, such as 127.0.0.1:8000 or '[::1]:8000'"
    )


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host  # an IPv6 zone is the business of one machine, not of a topology


def parse_path(value: object) -> object:
    """A path that the operating system can take, kept as it was written."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a path; write a path as text, such as run/demo")
    if any(ord(character) < 0x20 for character in value):
        raise ValueError(f"{value!r} has control characters; write a plain path, such as run/demo")
    return Path(value)


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": "string", "pattern": rf"^\s*{_DURATION.pattern}\s*$"}),
]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Count = Annotated[int, Strict()]
"""A whole number, and never `true` or `"8"`: a file that is read by people says what it means."""
FilePath = Annotated[Path, BeforeValidator(parse_path), WithJsonSchema({"type": "string"})]
Bytes = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"type": "string", "pattern": rf"^\s*{_SIZE.pattern}\s*$"}),
]

Device = Annotated[str, Field(pattern=r"^(cpu|cuda:\d{1,3})$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""Lower-case letters, digits and inner hyphens, at most 40: names become file and socket names."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ListenAddress(_Model):
    """An IP address (or `localhost`) and a port; port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Listen = Annotated[
    ListenAddress,
    BeforeValidator(parse_listen),
    WithJsonSchema({"type": "string", "pattern": r"^.+:\d+$"}),
]


class EngineKind(StrEnum):
    """Which program serves the model."""

    NATIVE = "native"
    COMMAND = "command"


class EngineRole(StrEnum):
    """What an engine of the topology is for. Primary and standby exchange roles at a failover."""

    PRIMARY = "primary"
    STANDBY = "standby"
    BATCH = "batch"


class Admin(_Model):
    """The admin API."""

    listen: Listen = ListenAddress(host="127.0.0.1", port=9400)
    """Loopback address of the admin HTTP API; port 0 takes any free one."""
    auth: Literal["default", "all"] = "default"
    """`all` asks for the bearer token also for health, metrics and status."""


class Gateway(_Model):
    """The data plane: the one address that clients know."""

    listen: Listen = ListenAddress(host="127.0.0.1", port=8000)
    """Address of the OpenAI API; port 0 takes any free one."""
    workers: Annotated[Count, Field(ge=1, le=64)] = 1
    """Gateway processes that share the listening socket."""
    max_body: Bytes = 4 << 20
    """Largest request body; above it 413."""
    max_connections: Annotated[Count, Field(ge=1)] = 10_000
    """Client connections per worker; above it new ones wait in the kernel's backlog."""
    max_parked: Annotated[Count, Field(ge=1)] = 1024
    """Requests per worker that may wait for a primary before their first byte; above it 429."""
    park_timeout: Seconds = 30.0
    """How long a request waits for a primary before it is answered 503."""
    resume_deadline: Seconds = 60.0
    """How long a stream that has begun waits for a new primary before an error event ends it."""
    client_timeout: Seconds = 300.0
    """How long a client may take nothing of its stream before it is cut off."""


class Model(_Model):
    """The checkpoint."""

    path: FilePath
    """Folder in Hugging Face format: config, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in the arena; tensors of another floating type are converted on load."""
    quantization: Literal["none", "fp8_block"] = "none"
    """Allow-list: only what the cache can share without losing meaning. `fp8_block` keeps linear
    layers as E4M3 in blocks of 128 x 128, stored so or quantised on load; needs a GPU."""
    revision: str = ""
    """Free text that becomes part of the fingerprint."""


class CacheSettings(_Model):
    """The weight cache of the group's device."""

    mode: Literal["daemon", "client", "off"] = "daemon"
    """`daemon` starts one; `client` uses one that runs already; `off` loads per engine, and is the
    default, and all there is, in a group of kind `command`."""
    socket: FilePath | None = None
    """For `client`: the socket of the daemon that runs already."""
    on_mismatch: Literal["reload", "fail"] = "reload"
    """What to do when the daemon holds other weights than the topology names."""
    load_timeout: PositiveSeconds = 1800.0
    """Longest time that loading may take before the start fails."""


class Kv(_Model):
    """The KV arena of the serving pair."""

    slots: Annotated[Count, Field(ge=1, le=1024)] = 16
    """Streams that decode at once. In a group of kind `command` the server decides that, and this
    plus `max_queue` (default 256) only bounds the requests that are at it at once."""
    max_length: Annotated[Count, Field(ge=128, multiple_of=128)] = 2048
    """Tokens (prompt and answer) that one slot holds. In a group of kind `command` the server
    decides that, and the default is 1048576."""


class EngineKv(_Model):
    """An engine's own KV region (batch engines)."""

    slots: Annotated[Count, Field(ge=1, le=1024)] | None = None
    """Streams that decode at once; default: the group's."""
    max_length: Annotated[Count, Field(ge=128, multiple_of=128)] | None = None
    """Tokens per slot; default: the group's."""


class Engine(_Model):
    """One engine of a group."""

    name: Name
    """How commands, metrics and sockets call it; once in a topology."""
    kind: EngineKind = EngineKind.NATIVE
    """Which program serves the model."""
    role: EngineRole
    """The role at the first start; later the supervisor decides."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """For kind `command`: program and arguments of a server with OpenAI's API over HTTP. `{port}`
    is replaced by a free port of 127.0.0.1, or `{socket}` by the path of a Unix socket, which is
    better where the server can listen on one: no other process can take it. It must stay in the
    foreground and serve `/health`, `/v1/completions`, `/v1/chat/completions`, and for its progress
    `/metrics` with the names of vLLM, SGLang or llama.cpp."""
    kv: EngineKv = EngineKv()
    """Only for batch engines: their KV region is private and dies with them."""
    ballast: Bytes = 0
    """Private memory touched at start and never used: gives a small demo engine a realistic size,
    because the time the kernel needs to tear a process down grows with its memory."""


class Health(_Model):
    """How the engines of a group are watched."""

    interval: PositiveSeconds = 0.1
    """Time between two samples of progress and health."""
    hang_after: PositiveSeconds = 0.4
    """Work queued, no progress and not starved of CPU for this long: HUNG. In a group of kind
    `command` the default is 10s, because some servers say nothing while they read a long prompt."""
    canary: PositiveSeconds = 2.0
    """Time between two known-answer checks of an engine."""
    start_timeout: PositiveSeconds = 120.0
    """From spawn to ready, without the time that the weights take to load."""


class Failover(_Model):
    """Limits of failing over by judgement, and how dead engines come back."""

    intensity: Annotated[Count, Field(ge=1)] = 5
    """Failovers by judgement (HUNG) allowed within `period`; more would be flapping, so the group
    is BLOCKED until `ack` or until the period has passed. Death is always answered."""
    period: PositiveSeconds = 600.0
    """Sliding window in which `intensity` counts."""
    stable_after: Seconds = 5.0
    """An engine that lived this long is restarted at once; a younger one backs off."""
    max_backoff: Seconds = 30.0
    """Longest pause before an engine that keeps dying young is tried again."""
    max_young_deaths: Annotated[Count, Field(ge=1)] = 5
    """So many deaths in a row before `stable_after`: FATAL, until the operator restarts it. Deaths
    of a primary do not count."""
    adopt_grace: Seconds = 10.0
    """How long an adopted slot waits for its gateway before it is freed."""
    drain_timeout: Seconds = 30.0
    """For kind `command`, whose streams cannot change engines: how long a planned switchover waits
    for those that are open. What is left then ends with an error event."""


class Batch(_Model):
    """When the batch engine gives way."""

    freeze_when: str | None = None
    """Condition on the primary that stops the batch engine's compute, such as `queue > 0`."""
    evict_after: Seconds | None = None
    """Frozen for so long: evict, which gives its memory back."""
    resume_after: Seconds | None = None
    """Quiet for so long: thaw or start again."""


class Group(_Model):
    """One model on one set of devices, served by one primary."""

    name: Name
    """Also the model id that clients use."""
    model: Model | None = None
    """What one copy of the weights is loaded from. Only engines of kind `command`, which load their
    own, do without."""
    devices: Annotated[list[Device], Field(min_length=1)] = ["cpu"]
    """`cpu`, or GPUs as `cuda:0`; one per tensor-parallel rank."""
    tensor_parallel: Annotated[Count, Field(ge=1)] = 1
    """Ranks that share each layer; equals the number of devices."""
    cache: CacheSettings = CacheSettings()
    """Who holds the weights, and what happens when they differ."""
    kv: Kv = Kv()
    """How many streams the serving pair carries, and how long they may be."""
    engines: Annotated[list[Engine], Field(min_length=1)]
    """One primary; a standby for failover; a batch engine for what can wait."""
    health: Health = Health()
    """How soon a dead or hung engine is noticed."""
    failover: Failover = Failover()
    """How often the supervisor may act by judgement, and how it restarts engines."""
    batch: Batch = Batch()
    """When the batch engine gives way to the primary."""
    max_queue: Annotated[Count, Field(ge=0)] = 64
    """Requests that may wait for a slot in the primary; above it 429 with Retry-After."""

    @model_validator(mode="before")
    @classmethod
    def _fill_for_commands(cls, data: Any) -> Any:  # noqa: ANN401 - what a file holds
        """Defaults that differ where servers of other makers do the work."""
        if not isinstance(data, Mapping) or not _runs_commands(data.get("engines")):
            return data
        return {**data, **{key: _filled(data.get(key), more) for key, more in _OF_COMMANDS.items()}}

    @property
    def runs_commands(self) -> bool:
        """Whether its engines are servers of other makers: no cache, zygote or shared memory."""
        return all(engine.kind is EngineKind.COMMAND for engine in self.engines)


_OF_COMMANDS: Final[dict[str, dict[str, Any]]] = {
    "cache": {"mode": "off"},
    "health": {"hang_after": "10s"},
    "kv": {"slots": 256, "max_length": 1 << 20},
}


def _runs_commands(engines: object) -> bool:
    if not isinstance(engines, list) or not engines:
        return False
    return all(isinstance(e, Mapping) and e.get("kind") == EngineKind.COMMAND for e in engines)


def _filled(given: object, more: dict[str, Any]) -> object:
    """A section with what it does not say itself; what is no section is left to the checks."""
    if given is None:
        return more
    return {**more, **given} if isinstance(given, Mapping) else given


class Topology(_Model):
    """One file, one supervisor."""

    version: Literal[1]
    """Version of this format."""
    name: Name
    """Names this supervisor in logs, metrics and for `supervisor status`."""
    state_dir: FilePath
    """Folder for state, sockets and logs, mode 0700; created when missing."""
    admin: Admin = Admin()
    """The admin API, for people and programs that operate the system."""
    gateway: Gateway = Gateway()
    """The data plane, for clients."""
    groups: Annotated[list[Group], Field(min_length=1)]
    """One per model."""
    core_dumps: Annotated[bool, Strict()] = False
    """Let processes that crash dump their memory, within the limit (`ulimit -c`) of the supervisor.
    Shared memory is never dumped, but a dump may hold users' texts. Off, nothing is dumped, not
    even where the system pipes dumps to a program."""
