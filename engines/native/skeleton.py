"""What a zygote prepares and every engine shares: configuration, tokenizer, model on `meta`.

Nothing here touches weights, opens an arena or computes: a zygote builds it once, and each fork
gets it for nothing. Code from a checkpoint is never run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cache.errors import UnsupportedModelError
from cache.protocol import KvGeometry, LoadSpec
from engines.native.attention import NAME, register
from engines.native.text import Decoding, decoding_for

__all__ = ["FAMILIES", "Skeleton", "build_skeleton"]

Untyped = Any
"""An object of the library, which carries no useful types."""

FAMILIES: Final = ("llama", "qwen2", "qwen3")
"""Dense decoders whose attention is plain causal attention over grouped heads."""

_FIXED_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on the position alone. `dynamic` and `longrope` look at the length
of the whole batch, so a row's bits would depend on its neighbours."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without weights, ready to be pointed at them."""

    load: LoadSpec
    config: Untyped
    model: Untyped  # on meta, in evaluation mode
    tokenizer: Untyped
    decoding: Decoding
    eos_ids: frozenset[int]

    def kv_geometry(self, *, slots: int, max_length: int) -> KvGeometry:
        """The KV arena this model needs.

        Raises:
            UnsupportedModelError: `max_length` is over what the model was made for.
        """
        limit = int(self.config.max_position_embeddings)
        if max_length > limit:
            raise UnsupportedModelError(
                f"kv.max_length {max_length} is over the model's {limit} positions",
                hint=f"set kv.max_length to {limit} or less",
            )
        return KvGeometry(
            layers=int(self.config.num_hidden_layers),
            slots=slots,
            kv_heads=int(self.config.num_key_value_heads),
            max_length=max_length,
            head_dim=head_dim_of(self.config),
            dtype=self.load.dtype,
        )


def head_dim_of(config: Untyped) -> int:
    """Width of one head; older configurations leave it to be worked out."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def build_skeleton(load: LoadSpec) -> Skeleton:
    """Read configuration and tokenizer, build the model on `meta`.

    Raises:
        UnsupportedModelError: the engine cannot run this model, or not exactly.
    """
    register()
    if load.device != "cpu":
        raise UnsupportedModelError(
            f"device {load.device!r} is not served by this engine", hint="use devices: [cpu]"
        )
    if load.tp_size != 1 or load.pp_size != 1:
        raise UnsupportedModelError("a CPU engine runs the whole model: set tensor_parallel to 1")
    path = load.model_path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"cannot read the configuration of {path}: {error}") from error
    _check_supported(config, load)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"cannot read the tokenizer of {path}: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(f"{path} has no tokenizer.json", hint="convert its tokenizer")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, load.dtype),
            attn_implementation=NAME,
            trust_remote_code=False,
        )
    model.eval()
    return Skeleton(
        load=load,
        config=model.config,
        model=model,
        tokenizer=tokenizer,
        decoding=decoding_for(tokenizer.backend_tokenizer),
        eos_ids=_eos_ids(Path(path), config),
    )


def _check_supported(config: Untyped, load: LoadSpec) -> None:
    name = str(config.model_type)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {name!r} is not one of {', '.join(FAMILIES)}",
            hint="serve it with an engine of kind vllm or sglang",
        )
    if load.quantization != "none" or getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            "on the CPU this engine runs unquantised checkpoints only", hint="quantization: none"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(f"layers of type {sorted(kinds)} are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _FIXED_ROPE:
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} makes a row depend on other rows' lengths",
            hint=f"supported: {', '.join(_FIXED_ROPE)}",
        )


def _eos_ids(path: Path, config: Untyped) -> frozenset[int]:
    """Ids that end a stream: from generation_config.json, else from the configuration."""
    found: Any = None
    file = path / "generation_config.json"
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
