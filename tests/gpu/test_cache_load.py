"""Loading on a real card: FP8 and fused experts bit for bit as on the CPU."""

from pathlib import Path

import pytest
import torch

from cache.blocks import scale_name
from cache.devicetensor import tensor_at_device
from cache.errors import CheckpointCorruptError
from cache.fp8 import dequantise_blocks, quantise_blocks
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

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (300, 517), (4096, 1024)])
def test_the_card_quantises_as_the_cpu_does(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    values, scale = quantise_blocks(weight)
    ours, ours_scale = quantise_blocks(weight.cuda())
    assert same(ours.cpu(), values)
    assert same(ours_scale.cpu(), scale)


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", ["none", "fp8_block"])
def test_a_load_to_the_card_equals_one_to_the_host(
    tmp_path: Path, config: dict[str, object], stored: torch.dtype, quantization: str
) -> None:
    folder = write(tmp_path / "m", config, tensors_for(config, stored))
    host = Loaded(folder, "cpu", quantization=quantization, dtype="bfloat16")
    card = Loaded(folder, DEVICE, quantization=quantization, dtype="bfloat16")
    assert host.entries.keys() == card.entries.keys()
    assert all(same(host[name], card[name]) for name in host.entries)


def test_a_quantised_mixture_is_fused_on_the_card(tmp_path: Path) -> None:
    tensors = tensors_for(MIXTURE, torch.bfloat16)
    config = {**MIXTURE, "quantization_config": FP8_CONFIG}
    folder = write(tmp_path / "m", config, prequantised(tensors, torch.bfloat16))
    loaded = Loaded(folder, DEVICE, quantization="fp8_block", dtype="bfloat16")
    for name, reference in fused(tensors, 0).items():
        each = [quantise_blocks(matrix) for matrix in reference]
        assert same(loaded[name], torch.stack([values for values, _ in each]))
        scales = torch.stack([scale for _, scale in each])
        assert same(loaded[scale_name(name)], scales.to(torch.bfloat16).to(torch.float32))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = tensors_for(DENSE)
    tensors["model.layers.0.mlp.up_proj.weight"][5, 6] = float("inf")
    folder = write(tmp_path / "m", DENSE, tensors)
    with pytest.raises(CheckpointCorruptError, match="not finite"):
        Loaded(folder, DEVICE, quantization="fp8_block")


def test_the_block_scaled_product_reads_the_arena(tmp_path: Path) -> None:
    """What an FP8 engine does with what the loader wrote, against float32."""
    # The product reads scales in groups of four: inputs are a multiple of 512 here.
    config = {**DENSE, "hidden_size": 512, "intermediate_size": 384}
    tensors = tensors_for(config, torch.bfloat16)
    folder = write(tmp_path / "m", config, tensors)
    loaded = Loaded(folder, DEVICE, quantization="fp8_block", dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    assert name in linears_of(tensors)
    entry, scale_entry = loaded.entries[name], loaded.entries[scale_name(name)]
    address = loaded.mapping.address

    def at(found: object, dtype: torch.dtype) -> torch.Tensor:
        where = address + found.offset_bytes  # type: ignore[attr-defined]
        shape, size = found.shape, found.size_bytes  # type: ignore[attr-defined]
        return tensor_at_device(where, size, dtype, 0).view(shape)

    weight, scale = at(entry, torch.float8_e4m3fn), at(scale_entry, torch.float32)
    inputs = torch.randn(16, weight.shape[1], device="cuda")
    blocks = inputs.view(16, -1, 128)
    input_scale = blocks.abs().amax(-1) / 448
    quantised = (blocks / input_scale[..., None]).view_as(inputs).to(torch.float8_e4m3fn)
    product = torch._scaled_mm(
        quantised, weight.t(), out_dtype=torch.bfloat16,
        scale_a=input_scale.t().contiguous().t(), scale_b=scale.t(),
    )  # fmt: skip
    exact = inputs @ tensors[name].to("cuda", torch.float32).t()
    assert float((product - exact).norm() / exact.norm()) < 0.06
    ours = inputs @ dequantise_blocks(weight, scale).t()
    assert float((ours - exact).norm() / exact.norm()) < 0.03
