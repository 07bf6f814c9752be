"""Checkpoints in block-wise FP8 and with experts, and what a load makes of them. Imports torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cache.blocks import scale_name
from cache.client import AttachedWeights, load_private
from cache.cudamapping import CudaMapping
from cache.families import tensors_of_family
from cache.fp8 import dequantise_blocks, quantise_blocks
from cache.protocol import TensorEntry
from tests.harness.checkpoints import TINY_CONFIG, spec_for, write_safetensors

if TYPE_CHECKING:
    from cache.arena import ArenaMapping

__all__ = [
    "DENSE",
    "FP8_CONFIG",
    "MIXTURE",
    "Loaded",
    "fused",
    "linears_of",
    "prequantised",
    "same",
    "tensors_for",
    "write",
]

DENSE: dict[str, Any] = {
    **TINY_CONFIG,
    "hidden_size": 256,
    "intermediate_size": 320,  # the last blocks are smaller
    "head_dim": 48,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}


def tensors_for(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Random tensors under the names of a checkpoint."""
    generator = torch.Generator().manual_seed(5)
    model = tensors_of_family(config["architectures"][0], config)
    assert model is not None
    return {
        name: (torch.randn(entry.part_shape, generator=generator) * 0.05).to(dtype)
        for entry in model.entries
        for name in entry.parts or (entry.name,)
    }


def linears_of(tensors: dict[str, Any]) -> list[str]:
    """Names of those that may become FP8."""
    skip = ("norm", "embed_tokens", "lm_head", "mlp.gate.")
    return [name for name in tensors if not any(word in name for word in skip)]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A model folder of one file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(
        folder / "model.safetensors",
        [
            (name, _NAMES[t.dtype], tuple(t.shape), bytes(t.contiguous().view(torch.uint8).numpy()))
            for name, t in tensors.items()
        ],
    )
    return folder


def prequantised(tensors: dict[str, Any], scale_dtype: torch.dtype) -> dict[str, Any]:
    """The same checkpoint as its maker would have quantised it."""
    found = dict(tensors)
    for name in linears_of(tensors):
        found[name], scale = quantise_blocks(tensors[name])
        found[scale_name(name)] = scale.to(scale_dtype)
    return found


class Loaded:
    """A private load, its tensors by name."""

    def __init__(self, folder: Path, device: str, **changes: Any) -> None:
        self.weights: AttachedWeights = load_private(spec_for(folder, device=device, **changes))
        self.mapping: ArenaMapping = self.weights.map()
        self.entries = {entry.name: entry for entry in self.weights.manifest.tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        raw = torch.frombuffer(bytearray(self._bytes(entry)), dtype=getattr(torch, entry.dtype))
        return raw.view(entry.shape)

    def _bytes(self, entry: TensorEntry) -> bytes:
        if isinstance(self.mapping, CudaMapping):
            return self.mapping.copy_out(entry.offset_bytes, entry.size_bytes)
        end = entry.offset_bytes + entry.size_bytes
        return bytes(self.mapping.view()[entry.offset_bytes : end])

    def weight(self, name: str) -> torch.Tensor:
        """In float32, whatever it is stored as."""
        if self[name].dtype == torch.float8_e4m3fn:
            return dequantise_blocks(self[name], self[scale_name(name)])
        return self[name].to(torch.float32)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, FP8 and NaN included."""
    return ours.dtype == theirs.dtype and torch.equal(
        ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    )


def fused(tensors: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    """The fused experts of a layer, in float32."""
    prefix = f"model.layers.{layer}.mlp.experts"
    experts = range(MIXTURE["num_experts"])

    def of(name: str, expert: int) -> torch.Tensor:
        found: torch.Tensor = tensors[f"{prefix}.{expert}.{name}_proj.weight"]
        return found.to(torch.float32)

    return {
        f"{prefix}.gate_up_proj": torch.stack(
            [torch.cat([of("gate", e), of("up", e)]) for e in experts]
        ),
        f"{prefix}.down_proj": torch.stack([of("down", e) for e in experts]),
    }
