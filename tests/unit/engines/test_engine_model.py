"""The model core against the library's own forward pass, and what the self-check finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cache.errors import UnsupportedModelError
from cache.protocol import KvGeometry, LoadSpec
from engines.native.errors import LeftOnMetaError, TensorMismatchError
from engines.native.logits import HostLogits
from engines.native.model import SlotModel, attended_lengths
from engines.native.selfcheck import prove
from engines.native.skeleton import Skeleton, build_skeleton

FOLDER = Path(__file__).parents[3] / "configs" / "models" / "demo"
LOAD = LoadSpec(str(FOLDER))
SLOTS, MAX_LENGTH = 4, 256


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(FOLDER / "model.safetensors")
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    return found


@pytest.fixture(scope="module")
def skeleton() -> Skeleton:
    return build_skeleton(LOAD)


@pytest.fixture(scope="module")
def geometry(skeleton: Skeleton) -> KvGeometry:
    return skeleton.kv_geometry(slots=SLOTS, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def model(skeleton: Skeleton, weights: dict[str, torch.Tensor], geometry: KvGeometry) -> SlotModel:
    return SlotModel(skeleton, weights, geometry)


def greedy(model: SlotModel, prompt: list[int], *, slot: int, count: int) -> list[list[float]]:
    """Logits of a greedy stream in one slot, in serving shapes."""
    kv = private(model.geometry)
    rows = []
    for start in range(0, len(prompt), 64):
        logits = model.prefill(kv, slot, prompt[start : start + 64], start=start).array()[0]
    tokens = list(prompt)
    for _ in range(count):
        rows.append(logits.tolist())
        tokens.append(int(logits.argmax()))
        logits = model.decode(kv, [(slot, tokens[-1], len(tokens) - 1)]).array()[slot]
    return rows


def private(geometry: KvGeometry) -> Any:
    from engines.native.memory import PrivateMemory

    return PrivateMemory(geometry).kv


def test_serving_shapes_compute_what_the_library_computes(
    model: SlotModel, skeleton: Skeleton
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    prompt = skeleton.tokenizer("It was a dark and stormy night. " * 9).input_ids
    assert len(prompt) > 64
    rows = greedy(model, prompt, slot=2, count=20)
    tokens = prompt + [int(np.argmax(row)) for row in rows]
    expected = reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    assert float((torch.tensor(rows) - expected).abs().max()) < 1e-3
    assert expected.argmax(-1).tolist() == tokens[len(prompt) :]


def test_a_stream_is_the_same_in_every_slot(model: SlotModel) -> None:
    prompt = [5, 900, 77, 12] * 20
    assert greedy(model, prompt, slot=0, count=6) == greedy(model, prompt, slot=3, count=6)


def test_padding_and_inactive_rows_touch_no_slot(model: SlotModel) -> None:
    kv = private(model.geometry)
    model.prefill(kv, 1, [5, 6, 7], start=0)
    model.decode(kv, [(3, 9, 4)])
    used = kv.slots.abs().sum(dim=(0, 1, 3, 5)) > 0  # [slots, positions]
    wanted = torch.zeros(SLOTS, MAX_LENGTH, dtype=torch.bool)
    wanted[1, :3] = True
    wanted[3, 4] = True
    assert torch.equal(used, wanted)


def test_the_self_check_proves_one_thread(model: SlotModel) -> None:
    found = prove(model)
    assert found.exact
    assert not found.failures
    assert found.lengths[-1] == MAX_LENGTH
    assert set(found.lengths) <= set(attended_lengths(MAX_LENGTH))
    assert found.duration_ms < 1000


def test_the_self_check_sees_a_row_that_leaks_into_its_neighbours(
    model: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = model.decode

    def leaking(*arguments: Any, **options: Any) -> Any:
        logits = honest(*arguments, **options).array()
        return HostLogits(logits + logits.sum(axis=0, keepdims=True) * 1e-6)

    monkeypatch.setattr(model, "decode", leaking)
    found = prove(model)
    assert not found.exact
    assert "neighbours" in found.failures
    assert found.lengths == (MAX_LENGTH,)


def test_a_length_that_changes_bits_is_not_used(
    model: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = model.decode

    def off_at_128(*arguments: Any, **options: Any) -> Any:
        logits = honest(*arguments, **options).array()
        return HostLogits(logits + 1e-4 if options.get("attended_tokens") == 128 else logits)

    monkeypatch.setattr(model, "decode", off_at_128)
    found = prove(model)
    assert found.exact
    assert found.lengths == (MAX_LENGTH,)


def test_attended_lengths_end_at_the_slot() -> None:
    assert attended_lengths(2048) == (128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert attended_lengths(2000)[-1] == 2000
    assert attended_lengths(100) == (100,)


def test_what_is_left_without_memory_is_named(
    weights: dict[str, torch.Tensor], geometry: KvGeometry
) -> None:
    lacking = {k: v for k, v in weights.items() if "layers.3.mlp.up_proj" not in k}
    with pytest.raises(LeftOnMetaError, match=r"layers\.3\.mlp\.up_proj\.weight"):
        SlotModel(build_skeleton(LOAD), lacking, geometry)


def test_a_tensor_of_another_shape_is_refused(
    weights: dict[str, torch.Tensor], geometry: KvGeometry
) -> None:
    wrong = {**weights, "model.norm.weight": torch.zeros(7)}
    with pytest.raises(TensorMismatchError, match=r"model\.norm\.weight"):
        SlotModel(build_skeleton(LOAD), wrong, geometry)


def test_more_positions_than_the_model_has_are_refused(skeleton: Skeleton) -> None:
    with pytest.raises(UnsupportedModelError, match="4096 positions"):
        skeleton.kv_geometry(slots=1, max_length=5000)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "unquantised"),
    ],
)
def test_models_that_cannot_be_exact_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedModelError, match=problem):
        build_skeleton(LoadSpec(str(folder)))


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot read the configuration"):
        build_skeleton(msgspec.structs.replace(LOAD, model_path=str(tmp_path / "none")))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_compute_what_the_library_computes(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / family
    shutil.copytree(FOLDER, folder)
    config = AutoConfig.for_model(
        family, vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.inference_mode(mode=False):
        made_by: Any = AutoModelForCausalLM
        reference = made_by.from_config(config, dtype=torch.float32)
        reference.eval()
        reference.save_pretrained(folder)
        tensors = {name: t.detach() for name, t in reference.state_dict().items()}
    made = build_skeleton(LoadSpec(str(folder)))
    model = SlotModel(made, tensors, made.kv_geometry(slots=2, max_length=128))
    prompt = [3, 500, 1999, 42, 8]
    rows = greedy(model, prompt, slot=1, count=5)
    tokens = prompt + [int(np.argmax(row)) for row in rows]
    expected = reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    assert float((torch.tensor(rows) - expected).abs().max()) < 1e-4
    assert prove(model).exact
