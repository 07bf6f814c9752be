"""Tiny checkpoints written byte by byte: no torch, no transformers, a few kilobytes each."""

import json
import math
import random
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cache.families import tensors_of_family
from cache.protocol import LoadSpec

__all__ = ["TINY_CONFIG", "TensorData", "make_checkpoint", "spec_for", "write_safetensors"]

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}

TensorData = tuple[str, str, tuple[int, ...], bytes]
"""Name, safetensors dtype, shape, bytes."""

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}


def write_safetensors(file: Path, tensors: Iterable[TensorData]) -> None:
    """One file in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, dtype, shape, data in tensors:
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += data
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


def make_checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    dtype: str = "F32",
    seed: int = 1,
    shards: int = 1,
    leave_out: Iterable[str] = (),
    other_dtype: dict[str, str] | None = None,
) -> Path:
    """A model folder that loads; the arguments say what should be wrong with it."""
    folder.mkdir(parents=True, exist_ok=True)
    full = {**TINY_CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps(full))
    model = tensors_of_family(full["architectures"][0], full)
    assert model is not None
    tied = {one for one, _ in model.ties}
    draw = random.Random(seed)
    tensors: list[TensorData] = []
    for entry in model.entries:
        if entry.name in tied or entry.name in set(leave_out):
            continue
        for name in entry.parts or (entry.name,):
            kind = (other_dtype or {}).get(name, dtype)
            values = [draw.uniform(-1, 1) for _ in range(math.prod(entry.part_shape))]
            data = struct.pack(f"<{len(values)}f", *values)
            if kind != "F32":
                data = draw.randbytes(len(values) * _BYTES[kind])
            tensors.append((name, kind, entry.part_shape, data))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map: dict[str, str] = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / name, tensors[index::shards])
        weight_map |= {tensor[0]: name for tensor in tensors[index::shards]}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def spec_for(folder: Path, **changes: Any) -> LoadSpec:
    """A spec that loads this folder as it is."""
    return LoadSpec(str(folder), **changes)
