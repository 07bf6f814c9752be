"""Checkpoints of real shapes with random weights, made in seconds where they are measured.

A stream of such a model says nothing, but its steps cost what those of a trained one cost, and it
is as deterministic. The tokenizer has one word for each token id, so that every token is visible
text at a client.

Values come from one random buffer whose length is a prime, so that no two rows of a matrix are
equal (equal rows of the output layer would be ties). Norms are ones.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from cache.families import NamedShape, tensors_of_family

__all__ = ["MODELS", "make_checkpoint", "model_bytes"]

_BUFFER_VALUES: Final = 33_554_393  # a prime
_SHARD_BYTES: Final = 4 << 30
_BLOCK: Final = 128
_THREADS: Final = 8

_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}
_FP8: Final[dict[str, Any]] = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
}
_QWEN3_MOE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}

MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-70b-fp8": {
        **_LLAMA,
        **_FP8,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-235b-fp8-4-layers": {**_QWEN3_MOE, **_FP8, "num_hidden_layers": 4},
    "qwen3-235b-4-layers": {**_QWEN3_MOE, "num_hidden_layers": 4},
}
"""Shapes that can be made; a test may ask for others."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """One tensor of the file to be."""

    name: str
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        count = {"BF16": 2, "F8_E4M3": 1, "F32": 4}[self.dtype]
        for length in self.shape:
            count *= length
        return count


def model_bytes(config: Mapping[str, Any]) -> int:
    """Size of the weights."""
    return sum(tensor.size_bytes for tensor in _plan(config))


def make_checkpoint(folder: Path, config: Mapping[str, Any], *, seed: int = 1) -> Path:
    """Write a whole model folder; one that is complete and of this shape is left as it is."""
    full = {"dtype": "bfloat16", "hidden_act": "silu", "use_cache": True, **config}
    text = json.dumps(full, indent=1)
    done = folder / ".complete"
    if done.exists():
        if (folder / "config.json").read_text("utf-8") == text:
            return folder
        shutil.rmtree(folder)  # of a rehearsal, with fewer layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, "utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}', "utf-8")
    _write_tokenizer(folder, int(config["vocab_size"]))
    _write_weights(folder, list(_plan(config)), seed)
    done.touch()
    return folder


def _plan(config: Mapping[str, Any]) -> Iterator[_Planned]:
    is_quantised = "quantization_config" in config
    found = tensors_of_family(config["architectures"][0], dict(config))
    assert found is not None  # noqa: S101 - the shapes above are of known families
    for entry in found.entries:
        for name, shape in _parts(entry):
            if not (is_quantised and entry.is_linear):
                yield _Planned(name, "BF16", shape)
                continue
            yield _Planned(name, "F8_E4M3", shape)
            blocks = tuple(-(-length // _BLOCK) for length in shape)
            yield _Planned(f"{name}_scale_inv", "F32", blocks)


def _parts(entry: NamedShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Checkpoints hold experts one by one, though the arena has them fused."""
    if not entry.parts:
        yield entry.name, entry.shape
        return
    experts, rows, columns = entry.shape
    rows = rows * experts // len(entry.parts)
    for name in entry.parts:
        yield name, (rows, columns)


class _Source:
    """Random bytes of each dtype, endlessly."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        values = torch.randn(_BUFFER_VALUES, generator=made)
        self._bytes = {
            "BF16": _bytes_of((values * 0.02).to(torch.bfloat16)),
            # Fills the range that block scales leave to E4M3.
            "F8_E4M3": _bytes_of((values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)),
            "F32": _bytes_of(torch.full((1 << 20,), 0.02 / 100)),
            "ones": _bytes_of(torch.ones(1 << 20, dtype=torch.bfloat16)),
        }
        self._random = random.Random(seed)  # noqa: S311 - weights, not secrets

    def pieces(self, tensor: _Planned) -> Iterator[memoryview]:
        """Bytes of one tensor, from a random place of the buffer on."""
        is_norm = tensor.dtype == "BF16" and len(tensor.shape) == 1
        whole = self._bytes["ones" if is_norm else tensor.dtype]
        at = 0 if is_norm else self._random.randrange(len(whole) // 4) * 4
        left = tensor.size_bytes
        while left:
            piece = whole[at : at + left]
            yield piece
            left -= len(piece)
            at = 0


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def _write_weights(folder: Path, tensors: list[_Planned], seed: int) -> None:
    shards: list[list[_Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if size and size + tensor.size_bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size_bytes
    source = _Source(seed)
    index: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = []
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            index |= {tensor.name: name for tensor in shard}
            pieces = [list(source.pieces(tensor)) for tensor in shard]
            jobs.append(pool.submit(_write_shard, folder / name, shard, pieces))
        for job in jobs:
            job.result()
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")


def _write_shard(path: Path, tensors: list[_Planned], pieces: list[list[memoryview]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size_bytes],
        }
        at += tensor.size_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for parts in pieces:
            for part in parts:
                _write_all(file.fileno(), part)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        # As those of the models whose shapes these are: text is a table of bytes.
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
