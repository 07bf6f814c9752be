"""The topology file as types: what every key means, its unit, its default and the reason for it.

pydantic at this edge only; the rest of the product reads these frozen models and nothing else
(no environment variable is read below `supervisor.topology`). Durations are seconds and sizes are
bytes once parsed; in the file both carry a unit (`400ms`, `10m`, `2GiB`).
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

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
    "Model",
    "Seconds",
    "Topology",
]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)")
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


def parse_listen(value: object) -> object:
    """`"127.0.0.1:8000"` or `"[::1]:8000"` -> host and port."""
    if isinstance(value, str):
        host, separator, port = value.rpartition(":")
        if separator and host and port.isdecimal() and int(port) <= 65535:
            return {"host": host.strip("[]"), "port": int(port)}
    raise ValueError(f"{value!r} is not an address; write host:port, such as 127.0.0.1:8000")


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": "string", "pattern": rf"^\s*{_DURATION.pattern}\s*$"}),
]
Bytes = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"type": "string", "pattern": rf"^\s*{_SIZE.pattern}\s*$"}),
]

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""Lower-case letters, digits and inner hyphens, at most 40: names become file and socket names."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _Listen(_Model):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Listen = Annotated[
    _Listen,
    BeforeValidator(parse_listen),
    WithJsonSchema({"type": "string", "pattern": r"^.+:\d+$"}),
]


class EngineKind(StrEnum):
    """Which program serves the model."""

    NATIVE = "native"


class EngineRole(StrEnum):
    """What an engine of the topology is for. Primary and standby exchange roles at a failover."""

    PRIMARY = "primary"
    STANDBY = "standby"
    BATCH = "batch"


class Admin(_Model):
    """The admin API."""

    listen: Listen = _Listen(host="127.0.0.1", port=9400)
    """Loopback address of the admin HTTP API; port 0 takes any free one."""
    auth: Literal["default", "all"] = "default"
    """`all` asks for the bearer token also for health, metrics and status."""


class Gateway(_Model):
    """The data plane: the one address that clients know."""

    listen: Listen = _Listen(host="127.0.0.1", port=8000)
    """Address of the OpenAI API; port 0 takes any free one."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes that share the listening socket."""
    max_body: Bytes = 4 << 20
    """Largest request body; above it 413."""
    max_connections: Annotated[int, Field(ge=1)] = 10_000
    """Client connections per worker; above it new ones wait in the kernel's backlog."""
    max_parked: Annotated[int, Field(ge=1)] = 1024
    """Requests per worker that may wait for a primary before their first byte; above it 429."""
    park_timeout: Seconds = 30.0
    """How long a request waits for a primary before it is answered 503."""
    resume_deadline: Seconds = 60.0
    """How long a stream that has begun waits for a new primary before an error event ends it."""
    client_timeout: Seconds = 300.0
    """How long a client may take nothing of its stream before it is cut off."""


class Model(_Model):
    """The checkpoint."""

    path: Path
    """Folder in Hugging Face format: config, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in the arena; tensors of another floating type are converted on load."""
    quantization: Literal["none"] = "none"
    """Allow-list: only what the cache can share without losing meaning."""
    revision: str = ""
    """Free text that becomes part of the fingerprint."""


class CacheSettings(_Model):
    """The weight cache of the group's device."""

    mode: Literal["daemon", "client", "off"] = "daemon"
    """`daemon` starts one; `client` uses one that runs already; `off` loads per engine."""
    socket: Path | None = None
    """For `client`: the socket of the daemon that runs already."""
    on_mismatch: Literal["reload", "fail"] = "reload"
    """What to do when the daemon holds other weights than the topology names."""
    load_timeout: Seconds = 1800.0
    """Longest time that loading may take before the start fails."""


class Kv(_Model):
    """The KV arena of the serving pair."""

    slots: Annotated[int, Field(ge=1, le=1024)] = 16
    """Streams that decode at once."""
    max_length: Annotated[int, Field(ge=128, multiple_of=128)] = 2048
    """Tokens (prompt and answer) that one slot holds."""


class EngineKv(_Model):
    """An engine's own KV region (batch engines)."""

    slots: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Streams that decode at once; default: the group's."""
    max_length: Annotated[int, Field(ge=128, multiple_of=128)] | None = None
    """Tokens per slot; default: the group's."""


class Engine(_Model):
    """One engine of a group."""

    name: Name
    kind: EngineKind = EngineKind.NATIVE
    role: EngineRole
    """The role at the first start; later the supervisor decides."""
    kv: EngineKv = EngineKv()
    """Only for batch engines: their KV region is private and dies with them."""
    ballast: Bytes = 0
    """Private memory touched at start and never used: gives a small demo engine a realistic size,
    because the time the kernel needs to tear a process down grows with its memory."""


class Health(_Model):
    """How the engines of a group are watched."""

    interval: Seconds = 0.1
    """Time between two samples of progress and health."""
    hang_after: Seconds = 0.4
    """Work queued, no progress and not starved of CPU for this long: HUNG."""
    canary: Seconds = 2.0
    """Time between two known-answer checks of an engine."""
    start_timeout: Seconds = 120.0
    """From spawn to ready, without the time that the weights take to load."""


class Failover(_Model):
    """Limits of failing over by judgement, and how dead engines come back."""

    intensity: Annotated[int, Field(ge=1)] = 5
    """Failovers by judgement (HUNG) allowed within `period`."""
    period: Seconds = 600.0
    stable_after: Seconds = 5.0
    """An engine that lived this long is restarted at once; a younger one backs off."""
    max_backoff: Seconds = 30.0
    max_young_deaths: Annotated[int, Field(ge=1)] = 5
    """So many deaths in a row before `stable_after`: FATAL, until the operator restarts it."""
    adopt_grace: Seconds = 10.0
    """How long an adopted slot waits for its gateway before it is freed."""


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
    model: Model
    devices: Annotated[list[str], Field(min_length=1)] = ["cpu"]
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    cache: CacheSettings = CacheSettings()
    kv: Kv = Kv()
    engines: Annotated[list[Engine], Field(min_length=1)]
    health: Health = Health()
    failover: Failover = Failover()
    batch: Batch = Batch()
    max_queue: Annotated[int, Field(ge=0)] = 64
    """Requests that may wait for a slot in the primary; above it 429 with Retry-After."""


class Topology(_Model):
    """One file, one supervisor."""

    version: Literal[1]
    name: Name
    state_dir: Path
    """Folder for state, sockets and logs, mode 0700; created when missing."""
    admin: Admin = Admin()
    gateway: Gateway = Gateway()
    groups: Annotated[list[Group], Field(min_length=1)]
