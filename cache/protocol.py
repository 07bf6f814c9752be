"""The cache protocol: what daemon, loader, engines and supervisor say to each other.

Transport: `cache.rpc` / `cache.wire` frames at a stable socket path. `hello` comes first; the
open connection is the registration of an engine, end of file ends it.

verb      from         parameters -> result (descriptors)
hello     all          Hello -> HelloReply
status    all          - -> CacheStatus
load      supervisor   Load -> CacheStatus         starts a loader; idempotent for one fingerprint
attach    all          Attach -> Attached (weight extents)   waits while loading
publish   loader       Manifest -> Published (weight extents, writable)
progress  loader       Progress -> null
commit    loader       Commit -> null              checks, seals, serves
abort     loader       Abort -> null               frees what was taken
kv.open   all          KvOpen -> KvOpened (KV extents, then the slot table)
donate    any holder   Donate -> CacheStatus (weights, then KV extents, then slot table)
scrub     supervisor   - -> Scrubbed
drop      supervisor   - -> null                   refused while engines are attached

Event `progress` (Progress) goes to every client while loading; `state` (CacheStatus) at changes.

WARNING: descriptors of KV extents are read-write (mprotect to read-write needs it): KV is protected
by the mapping alone, against bugs and not against hostile engines. Weights are sealed, and their
descriptors read-only from `commit` on.

Handlers of one connection run one after another: a `scrub` or a waiting `attach` delays what is
sent behind it on the same connection, and nothing else.
"""

from typing import Final, Literal

import msgspec

from cache.errors import ErrorBody

__all__ = [
    "LAYOUT_VERSION",
    "PROTOCOL",
    "TENSOR_ALIGNMENT_BYTES",
    "VERSION",
    "Abort",
    "Attach",
    "Attached",
    "CacheState",
    "CacheStatus",
    "Client",
    "Commit",
    "Donate",
    "Fingerprint",
    "HelloReply",
    "KvGeometry",
    "KvOpen",
    "KvOpened",
    "Load",
    "LoadSpec",
    "Manifest",
    "Progress",
    "Published",
    "Scrubbed",
    "TensorEntry",
    "dtype_bytes",
]

PROTOCOL: Final = "understudy-cache"
VERSION: Final = 1
LAYOUT_VERSION: Final = 1
"""Version of the arena layout (order, alignment); part of the fingerprint."""
TENSOR_ALIGNMENT_BYTES: Final = 256

_DTYPE_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

CacheState = Literal["empty", "loading", "serving", "failed", "fenced"]
"""`fenced`: a scrub found bytes that differ from their checksum; nothing attaches any more."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a torch dtype name such as `bfloat16`."""
    return _DTYPE_BYTES[dtype]


class LoadSpec(msgspec.Struct, frozen=True):
    """What to load: the wish, as a topology states it. Everything else follows from the files."""

    model_path: str  # absolute
    dtype: str = "float32"
    quantization: str = "none"
    revision: str = ""
    device: str = "cpu"
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    ep_size: int = 1


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that decides the bytes of the arena, and the environment that may read them."""

    model_path: str
    model_arch: str
    revision: str
    checkpoint_digest: str  # over config, safetensors headers, sizes and mtimes
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int
    ep_size: int
    quant_method: str
    quant_config_hash: str
    dtype: str
    device_capability: str
    torch_version: str
    loader_version: int
    layout_version: int

    def differing(self, other: "Fingerprint") -> list[str]:
        """Names of the fields in which the two differ, in declaration order."""
        return [f for f in self.__struct_fields__ if getattr(self, f) != getattr(other, f)]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the arena."""

    name: str
    offset_bytes: int  # from the start of the arena; a multiple of TENSOR_ALIGNMENT_BYTES
    size_bytes: int
    shape: list[int]
    stride: list[int]  # in elements
    dtype: str  # torch name, such as "float32"
    kind: Literal["parameter", "buffer"]
    alias_of: str | None = None  # tied weights: same bytes as that tensor
    checksum: str = ""  # hex; empty until committed


