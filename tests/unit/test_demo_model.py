"""The demo model folder: shapes, size, tokenizer, chat template; all without importing torch."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "configs" / "models" / "demo"


def read_json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return read_json("config.json")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def header() -> dict[str, dict[str, Any]]:
    """The header of the weights: names, types, shapes and offsets."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        listed: dict[str, dict[str, Any]] = json.loads(file.read(header_bytes))
    listed.pop("__metadata__", None)
    return listed


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    shapes["model.norm.weight"] = [hidden]
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [hidden],
                "post_attention_layernorm": [hidden],
                "self_attn.q_proj": [queries, hidden],
                "self_attn.k_proj": [keys, hidden],
                "self_attn.v_proj": [keys, hidden],
                "self_attn.o_proj": [hidden, queries],
                "mlp.gate_proj": [inner, hidden],
                "mlp.up_proj": [inner, hidden],
                "mlp.down_proj": [hidden, inner],
            }.items()
        }
    return shapes


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    # The same whitespace settings as transformers uses.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text("utf-8"))
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_config_is_a_small_tied_llama_with_room_for_long_streams(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert (
        config["num_key_value_heads"] == 2
    )  # so that tensor parallelism of two has a KV head each
    assert config["max_position_embeddings"] >= 4096
    assert config["num_hidden_layers"] <= 5


def test_the_folder_stays_small() -> None:
    total_bytes = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert total_bytes < 10_000_000


def test_weights_are_float32_and_have_exactly_the_shapes_of_the_config(
    config: dict[str, Any], header: dict[str, dict[str, Any]]
) -> None:
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    assert {name: entry["shape"] for name, entry in header.items()} == expected_shapes(config)


def test_weights_fill_the_file_without_gaps(header: dict[str, dict[str, Any]]) -> None:
    file = FOLDER / "model.safetensors"
    with file.open("rb") as opened:
        (header_bytes,) = struct.unpack("<Q", opened.read(8))
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert 8 + header_bytes + spans[-1][1] == file.stat().st_size
    for entry in header.values():
        start, end = entry["data_offsets"]
        assert end - start == 4 * math.prod(entry["shape"])


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time there was a fox.",
        "Zürich, naïve café, ß, 東京, Привет, مرحبا",
        "emoji 😀👩‍🚀 and a combining é",
        "  two spaces,\ttab,\n\n  lines \r\n",
        "1234567890 + 0.5e-3 = ?",
        "\x00\x7f\ufffd",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_and_config_agree(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|end|>") == config["eos_token_id"]
    assert tokenizer.token_to_id("<|pad|>") == config["pad_token_id"]
    assert read_json("generation_config.json")["eos_token_id"] == config["eos_token_id"]
    assert read_json("tokenizer_config.json")["eos_token"] == "<|end|>"


@pytest.mark.parametrize("mark", ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"])
def test_each_mark_is_one_token(tokenizer: Tokenizer, mark: str) -> None:
    assert len(tokenizer.encode(mark).ids) == 1


def test_chat_template_writes_the_trained_format() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a storyteller."},
        {"role": "user", "content": " Hello \n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Count to 3."}]},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|system|>\nYou are a storyteller.<|end|>\n"
        "<|user|>\nHello<|end|>\n"
        "<|assistant|>\nHello!<|end|>\n"
        "<|user|>\nCount to 3.<|end|>\n"
        "<|assistant|>\n"
    )


def test_chat_template_reads_other_roles_as_the_nearest_known_one() -> None:
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "tool", "content": "42"}]
    assert render(messages, add_generation_prompt=False) == (
        "<|system|>\nBe kind.<|end|>\n<|user|>\n42<|end|>\n"
    )
