"""Block-wise FP8 and fused experts, against a float32 reference, on host memory and on a device.

The device is a driver made of host memory here; `tests/gpu` repeats the load on a real one.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import deviceconvert
from cache.blocks import BLOCK, scale_name
from cache.errors import (
    CheckpointCorruptError,
    MissingTensorError,
    UnexpectedDtypeError,
    UnsupportedModelError,
    UnsupportedQuantizationError,
)
from cache.fingerprint import fingerprint_of
from cache.fp8 import FP8_MAX, dequantise_blocks, quantise_blocks
from tests.harness.checkpoints import spec_for
from tests.harness.fake_cuda import FakeDriver, installed, tensor_on_host
from tests.harness.quantised import (
    DENSE,
    FP8_CONFIG,
    MIXTURE,
    Loaded,
    fused,
    linears_of,
    prequantised,
    same,
    tensors_for,
    write,
)

# ------------------------------------------------------------------ the quantiser


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=40)
def test_every_weight_comes_back_within_half_a_step(
    rows: int, columns: int, exponent: int, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight *= 2.0**exponent
    values, scale = quantise_blocks(weight)
    assert values.shape == weight.shape
    assert scale.shape == (-(-rows // BLOCK), -(-columns // BLOCK))
    error = (dequantise_blocks(values, scale) - weight).abs()
    wide = dequantise_blocks(torch.ones_like(values, dtype=torch.float32), scale)
    # Three bits of mantissa: half a step is 2^-4 of the value; below 2^-6 steps are 2^-9.
    assert bool((error <= torch.maximum(weight.abs() * 2**-4, wide * 2**-10) * 1.001).all())


def test_the_largest_weight_of_a_block_becomes_the_largest_value() -> None:
    weight = torch.zeros(BLOCK, 2 * BLOCK)
    weight[3, 5], weight[7, BLOCK + 1] = -3.0, 1e-3
    values, scale = quantise_blocks(weight)
    assert float(values[3, 5]) == -FP8_MAX
    assert float(values[7, BLOCK + 1]) == FP8_MAX
    assert torch.allclose(dequantise_blocks(values, scale), weight)


def test_a_block_of_zeros_stays_zero_and_tiny_weights_do_not_divide_by_zero() -> None:
    for weight in (torch.zeros(4, 4), torch.full((4, 4), 1e-44)):
        values, scale = quantise_blocks(weight)
        assert bool(torch.isfinite(scale).all())
        assert bool((dequantise_blocks(values, scale) == 0).all())


def test_the_product_of_a_linear_layer_stays_close_to_float32() -> None:
    torch.manual_seed(3)
    weight, inputs = torch.randn(384, 512) * 0.02, torch.randn(16, 512)
    exact = inputs @ weight.t()
    ours = inputs @ dequantise_blocks(*quantise_blocks(weight)).t()
    assert float((ours - exact).norm() / exact.norm()) < 0.03


# ------------------------------------------------------------------ checkpoints


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(deviceconvert, "tensor_at_device", tensor_on_host)
    monkeypatch.setattr(
        deviceconvert.DeviceConverter, "on_stream", lambda _self, _stream: nullcontext()
    )
    with installed(FakeDriver()):
        yield request.param


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_online_quantisation_touches_linear_layers_only(
    tmp_path: Path, device: str, stored: torch.dtype
) -> None:
    tensors = tensors_for(DENSE, stored)
    folder = write(tmp_path / "m", DENSE, tensors)
    loaded = Loaded(folder, device, quantization="fp8_block", dtype="bfloat16")
    assert loaded.weights.manifest.fingerprint.quant_method == "fp8-block-online"
    linears = linears_of(tensors)
    assert len(linears) == 7
    for name, tensor in tensors.items():
        if name in linears:
            values, scale = quantise_blocks(tensor)
            assert same(loaded[name], values)
            assert same(loaded[scale_name(name)], scale)
        else:
            assert same(loaded[name], tensor.to(torch.bfloat16))
    assert loaded.entries.keys() == {*tensors, *(scale_name(name) for name in linears)}


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_a_quantised_checkpoint_is_loaded_as_it_is(
    tmp_path: Path, device: str, scales: torch.dtype
) -> None:
    tensors = prequantised(tensors_for(DENSE, torch.bfloat16), scales)
    left_out = "model.layers.0.self_attn.o_proj.weight"  # its maker chose not to quantise it
    tensors[left_out] = tensors_for(DENSE, torch.bfloat16)[left_out]
    del tensors[scale_name(left_out)]
    folder = write(tmp_path / "m", {**DENSE, "quantization_config": FP8_CONFIG}, tensors)
    loaded = Loaded(folder, device, quantization="fp8_block", dtype="bfloat16")
    assert loaded.weights.manifest.fingerprint.quant_method == "fp8-block"
    for name, tensor in tensors.items():
        is_scale = name.endswith("_scale_inv")
        assert same(loaded[name], tensor.to(torch.float32) if is_scale else tensor)


@pytest.mark.parametrize("quantization", ["none", "fp8_block", "stored"])
def test_experts_land_in_the_fused_tensors(tmp_path: Path, device: str, quantization: str) -> None:
    tensors = tensors_for(MIXTURE, torch.bfloat16)
    stored, config = tensors, MIXTURE
    if quantization == "stored":
        stored = prequantised(tensors, torch.float32)
        config = {**MIXTURE, "quantization_config": FP8_CONFIG}
    folder = write(tmp_path / "m", config, stored)
    wanted = "none" if quantization == "none" else "fp8_block"
    loaded = Loaded(folder, device, quantization=wanted, dtype="bfloat16")
    for name, reference in fused(tensors, 0).items():
        assert loaded[name].shape == reference.shape
        if quantization == "none":
            assert same(loaded[name], reference.to(torch.bfloat16))
            continue
        assert loaded[name].dtype == torch.float8_e4m3fn
        each = [quantise_blocks(matrix) for matrix in reference]
        assert same(loaded[name], torch.stack([values for values, _ in each]))
        assert same(loaded[scale_name(name)], torch.stack([scale for _, scale in each]))
    assert loaded["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16


def test_experts_that_are_stored_fused_are_taken_as_they_are(tmp_path: Path, device: str) -> None:
    tensors = tensors_for(MIXTURE, torch.bfloat16)
    whole = {name: value.to(torch.bfloat16) for name, value in fused(tensors, 0).items()}
    rest = {name: value for name, value in tensors.items() if ".experts." not in name}
    folder = write(tmp_path / "m", MIXTURE, {**rest, **whole})
    loaded = Loaded(folder, device, dtype="bfloat16")
    assert all(same(loaded[name], value) for name, value in whole.items())


# ------------------------------------------------------------------ what is refused


def test_experts_whose_blocks_would_overlap_are_refused(tmp_path: Path, device: str) -> None:
    config = {**MIXTURE, "moe_intermediate_size": 96}
    folder = write(tmp_path / "m", config, tensors_for(config))
    with pytest.raises(UnexpectedDtypeError, match="multiple of 128"):
        Loaded(folder, device, quantization="fp8_block")


def test_scales_must_be_there_and_fit(tmp_path: Path) -> None:
    config = {**DENSE, "quantization_config": FP8_CONFIG}
    name = scale_name("model.layers.0.mlp.up_proj.weight")
    tensors = prequantised(tensors_for(DENSE), torch.float32)
    wrong = {**tensors, name: torch.ones(1, 1)}
    folder = write(tmp_path / "wrong", config, wrong)
    with pytest.raises(MissingTensorError, match="blocks of 128"):
        Loaded(folder, "cpu", quantization="fp8_block")
    folder = write(tmp_path / "absent", config, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(MissingTensorError, match="scales are not there"):
        Loaded(folder, "cpu", quantization="fp8_block")


def test_a_norm_in_fp8_is_refused(tmp_path: Path) -> None:
    tensors = prequantised(tensors_for(DENSE), torch.float32)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    folder = write(tmp_path / "m", {**DENSE, "quantization_config": FP8_CONFIG}, tensors)
    with pytest.raises(UnexpectedDtypeError, match="linear layers"):
        Loaded(folder, "cpu", quantization="fp8_block")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, device: str) -> None:
    tensors = tensors_for(DENSE)
    tensors["model.layers.0.mlp.up_proj.weight"][5, 6] = float("nan")
    folder = write(tmp_path / "m", DENSE, tensors)
    with pytest.raises(CheckpointCorruptError, match="not finite"):
        Loaded(folder, device, quantization="fp8_block")


@pytest.mark.parametrize(
    ("quant", "wanted", "reason"),
    [
        (FP8_CONFIG, "none", "quantization: fp8_block"),
        ({**FP8_CONFIG, "weight_block_size": [64, 64]}, "fp8_block", "fp8-other"),
        ({**FP8_CONFIG, "activation_scheme": "static"}, "fp8_block", "fp8-other"),
        ({"quant_method": "fp8"}, "fp8_block", "fp8-per-tensor"),
        ({"quant_method": "awq"}, "fp8_block", "awq"),
        (None, "awq", "fp8_block"),
    ],
)
def test_other_quantisations_are_refused_before_any_memory_is_taken(
    tmp_path: Path, quant: dict[str, Any] | None, wanted: str, reason: str
) -> None:
    folder = write(tmp_path / "m", {**DENSE, "quantization_config": quant}, {})
    with pytest.raises(UnsupportedQuantizationError, match=reason):
        fingerprint_of(spec_for(folder, quantization=wanted))


def test_a_family_whose_linear_layers_are_not_known_is_not_quantised(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {**DENSE, "architectures": ["GemmaForCausalLM"]}, {})
    with pytest.raises(UnsupportedModelError, match="linear layers"):
        fingerprint_of(spec_for(folder, quantization="fp8_block"))
