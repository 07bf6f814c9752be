"""Small models of every kind that the native engine runs on a GPU, loaded as engines load them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import MODELS, make_checkpoint
from cache.client import load_private
from cache.protocol import LoadSpec
from engines.native.binding import tensors_of
from engines.native.device import Device
from engines.native.model import SlotModel
from engines.native.skeleton import build_skeleton

DEVICE = Device("cuda:0")
_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**MODELS["llama-8b"], **_SMALL},
    "llama-fp8": {**MODELS["llama-70b-fp8"], **_SMALL},
    "moe": {**MODELS["qwen3-235b-4-layers"], **_SMALL, **_EXPERTS},
    "moe-fp8": {**MODELS["qwen3-235b-fp8-4-layers"], **_SMALL, **_EXPERTS},
}


def say(text: str) -> None:
    """Figures for whoever runs the tests with `-s`."""
    sys.stdout.write(f"\n{text}\n")


def spec_of(folder: Path, kind: str) -> LoadSpec:
    make_checkpoint(folder, KINDS[kind])
    quantization = "fp8_block" if "fp8" in kind else "none"
    return LoadSpec(str(folder), dtype="bfloat16", quantization=quantization, device="cuda:0")


@dataclass
class Loaded:
    """A model over slots, and its tensors; the mapping must outlive both."""

    kind: str
    spec: LoadSpec
    model: SlotModel
    tensors: dict[str, torch.Tensor]
    keep: tuple[Any, ...]


def load(folder: Path, kind: str, *, slots: int = 16, max_length: int = 2048) -> Loaded:
    spec = spec_of(folder, kind)
    DEVICE.prepare(spec.dtype)
    weights = load_private(spec)
    mapping = weights.map()
    arena = DEVICE.tensor_at(mapping.address, mapping.size_bytes, torch.uint8)
    tensors = tensors_of(weights.manifest, arena)
    skeleton = build_skeleton(spec)
    geometry = skeleton.kv_geometry(slots=slots, max_length=max_length)
    model = SlotModel(skeleton, tensors, geometry, DEVICE)
    return Loaded(kind, spec, model, tensors, (weights, mapping))
