"""Which tensors a model has, from its config alone: names, shapes, ties.

For the decoder families below the names in a checkpoint are the names in `model.state_dict()` of
the transformers class, no buffer is persistent, and every shape follows from a few numbers of the
config. The one exception are the experts of a mixture: the class holds them fused in two tensors
a layer, a checkpoint one by one; `parts` names them in the order in which they lie in memory.

So neither torch nor transformers is needed to lay out their arena, which saves a loader ten seconds
of imports; a test compares this table with the real classes. Other architectures are asked for
their skeleton (`cache.skeleton`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from cache.errors import UnsupportedModelError

__all__ = ["FAMILIES", "ModelTensors", "NamedShape", "tensors_of_family"]


@dataclass(frozen=True, slots=True)
class NamedShape:
    """One entry of a state dict."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["parameter", "buffer"] = "parameter"
    is_linear: bool = False
    """A matrix of a linear layer that may become FP8: no embedding, norm, head or router."""
    parts: tuple[str, ...] = ()
    """Checkpoint tensors of equal shape whose concatenation this is, unless it is stored whole."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each part: the rows are shared out evenly."""
        if not self.parts:
            return self.shape
        return (math.prod(self.shape[:-1]) // len(self.parts), self.shape[-1])


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Everything that a model's state dict holds, in its order.

    `ties` names pairs that share bytes unless the checkpoint holds both.
    """

    entries: tuple[NamedShape, ...]
    ties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    qkv_bias: bool | None  # None: the config's `attention_bias` decides
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    has_experts: bool = False
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden size / heads


FAMILIES: Final = {
    "LlamaForCausalLM": _Family(qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": _Family(qkv_bias=False, o_bias=False, mlp_bias=False, default_kv_heads=8),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, o_bias=False, mlp_bias=False, default_kv_heads=32),
    "Qwen3ForCausalLM": _Family(
        qkv_bias=None,
        o_bias=None,
        mlp_bias=False,
        qk_norm=True,
        default_kv_heads=32,
        default_head_dim=128,
    ),
    "Qwen3MoeForCausalLM": _Family(
        qkv_bias=None,
        o_bias=None,
        mlp_bias=False,
        qk_norm=True,
        has_experts=True,
        default_kv_heads=4,
    ),
}


def tensors_of_family(architecture: str, config: dict[str, Any]) -> ModelTensors | None:
    """The state dict of a known family, or None for an architecture that is not in the table.

    Raises:
        UnsupportedModelError: the config lacks a number, or holds one that makes no sense.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        return None
    vocab, hidden = _number(config, "vocab_size"), _number(config, "hidden_size")
    entries = [NamedShape("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(_number(config, "num_hidden_layers")):
        entries += _layer(f"model.layers.{layer}", layer, family, config)
    entries.append(NamedShape("model.norm.weight", (hidden,)))
    entries.append(NamedShape("lm_head.weight", (vocab, hidden)))
    tied = bool(config.get("tie_word_embeddings", False))  # the default of all classes
    ties = (("lm_head.weight", "model.embed_tokens.weight"),) if tied else ()
    return ModelTensors(tuple(entries), ties)


def _layer(
    prefix: str, layer: int, family: _Family, config: dict[str, Any]
) -> Iterator[NamedShape]:
    hidden = _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", family.default_kv_heads or heads)
    head_dim = _number(config, "head_dim", family.default_head_dim or hidden // heads)
    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    o_bias = attention_bias if family.o_bias is None else family.o_bias
    yield from _linears(
        prefix,
        ("self_attn.q_proj", heads * head_dim, hidden, qkv_bias),
        ("self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, heads * head_dim, o_bias),
    )
    if family.has_experts and _is_sparse(layer, config):
        yield from _experts(f"{prefix}.mlp", config)
    else:
        yield from _dense(prefix, family, config)
    if family.qk_norm:
        yield NamedShape(f"{prefix}.self_attn.q_norm.weight", (head_dim,))
        yield NamedShape(f"{prefix}.self_attn.k_norm.weight", (head_dim,))
    yield NamedShape(f"{prefix}.input_layernorm.weight", (hidden,))
    yield NamedShape(f"{prefix}.post_attention_layernorm.weight", (hidden,))


def _linears(prefix: str, *linears: tuple[str, int, int, bool]) -> Iterator[NamedShape]:
    for name, rows, columns, bias in linears:
        yield NamedShape(f"{prefix}.{name}.weight", (rows, columns), is_linear=True)
        if bias:
            yield NamedShape(f"{prefix}.{name}.bias", (rows,))


def _dense(prefix: str, family: _Family, config: dict[str, Any]) -> Iterator[NamedShape]:
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    bias = bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias
    return _linears(
        prefix,
        ("mlp.gate_proj", inner, hidden, bias),
        ("mlp.up_proj", inner, hidden, bias),
        ("mlp.down_proj", hidden, inner, bias),
    )


def _experts(prefix: str, config: dict[str, Any]) -> Iterator[NamedShape]:
    """Router and fused experts: gate above up in one matrix per expert, expert behind expert."""
    hidden, inner = _number(config, "hidden_size"), _number(config, "moe_intermediate_size", 768)
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    count = _number(config, key, 128)
    one_by_one = [f"{prefix}.experts.{expert}" for expert in range(count)]
    gates_and_ups = tuple(f"{e}.{n}_proj.weight" for e in one_by_one for n in ("gate", "up"))
    downs = tuple(f"{e}.down_proj.weight" for e in one_by_one)
    yield NamedShape(
        f"{prefix}.experts.gate_up_proj",
        (count, 2 * inner, hidden),
        is_linear=True,
        parts=gates_and_ups,
    )
    yield NamedShape(
        f"{prefix}.experts.down_proj", (count, hidden, inner), is_linear=True, parts=downs
    )
    yield NamedShape(f"{prefix}.gate.weight", (count, hidden))


def _is_sparse(layer: int, config: dict[str, Any]) -> bool:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UnsupportedModelError(f"the model's config has mlp_only_layers = {dense!r}")
    return layer not in dense and (layer + 1) % _number(config, "decoder_sparse_step", 1) == 0


def _number(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise UnsupportedModelError(f"the model's config has {key} = {value!r}")
    return value