class Manifest(msgspec.Struct, frozen=True):
    """The table of contents of a weight arena."""

    fingerprint: Fingerprint
    total_bytes: int
    extent_bytes: list[int]  # sizes in order; filled in by the daemon
    tensors: list[TensorEntry]
    checksum_algorithm: str = "blake2b-128"


class KvGeometry(msgspec.Struct, frozen=True):
    """Shape of a KV arena: `[layers, 2, slots, kv_heads, max_length, head_dim]`, contiguous."""

    layers: int
    slots: int
    kv_heads: int
    max_length: int  # tokens
    head_dim: int
    dtype: str

    @property
    def total_bytes(self) -> int:
        """Size of the whole arena."""
        return 2 * self.layers * self.slots * self.kv_heads * self.max_length * (
            self.head_dim * dtype_bytes(self.dtype)
        )  # fmt: skip


class Progress(msgspec.Struct, frozen=True):
    """How far loading is."""

    bytes_done: int
    bytes_total: int
    bytes_per_s: float = 0.0
    eta_s: float | None = None


class Client(msgspec.Struct, frozen=True):
    """One registered client."""

    instance: str
    role: str
    epoch: int


class CacheStatus(msgspec.Struct, frozen=True):
    """What the daemon holds."""

    state: CacheState
    instance: str
    pid: int
    device: str
    weights_bytes: int = 0
    kv_bytes: int = 0
    loads: int = 0  # completed loads from disk by this daemon
    donations: int = 0
    load_s: float | None = None
    attached: list[Client] = []
    progress: Progress | None = None
    fingerprint: Fingerprint | None = None
    kv: KvGeometry | None = None
    error: ErrorBody | None = None
    device_uuid: str = ""  # as nvidia-smi names it; empty on the CPU, and from an older daemon


class HelloReply(msgspec.Struct, frozen=True):
    """The daemon's answer to hello."""

    instance: str
    pid: int
    state: CacheState


class Load(msgspec.Struct, frozen=True):
    """Load this checkpoint (supervisor, or an engine in mode `daemon`)."""

    spec: LoadSpec


class Attach(msgspec.Struct, frozen=True):
    """Give me the weights.

    Waits while a loader runs, at most `timeout_s`. With `on_mismatch: reload` and nobody else
    attached, a daemon that holds other weights drops them and loads `spec`.
    """

    spec: LoadSpec
    fingerprint: Fingerprint
    timeout_s: float
    on_mismatch: Literal["reload", "fail"] = "fail"


class Attached(msgspec.Struct, frozen=True):
    """The weights: the manifest; the extents come beside it."""

    manifest: Manifest


class Published(msgspec.Struct, frozen=True):
    """Memory is there; the loader may map it and fill it."""

    extent_bytes: list[int]


class Commit(msgspec.Struct, frozen=True):
    """All bytes are in place; checksums by tensor name (aliases left out)."""

    checksums: dict[str, str]
    load_s: float


class Abort(msgspec.Struct, frozen=True):
    """Loading failed; the error is what clients that wait will get."""

    error: ErrorBody


class KvOpen(msgspec.Struct, frozen=True):
    """Give me the KV arena and slot table of the serving pair; created zero-filled when absent.

    Another geometry than the existing one is refused while engines are attached.
    """

    geometry: KvGeometry


class KvOpened(msgspec.Struct, frozen=True):
    """KV extents in order, then one slot-table descriptor."""

    geometry: KvGeometry
    extent_bytes: list[int]
    table_bytes: int


class Donate(msgspec.Struct, frozen=True):
    """Here is the memory of the daemon that died: serve it again, without touching the disk.

    Descriptors: weight extents, KV extents, slot table. The daemon checks seals, sizes and the
    manifest, and refuses what does not fit.
    """

    manifest: Manifest
    spec: LoadSpec
    kv: KvOpened | None = None


class Scrubbed(msgspec.Struct, frozen=True):
    """Result of re-computing every checksum."""

    checked_bytes: int
    mismatches: list[str]
    duration_s: float
