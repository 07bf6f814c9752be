"""Which tensors a model has, from its config alone: names, shapes, ties.

For the decoder families below the names in a checkpoint are the names in `model.state_dict()` of
the transformers class, no buffer is persistent, and every shape follows from a few numbers of the
config. So neither torch nor transformers is needed to lay out their arena, which saves a loader
ten seconds of imports; a test compares this table with the real classes. Other architectures are
asked for their skeleton (`cache.skeleton`).
"""

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
        entries += _layer(f"model.layers.{layer}", family, config)
    entries.append(NamedShape("model.norm.weight", (hidden,)))
    entries.append(NamedShape("lm_head.weight", (vocab, hidden)))
    tied = bool(config.get("tie_word_embeddings", False))  # the default of all four classes
    ties = (("lm_head.weight", "model.embed_tokens.weight"),) if tied else ()
    return ModelTensors(tuple(entries), ties)


def _layer(prefix: str, family: _Family, config: dict[str, Any]) -> Iterator[NamedShape]:
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", family.default_kv_heads or heads)
    head_dim = _number(config, "head_dim", family.default_head_dim or hidden // heads)
    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    o_bias = attention_bias if family.o_bias is None else family.o_bias
    mlp_bias = bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias
    linears = (
        ("self_attn.q_proj", heads * head_dim, hidden, qkv_bias),
        ("self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, heads * head_dim, o_bias),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    )
    for name, rows, columns, bias in linears:
        yield NamedShape(f"{prefix}.{name}.weight", (rows, columns))
        if bias:
            yield NamedShape(f"{prefix}.{name}.bias", (rows,))
    if family.qk_norm:
        yield NamedShape(f"{prefix}.self_attn.q_norm.weight", (head_dim,))
        yield NamedShape(f"{prefix}.self_attn.k_norm.weight", (head_dim,))
    yield NamedShape(f"{prefix}.input_layernorm.weight", (hidden,))
    yield NamedShape(f"{prefix}.post_attention_layernorm.weight", (hidden,))


def _number(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise UnsupportedModelError(f"the model's config has {key} = {value!r}")
    return value
