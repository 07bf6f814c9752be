"""Steps of the native engine on the card: right, bit-equal wherever a row sits, graph or not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.native.fp8 import dequantise, quantise_rows
from engines.native.kv import KvMemoryView
from engines.native.logits import Choice
from engines.native.selfcheck import prove
from tests.gpu.engine_models import DEVICE, KINDS, Loaded, load, say

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=list(KINDS))
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    with torch.inference_mode():
        yield load(tmp_path_factory.mktemp("model"), request.param)
    torch.cuda.empty_cache()


@pytest.fixture
def kv(loaded: Loaded) -> KvMemoryView:
    return KvMemoryView.private(loaded.model.geometry, device=DEVICE)


def fill(kv: KvMemoryView) -> None:
    kv.flat.uniform_(-1, 1, generator=torch.Generator("cuda:0").manual_seed(4))


def test_the_self_check_proves_every_kind(loaded: Loaded) -> None:
    """bf16, FP8, experts and FP8 experts: a stream depends on itself alone."""
    found = prove(loaded.model)
    say(f"{loaded.kind}: {found}, experts {loaded.model.decode_experts}")
    assert found.exact, found.failures
    assert found.lengths == (loaded.model.geometry.max_length,)


def plain_model(loaded: Loaded) -> Any:
    """The library's own model in float32, with the arena's weights dequantised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(loaded.spec.model_path)
    config.__dict__.pop("quantization_config", None)
    made: Any = AutoModelForCausalLM
    more = {"experts_implementation": "eager"} if loaded.model.has_experts else {}
    reference = made.from_config(config, dtype=torch.float32, **more)
    state = {}
    for name in reference.state_dict():
        tensor = loaded.tensors[name]
        scale = loaded.tensors.get(f"{name}_scale_inv")
        wide = tensor.float() if scale is None else dequantise(tensor, scale, torch.float32)
        state[name] = wide.cpu()
    reference.load_state_dict(state)
    return reference.eval()


def test_steps_compute_what_the_library_computes(loaded: Loaded, kv: KvMemoryView) -> None:
    model = loaded.model
    prompt = [(37 * i) % 4096 for i in range(1, 301)]  # two chunks
    chunk = model.chunk_tokens
    model.prefill(kv, 5, prompt[:chunk], start=0)
    found = [model.prefill(kv, 5, prompt[chunk:], start=chunk).array()[0].copy()]
    found.append(model.decode(kv, [(5, 77, len(prompt))]).array()[5].copy())
    with sdpa_kernel(SDPBackend.MATH):
        wanted = plain_model(loaded)(torch.tensor([[*prompt, 77]])).logits[0, -2:].numpy()
    for mine, theirs in zip(found, wanted, strict=True):
        difference = float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
        say(f"{loaded.kind}: relative difference {difference:.4f}")
        # Experts: a router that is near a tie chooses another one in bfloat16.
        is_rough = "fp8" in loaded.spec.quantization or loaded.model.has_experts
        assert difference < (0.1 if is_rough else 0.03)


def test_graphs_give_the_bits_of_eager_steps(loaded: Loaded, kv: KvMemoryView) -> None:
    model = loaded.model
    fill(kv)
    rows = [(slot, 100 + slot, 40 * slot + 3) for slot in range(16)]
    eager = model.decode(kv, rows, attended_tokens=2048).array().copy()
    chunk = list(range(200))
    first = model.prefill(kv, 9, chunk, start=256).array().copy()
    assert model.capture_once("decode", kv, 2048)
    assert model.capture_once("prefill", kv, 512)
    fill(kv)
    assert np.array_equal(model.decode(kv, rows, attended_tokens=2048).array(), eager)
    again = model.prefill(kv, 9, chunk, start=256)
    assert np.array_equal(again.array(), first)
    assert not model.capture_once("decode", kv, 2048)


def test_a_capture_is_given_up_without_a_trace(loaded: Loaded, kv: KvMemoryView) -> None:
    model = loaded.model
    fill(kv)
    rows = [(slot, 100 + slot, 40 * slot + 3) for slot in range(16)]
    eager = model.decode(kv, rows, attended_tokens=2048).array().copy()
    looks: list[None] = []

    def is_urgent() -> bool:
        looks.append(None)
        return len(looks) > 2  # the rehearsal's layer, the first of the capture: not the second

    with model.giving_way(once=is_urgent):
        model.capture_once("decode", kv, 2048)
    assert len(looks) == 3
    assert model.capture_once("decode", kv, 2048), "it can be made again"
    fill(kv)
    assert np.array_equal(model.decode(kv, rows, attended_tokens=2048).array(), eager)


