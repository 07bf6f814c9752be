"""How much memory a topology takes, from config.json and safetensors headers alone.

An estimate for `plan` and `check`, made before anything is started. Weights and KV are exact
(they are what the cache will allocate); what a process takes for itself is a measured constant.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache.blocks import BLOCK, FP8_BLOCK
from cache.protocol import TENSOR_ALIGNMENT_BYTES, KvGeometry, dtype_bytes
from supervisor.topology.checkpoint import Checkpoint, read_checkpoint
from supervisor.topology.schema import Engine, EngineRole, Group

__all__ = [
    "CACHE_DAEMON_BYTES",
    "COMMAND_BYTES",
    "ENGINE_BYTES",
    "GATEWAY_BYTES",
    "LOADER_BYTES",
    "SUPERVISOR_BYTES",
    "ZYGOTE_BYTES",
    "GroupMemory",
    "checkpoint_of",
    "estimate_group",
    "kv_geometry",
    "weights_bytes",
]

_MIB: Final = 1 << 20

ZYGOTE_BYTES: Final = 410 * _MIB
"""Single-threaded process with torch, transformers and the tokenizer imported (measured)."""
ENGINE_BYTES: Final = 150 * _MIB
"""What a fork of the zygote makes its own: touched pages, activations, sampling."""
LOADER_BYTES: Final = 500 * _MIB
"""Short-lived; gone before the first engine is ready."""
CACHE_DAEMON_BYTES: Final = 40 * _MIB
COMMAND_BYTES: Final = 60 * _MIB
"""The adapter of a server; what the server takes is its own business, and not known here."""
GATEWAY_BYTES: Final = 70 * _MIB
SUPERVISOR_BYTES: Final = 80 * _MIB


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Estimate for one group; None where config.json or the headers do not tell."""

    weights_bytes: int | None
    """One copy."""
    copies: int
    """1 with a cache; one per engine without."""
    kv_bytes: int | None
    """The arena of the serving pair."""
    private_kv_bytes: dict[str, int]
    """By name of the batch engine."""
    ballast_bytes: int
    processes_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything that is known, at its highest."""
        shared = (self.weights_bytes or 0) * self.copies + (self.kv_bytes or 0)
        private = sum(self.private_kv_bytes.values()) + self.ballast_bytes
        return shared + private + self.processes_bytes


def checkpoint_of(group: Group) -> Checkpoint:
    """The group's checkpoint as far as it is readable; empty where servers load their own."""
    if group.model is None or group.runs_commands:
        return Checkpoint(Path(), {}, (), ())
    return read_checkpoint(group.model.path)


def weights_bytes(checkpoint: Checkpoint, dtype: str, quantization: str = "none") -> int | None:
    """Size of the weight arena: floating tensors in `dtype`, each aligned.

    Linear layers that are quantised on load take one byte a weight, and four a block for scales.
    """
    if not checkpoint.tensors:
        return None
    total = 0
    is_online = quantization == FP8_BLOCK and not checkpoint.text_config("quantization_config")
    for tensor in checkpoint.tensors:
        width = dtype_bytes(dtype)
        size = tensor.elements * width if tensor.is_floating else tensor.size_bytes
        if is_online and tensor.is_floating and tensor.name.endswith("_proj.weight"):
            size = tensor.elements + tensor.elements // (BLOCK * BLOCK) * 4
        total += -(-size // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
    return total


def kv_geometry(
    checkpoint: Checkpoint, group: Group, engine: Engine | None = None
) -> KvGeometry | None:
    """The KV arena of the group, or the private one of a batch engine."""
    layers, heads = checkpoint.number("num_hidden_layers"), checkpoint.number("num_attention_heads")
    hidden = checkpoint.number("hidden_size")
    if layers is None or heads is None or group.model is None:
        return None
    head_dim = checkpoint.number("head_dim") or (hidden // heads if hidden else None)
    if head_dim is None:
        return None
    own = engine.kv if engine else None
    return KvGeometry(
        layers=layers,
        slots=(own.slots if own else None) or group.kv.slots,
        kv_heads=checkpoint.number("num_key_value_heads") or heads,
        max_length=(own.max_length if own else None) or group.kv.max_length,
        head_dim=head_dim,
        dtype=group.model.dtype,
    )


def estimate_group(group: Group, checkpoint: Checkpoint) -> GroupMemory:
    """What the group takes once it runs."""
    kv = kv_geometry(checkpoint, group)
    private: dict[str, int] = {}
    for engine in group.engines:
        geometry = kv_geometry(checkpoint, group, engine)
        if engine.role is EngineRole.BATCH and geometry:
            private[engine.name] = geometry.total_bytes
    if group.model is None or group.runs_commands:
        adapters_bytes = COMMAND_BYTES * len(group.engines)
        return GroupMemory(None, len(group.engines), None, {}, 0, adapters_bytes)
    uses_cache = group.cache.mode != "off"
    daemon_bytes = CACHE_DAEMON_BYTES if group.cache.mode == "daemon" else 0
    return GroupMemory(
        weights_bytes=weights_bytes(checkpoint, group.model.dtype, group.model.quantization),
        copies=1 if uses_cache else len(group.engines),
        kv_bytes=kv.total_bytes if kv else None,
        private_kv_bytes=private,
        ballast_bytes=sum(engine.ballast for engine in group.engines),
        processes_bytes=ZYGOTE_BYTES + daemon_bytes + ENGINE_BYTES * len(group.engines),
    )
