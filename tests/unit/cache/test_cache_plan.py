"""The plan of a load, and filling an arena by it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.checkpoint import Checkpoint, TensorSource, read_checkpoint
from cache.client import load_private
from cache.errors import (
    CheckpointCorruptError,
    CheckpointMissingError,
    MappingError,
    MissingTensorError,
    UnexpectedDtypeError,
    UnsupportedModelError,
)
from cache.families import ModelTensors, NamedShape, tensors_of_family
from cache.filling import fill
from cache.fingerprint import fingerprint_of
from cache.host import HostBackend
from cache.loader import plan_of
from cache.manifest import check_manifest, owned_tensors
from cache.plan import LoadPlan, plan_load
from cache.protocol import Fingerprint, LoadSpec, Progress
from tests.harness.checkpoints import TINY_CONFIG, make_checkpoint, spec_for

ANY_FINGERPRINT = Fingerprint(
    "/m", "LlamaForCausalLM", "", "d", 1, 0, 1, 0, 1, 1, "none", "", "float32", "cpu", "t", 1, 1
)


def plan_from(folder: Path, **changes: Any) -> LoadPlan:
    return plan_of(spec_for(folder, **changes), read_checkpoint(folder))


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
)
@settings(deadline=None)
def test_any_layout_passes_the_manifest_check(shapes: list[tuple[int, ...]], dtype: str) -> None:
    entries = tuple(NamedShape(f"t{i}", shape) for i, shape in enumerate(shapes))
    sources = {e.name: TensorSource(e.name, Path("f"), "float16", e.shape, 0, 0) for e in entries}
    checkpoint = Checkpoint(Path("m"), {}, b"", (), sources)
    plan = plan_load(LoadSpec("/m", dtype), ANY_FINGERPRINT, ModelTensors(entries), checkpoint)
    check_manifest(plan.manifest)
    assert [t.name for t in plan.manifest.tensors] == [e.name for e in entries]
    ordered = owned_tensors(plan.manifest)
    assert all(a.offset_bytes + a.size_bytes <= b.offset_bytes for a, b in pairwise(ordered))


def test_tied_weights_share_bytes(tmp_path: Path) -> None:
    manifest = plan_from(make_checkpoint(tmp_path / "m")).manifest
    by_name = {entry.name: entry for entry in manifest.tensors}
    head, embedding = by_name["lm_head.weight"], by_name["model.embed_tokens.weight"]
    assert head.alias_of == "model.embed_tokens.weight"
    assert (head.offset_bytes, head.shape) == (embedding.offset_bytes, embedding.shape)


def test_a_tie_whose_halves_are_both_stored_is_loaded_as_stored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", config={"tie_word_embeddings": False})
    config = folder / "config.json"
    config.write_text(config.read_text().replace("false", "true"))
    assert all(entry.alias_of is None for entry in plan_from(folder).manifest.tensors)


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    lacking = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    folder = make_checkpoint(tmp_path / "m", leave_out=lacking)
    with pytest.raises(MissingTensorError, match="lacks 2 of") as caught:
        plan_from(folder)
    assert set(caught.value.details["tensors"]) == set(lacking)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "m", config={"tie_word_embeddings": False}, leave_out=["lm_head.weight"]
    )
    with pytest.raises(MissingTensorError, match="lm_head"):
        plan_from(folder)


def test_a_shape_that_the_config_does_not_give_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 40', '"vocab_size": 41'))
    with pytest.raises(MissingTensorError, match=r"\[40, 16\].*\[41, 16\]"):
        plan_from(folder)


@pytest.mark.parametrize(("dtype", "word"), [("I64", "floating"), ("F8_E4M3", "not quantised")])
def test_dtypes_that_mean_something_else_are_refused(tmp_path: Path, dtype: str, word: str) -> None:
    folder = make_checkpoint(tmp_path / "m", other_dtype={"model.norm.weight": dtype})
    with pytest.raises(UnexpectedDtypeError, match=word):
        plan_from(folder)


@pytest.mark.parametrize(
    "change", [{"vocab_size": None}, {"hidden_size": "16"}, {"num_hidden_layers": -1}]
)
def test_a_config_without_its_numbers_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        tensors_of_family("LlamaForCausalLM", {**TINY_CONFIG, **change})


# ------------------------------------------------------------------- filling


def test_a_private_load_holds_the_file_s_bytes_and_cannot_be_written(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=3)
    weights = load_private(spec_for(folder))
    mapping = weights.map()
    view = mapping.view()
    sources = read_checkpoint(folder).tensors
    for entry in weights.manifest.tensors:
        source = sources[entry.alias_of or entry.name]
        data = source.file.read_bytes()
        wanted = data[source.offset_bytes : source.offset_bytes + source.size_bytes]
        assert bytes(view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]) == wanted
        assert len(entry.checksum) == 32
    with pytest.raises(MappingError, match="Permission denied"):
        HostBackend().map([weights.fds[0]], weights.manifest.extent_bytes, writable=True)
    mapping.close()
    weights.close()


class MemoryWriter:
    """Stands in for an arena: bytes in this process."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        self.data[offset_bytes : offset_bytes + len(data)] = data


def test_two_loads_give_the_same_bytes_whatever_the_number_of_threads(tmp_path: Path) -> None:
    plan = plan_from(make_checkpoint(tmp_path / "m", shards=2))
    results = []
    for threads in (1, 5):
        writer = MemoryWriter(plan.manifest.total_bytes)
        checksums = fill(plan, writer, threads=threads)
        results.append((bytes(writer.data), checksums))
    assert results[0] == results[1]
    assert results[0][1].keys() == {entry.name for entry in owned_tensors(plan.manifest)}


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    plan = plan_from(make_checkpoint(tmp_path / "m"))
    seen: list[Progress] = []
    fill(plan, MemoryWriter(plan.manifest.total_bytes), on_progress=seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total == plan.source_bytes


def test_a_file_that_shrinks_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    plan = plan_from(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointCorruptError, match="inside"):
        fill(plan, MemoryWriter(plan.manifest.total_bytes))


def test_a_file_that_vanishes_is_missing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    plan = plan_from(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointMissingError):
        fill(plan, MemoryWriter(plan.manifest.total_bytes))


def test_the_first_failure_ends_all_threads(tmp_path: Path) -> None:
    plan = plan_from(make_checkpoint(tmp_path / "m"))

    class Broken:
        def write(self, offset_bytes: int, data: memoryview) -> None:
            raise OSError(28, f"No space left on device for {len(data)} bytes at {offset_bytes}")

    with pytest.raises(OSError, match="No space left"):
        fill(plan, Broken())


def test_the_fingerprint_of_a_plan_is_the_client_s(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    assert plan_from(folder).manifest.fingerprint == fingerprint_of(spec_for(folder))
