"""Block-wise FP8 layers and fused experts against plain formulas, on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from cache.protocol import LoadSpec, Manifest, TensorEntry
from engines.native.binding import bind, tensors_of
from engines.native.errors import LeftOnMetaError, TensorMismatchError
from engines.native.experts import experts_mode, routed_experts
from engines.native.fp8 import Fp8Linear, dequantise, quantise_rows
from engines.native.memory import PrivateMemory
from engines.native.model import SlotModel
from engines.native.selfcheck import prove
from engines.native.skeleton import build_skeleton

E4M3 = torch.float8_e4m3fn
ROOT = Path(__file__).parents[3]


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-wise, as checkpoints have it."""
    rows, columns = weight.shape[-2:]
    blocks = weight.reshape(*weight.shape[:-2], rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax(dim=(-3, -1), keepdim=True) / 448.0
    narrow = (blocks / scale).reshape(weight.shape).to(E4M3)
    return narrow, scale.squeeze(-1).squeeze(-2)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_a_quantised_layer_is_close_to_the_layer() -> None:
    random = torch.Generator().manual_seed(1)
    linear = nn.Linear(256, 384, bias=True)
    narrow, scale = quantised(torch.randn(384, 256, generator=random))
    layer = Fp8Linear(linear)
    layer.weight = nn.Parameter(narrow, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    values = torch.randn(2, 3, 256, generator=random)
    wanted = values @ dequantise(narrow, scale, torch.float32).t() + linear.bias
    assert torch.allclose(layer(values), wanted, atol=1e-4)


def test_dequantising_undoes_quantising_but_for_rounding() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    narrow, scale = quantised(weight)
    assert scale.shape == (2, 3)
    assert relative(dequantise(narrow, scale, torch.float32), weight) < 0.04


def test_rows_are_quantised_by_themselves_and_zeros_stay_zeros() -> None:
    values = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    values[2] = 0.0
    narrow, scale = quantise_rows(values)
    back = narrow.float().view(5, 2, 128) * scale.unsqueeze(-1)
    assert relative(back.view(5, 256), values) < 0.04
    assert not narrow[2].float().any()
    assert scale.stride() == (1, 5)  # column by column
    alone, alone_scale = quantise_rows(values[4:])
    assert torch.equal(alone.float(), narrow[4:].float())
    assert torch.equal(alone_scale, scale[4:])


class Block(nn.Module):
    """The part of an experts module that the function reads."""

    def __init__(self, *, experts: int = 6, hidden: int = 128, inner: int = 128) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(4)
        self.gate_up_proj = nn.Parameter(
            torch.randn(experts, 2 * inner, hidden, generator=random) * 0.1, requires_grad=False
        )
        self.down_proj = nn.Parameter(
            torch.randn(experts, hidden, inner, generator=random) * 0.1, requires_grad=False
        )
        self.act_fn = nn.SiLU()


def routing(rows: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    scores = torch.rand(rows, experts, generator=random)
    shares, chosen = scores.topk(k, dim=-1)
    return chosen, shares / shares.sum(-1, keepdim=True)


def plain(block: Any, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> Any:
    out = torch.zeros_like(rows)
    for row in range(rows.shape[0]):
        for expert, share in zip(chosen[row].tolist(), shares[row], strict=True):
            gate, up = (block.gate_up_proj[expert] @ rows[row]).chunk(2)
            out[row] += share * (block.down_proj[expert] @ (block.act_fn(gate) * up))
    return out


@pytest.mark.parametrize("mode", ["dense", "grouped"])
def test_experts_are_the_sum_of_those_chosen(mode: Any) -> None:
    block = Block()
    rows = torch.randn(7, 128, generator=torch.Generator().manual_seed(6))
    chosen, shares = routing(7, 6, 2)
    wanted = plain(block, rows, chosen, shares)
    if mode == "grouped":  # the product exists for bfloat16
        block, rows, shares = block.bfloat16(), rows.bfloat16(), shares.bfloat16()
    with experts_mode(mode):
        assert relative(routed_experts(block, rows, chosen, shares), wanted) < 0.02


def test_quantised_experts_are_the_sum_of_those_chosen() -> None:
    block = Block()
    rows = torch.randn(7, 128, generator=torch.Generator().manual_seed(6))
    chosen, shares = routing(7, 6, 2)
    wanted = plain(block, rows, chosen, shares)
    for name in ("gate_up_proj", "down_proj"):
        narrow, scale = quantised(getattr(block, name))
        setattr(block, name, nn.Parameter(narrow, requires_grad=False))
        setattr(block, f"{name}_scale_inv", scale)
    assert relative(routed_experts(block, rows, chosen, shares), wanted) < 0.08


class Tiny(nn.Module):
    """As much of a model as binding needs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.model = nn.Module()
        self.model.proj = nn.Linear(256, 128, bias=False, device="meta")
        self.model.rotary_emb = Rotary(None)
        self.model.layers = nn.ModuleList()


class Rotary(nn.Module):
    def __init__(self, config: Any) -> None:  # noqa: ARG002 - as the library calls it
        super().__init__()


def test_binding_puts_a_quantised_layer_where_the_arena_has_scales() -> None:
    narrow, scale = quantised(torch.randn(128, 256, generator=torch.Generator().manual_seed(7)))
    made = Tiny()
    tensors = {"model.proj.weight": narrow, "model.proj.weight_scale_inv": scale}
    bind(made, tensors, torch.device("cpu"))
    assert isinstance(made.model.proj, Fp8Linear)
    assert made.model.proj.weight.data_ptr() == narrow.data_ptr()
    with pytest.raises(TensorMismatchError, match=r"model\.proj\.weight_scale_inv"):
        bind(Tiny(), {**tensors, "model.proj.weight_scale_inv": scale[:, :1]}, torch.device("cpu"))


def test_a_model_can_be_bound_again_and_what_is_absent_is_named() -> None:
    first, second = (
        {"model.proj.weight": torch.full((128, 256), value), "model.proj.bias": torch.zeros(128)}
        for value in (1.0, 2.0)
    )
    made = Tiny()
    made.model.proj = nn.Linear(256, 128, device="meta")
    for tensors in (first, second):
        bind(made, tensors, torch.device("cpu"))
        assert made.model.proj.weight.data_ptr() == tensors["model.proj.weight"].data_ptr()
        rows = torch.ones(1, 256)
        assert torch.equal(made.model.proj(rows), nn.functional.linear(rows, *tensors.values()))
    made = Tiny()
    made.model.proj = nn.Linear(256, 128, device="meta")
    with pytest.raises(LeftOnMetaError, match=r"model\.proj\.bias"):
        bind(made, {"model.proj.weight": first["model.proj.weight"]}, torch.device("cpu"))


def small_moe(folder: Path, **changes: Any) -> Any:
    """A folder with everything of a small model with experts but its weights; its configuration."""
    shutil.copytree(ROOT / "configs" / "models" / "demo", folder)
    shape = {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "norm_topk_prob": True, "architectures": ["Qwen3MoeForCausalLM"], **changes,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3_moe", **shape)
    config.save_pretrained(folder)
    return config


def test_a_model_with_experts_computes_what_the_library_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "moe"
    config = small_moe(folder)
    torch.manual_seed(1)
    made_by: Any = AutoModelForCausalLM
    reference = made_by.from_config(config, dtype=torch.float32, experts_implementation="eager")
    reference.eval()
    reference.save_pretrained(folder)
    tensors = {name: t.detach() for name, t in reference.state_dict().items()}
    made = build_skeleton(LoadSpec(str(folder)))
    model = SlotModel(made, tensors, made.kv_geometry(slots=2, max_length=128))
    assert model.has_experts
    prompt = [3, 500, 1999, 42, 8]
    with torch.inference_mode():
        kv = PrivateMemory(model.geometry).kv
        found = [model.prefill(kv, 1, prompt, start=0).array()[0]]
        found.append(model.decode(kv, [(1, 77, len(prompt))]).array()[1])
        wanted = reference(torch.tensor([[*prompt, 77]])).logits[0, -2:]
        assert float((torch.tensor(np.stack(found)) - wanted).abs().max()) < 1e-4
        assert prove(model).exact


def test_a_sample_of_layers_has_some_of_each_kind(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    small_moe(folder, num_hidden_layers=6, mlp_only_layers=[0, 1, 2])
    made = build_skeleton(LoadSpec(str(folder)))
    layers = list(made.model.model.layers)
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in made.model.state_dict().items()}
    model = SlotModel(made, tensors, made.kv_geometry(slots=2, max_length=128))
    for count, numbers in ((1, [0, 3]), (2, [0, 1, 3, 4])):
        with model.sample_layers(count):
            assert list(made.model.model.layers) == [layers[n] for n in numbers]
    assert list(made.model.model.layers) == layers


def test_a_tensor_that_lies_askew_is_refused_instead_of_read_wrongly() -> None:
    entry = TensorEntry("w", 2, 8, [2], [1], "float32", "parameter")
    manifest = Manifest(cast("Any", None), 64, [], [entry])  # who made it does not matter here
    with pytest.raises(TensorMismatchError, match="at byte 2"):
        tensors_of(manifest, torch.zeros(64, dtype=torch.uint8))
