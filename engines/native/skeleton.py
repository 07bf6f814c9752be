"""What a zygote prepares and every engine shares: configuration, tokenizer, model on `meta`.

Nothing here touches weights, opens an arena or computes: a zygote builds it once, and each fork
gets it for nothing. Code from a checkpoint is never run.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cache.checkpoint import read_checkpoint
from cache.errors import UnderstudyError, UnsupportedModelError
from cache.loader import plan_of
from cache.protocol import KvGeometry, LoadSpec
from engines.native import attention
from engines.native.binding import make_ready
from engines.native.text import Decoding, decoding_for
from engines.native.untyped import Untyped

__all__ = ["FAMILIES", "Skeleton", "build_skeleton"]

FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Decoders whose attention is plain causal attention over grouped heads."""

_GPU_HEAD_DIMS: Final = (16, 32, 64, 128, 256)
"""Widths that the decode kernel has tiles for."""

_FP8: Final = "fp8_block"
_FP8_BLOCK: Final = [128, 128]

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
    longest_token: int  # characters; looking through a vocabulary takes 0.1 s

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
    attention.register()
    if load.tp_size != 1 or load.pp_size != 1:
        raise UnsupportedModelError("one engine runs the whole model: set tensor_parallel to 1")
    path = load.model_path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the libraries raise anything for a broken file
        raise UnsupportedModelError(f"cannot read the configuration of {path}: {error}") from error
    _check_supported(config, load)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the libraries raise anything for a broken file
        raise UnsupportedModelError(f"cannot read the tokenizer of {path}: {error!r}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(f"{path} has no tokenizer.json", hint="convert its tokenizer")
    # The arena says what is quantised and `binding` puts the layers in: the library's own
    # quantiser must not look at it.
    config.__dict__.pop("quantization_config", None)
    if getattr(config, "num_experts", 0):
        # Ours is put in later; asking what the library could use might touch the GPU.
        config._experts_implementation = "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, load.dtype),
            attn_implementation=attention.NAME,
            trust_remote_code=False,
        )
    model.eval()
    planned: list[str] = []
    if load.quantization != "none":
        with suppress(UnderstudyError):  # files that cannot be loaded: who attaches will say so
            plan = plan_of(load, read_checkpoint(Path(path)))
            planned = [entry.name for entry in plan.manifest.tensors]
    make_ready(model, planned)
    return Skeleton(
        load=load,
        config=model.config,
        model=model,
        tokenizer=tokenizer,
        decoding=decoding_for(tokenizer.backend_tokenizer),
        eos_ids=_eos_ids(Path(path), config),
        longest_token=max(map(len, tokenizer.get_vocab())),
    )


def _check_supported(config: Untyped, load: LoadSpec) -> None:
    name = str(config.model_type)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {name!r} is not one of {', '.join(FAMILIES)}",
            hint="serve it with an engine of kind vllm or sglang",
        )
    _check_quantization(config, load)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(f"layers of type {sorted(kinds)} are not supported")
    if load.device != "cpu" and head_dim_of(config) not in _GPU_HEAD_DIMS:
        raise UnsupportedModelError(
            f"heads of {head_dim_of(config)} numbers are not supported on a GPU",
            hint=f"supported: {', '.join(map(str, _GPU_HEAD_DIMS))}",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _FIXED_ROPE:
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} makes a row depend on other rows' lengths",
            hint=f"supported: {', '.join(_FIXED_ROPE)}",
        )


def _check_quantization(config: Untyped, load: LoadSpec) -> None:
    """Unquantised everywhere; block-wise FP8 on a GPU. Nothing else, and nothing silently."""
    found = getattr(config, "quantization_config", None)
    if load.device == "cpu":
        if load.quantization != "none" or found:
            raise UnsupportedModelError(
                "on the CPU this engine runs unquantised checkpoints only",
                hint="quantization: none",
            )
        return
    if load.quantization not in ("none", _FP8):
        raise UnsupportedModelError(
            f"quantization {load.quantization!r} is not one of none, {_FP8}", hint="write none"
        )
    if not found:
        return
    settings = found if isinstance(found, dict) else found.to_dict()
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or list(block or []) != _FP8_BLOCK:
        raise UnsupportedModelError(
            f"a checkpoint quantised by {method!r} with blocks {block} cannot be computed with",
            hint="FP8 with 128 x 128 blocks is supported, and checkpoints that are not quantised",
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