def test_a_graph_that_is_garbage_ends_no_capture(loaded: Loaded, kv: KvMemoryView) -> None:
    """The driver gives a capture up when a graph is destroyed meanwhile."""
    old = torch.cuda.CUDAGraph()
    with torch.cuda.graph(old):
        torch.zeros(1, device="cuda:0")
    ring: list[object] = [old]
    ring.append(ring)
    held = [ring]
    del old, ring
    layers: list[None] = []

    def drop_it() -> bool:
        layers.append(None)
        if len(layers) == 2:  # the first is of the rehearsal
            held.clear()
        return False

    thresholds = gc.get_threshold()
    with loaded.model.giving_way(once=drop_it):
        gc.set_threshold(1)
        try:
            assert loaded.model.capture_once("decode", kv, 1024)
        finally:
            gc.set_threshold(*thresholds)
    assert not held


def test_a_row_reads_its_own_past_alone(loaded: Loaded, kv: KvMemoryView) -> None:
    """Not even what is not a number, behind its end or in other slots, reaches it."""
    fill(kv)
    rows = [(slot, 9, position) for slot, position in ((0, 0), (3, 255), (7, 256), (15, 2047))]
    wanted = loaded.model.decode(kv, rows).array()[[0, 3, 7, 15]].copy()
    for slot, _, position in rows:
        kv.slots[:, :, slot, :, position + 1 :] = float("nan")
    idle = [slot for slot in range(16) if slot not in (0, 3, 7, 15)]
    kv.slots[:, :, idle] = float("nan")
    assert np.array_equal(loaded.model.decode(kv, rows).array()[[0, 3, 7, 15]], wanted)


def test_capturing_and_idle_rows_write_to_the_tail_alone(loaded: Loaded, kv: KvMemoryView) -> None:
    fill(kv)
    before = kv.slots.clone()
    loaded.model.capture_once("decode", kv, 1024)
    loaded.model.decode(kv, []).array()
    DEVICE.synchronize()
    assert torch.equal(kv.slots, before)


def test_the_serving_graph_is_launched_once_before_anybody_needs_it(
    loaded: Loaded, kv: KvMemoryView
) -> None:
    fill(kv)
    before = kv.slots.clone()
    assert not loaded.model.launch_once(kv)
    assert loaded.model.capture_once("decode", kv, kv.geometry.max_length)
    assert loaded.model.launch_once(kv)
    assert not loaded.model.launch_once(kv)
    assert torch.equal(kv.slots, before)


def test_choices_follow_the_host(loaded: Loaded, kv: KvMemoryView) -> None:
    fill(kv)
    logits = loaded.model.decode(kv, [(slot, 7 + slot, 50) for slot in range(16)])
    values = logits.array()
    greedy = logits.choose([Choice(row) for row in range(16)])
    assert greedy == values.argmax(axis=-1).tolist()
    every: tuple[dict[str, Any], ...] = ({}, {"top_k": 40}, {"top_p": 0.9})
    for cuts in every:
        one = Choice(3, temperature=1.0, seed=5, nth=2, **cuts)
        others = [Choice(row, temperature=0.7, seed=row) for row in (0, 8)]
        assert logits.choose([one])[0] == logits.choose([others[0], one, others[1]])[1]


def test_rows_are_quantised_as_the_formula_says() -> None:
    values = torch.randn(37, 512, device="cuda:0", dtype=torch.bfloat16)
    values[4] = 0
    narrow, scale = quantise_rows(values)
    plain_narrow, plain_scale = quantise_rows(values.cpu())
    # The kernel's division may differ in the last bit, and with it a number between two E4M3.
    assert torch.allclose(scale.cpu(), plain_scale, rtol=1e-6)
    differing = (narrow.cpu().float() != plain_narrow.float()).float().mean()
    assert float(differing) < 0.01
    assert os.environ.get("TRITON_INTERPRET") is None
