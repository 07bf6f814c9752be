"""The table of families against the real classes of transformers, and conversion against torch.

The only module here that imports torch and transformers.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from cache.client import load_private
from cache.families import FAMILIES, tensors_of_family
from cache.skeleton import tensors_of_skeleton
from tests.harness.checkpoints import TINY_CONFIG, make_checkpoint, spec_for

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False},
    {"head_dim": 8},
    {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    {"num_experts": 6, "moe_intermediate_size": 8, "mlp_only_layers": [1]},
    {"num_local_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 2},
]


CASES = [
    (architecture, variant)
    for architecture in sorted(FAMILIES)
    for variant in VARIANTS
    # Not every supported transformers version reads head_dim from a Qwen2 config.
    if not (architecture == "Qwen2ForCausalLM" and "head_dim" in variant)
]


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_the_table_agrees_with_transformers(
    tmp_path: Path, architecture: str, variant: dict[str, Any]
) -> None:
    config = {
        **TINY_CONFIG,
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        **variant,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = tensors_of_family(architecture, config)
    assert ours is not None
    real = tensors_of_skeleton(tmp_path, architecture)
    assert {e.name: (e.shape, e.kind) for e in ours.entries} == {
        e.name: (e.shape, e.kind) for e in real.entries
    }
    assert set(ours.ties) == set(real.ties)


def test_a_conversion_rounds_as_torch_does(tmp_path: Path) -> None:
    import torch

    folder = make_checkpoint(tmp_path / "m")
    exact, rounded = (
        load_private(spec_for(folder)),
        load_private(spec_for(folder, dtype="bfloat16")),
    )
    with_views = []
    for weights in (exact, rounded):
        mapping = weights.map()
        with_views.append((weights, mapping, mapping.view()))
    for left, right in zip(exact.manifest.tensors, rounded.manifest.tensors, strict=True):
        tensors = []
        for entry, (_, _, view) in zip((left, right), with_views, strict=True):
            data = bytearray(view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes])
            tensors.append(torch.frombuffer(data, dtype=getattr(torch, entry.dtype)))
        assert torch.equal(tensors[0].to(torch.bfloat16), tensors[1]), left.name
    for weights, mapping, _ in with_views:
        mapping.close()
        weights.close()


def test_an_architecture_outside_the_table_is_loaded_by_its_skeleton(tmp_path: Path) -> None:
    """A real class, saved by transformers itself, that `cache.families` does not know."""
    import torch
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own deprecations are not under test here
        config = transformers.PhiConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, tie_word_embeddings=False, dtype="float32",
        )  # fmt: skip
        torch.manual_seed(1)
        model = transformers.PhiForCausalLM(config)
        model.save_pretrained(tmp_path)
    weights = load_private(spec_for(tmp_path))
    mapping = weights.map()
    view = mapping.view()
    state = model.state_dict()
    assert {entry.name for entry in weights.manifest.tensors} == set(state)
    for entry in weights.manifest.tensors:
        data = bytearray(view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes])
        stored = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
        assert torch.equal(stored, state[entry.name]), entry.name
    mapping.close()
    weights.close()
