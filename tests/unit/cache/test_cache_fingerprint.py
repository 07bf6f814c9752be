"""The fingerprint and the allow-list."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache import fingerprint
from cache.checkpoint import Checkpoint, read_checkpoint
from cache.errors import (
    CheckpointMissingError,
    MissingTensorError,
    UnsupportedModelError,
    UnsupportedQuantizationError,
)
from cache.fingerprint import check_quantization, fingerprint_of
from cache.protocol import LoadSpec
from tests.harness.checkpoints import make_checkpoint, spec_for


def test_two_processes_would_compute_the_same(tmp_path: Path) -> None:
    spec = spec_for(make_checkpoint(tmp_path / "m"))
    assert fingerprint_of(spec) == fingerprint_of(spec)
    assert fingerprint_of(spec).differing(fingerprint_of(spec)) == []


def test_a_symbolic_link_names_the_same_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert fingerprint_of(spec_for(folder)) == fingerprint_of(spec_for(link))


def test_what_differs_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    base = fingerprint_of(spec_for(folder))
    other = fingerprint_of(spec_for(folder, dtype="bfloat16", revision="r2"))
    assert base.differing(other) == ["revision", "dtype"]
    make_checkpoint(folder, seed=2)
    assert base.differing(fingerprint_of(spec_for(folder))) == ["checkpoint_digest"]


def test_every_field_counts(tmp_path: Path) -> None:
    base = fingerprint_of(spec_for(make_checkpoint(tmp_path / "m")))
    for field in base.__struct_fields__:
        value = getattr(base, field)
        changed = value + 1 if isinstance(value, int) else value + "x"
        assert base.differing(msgspec.structs.replace(base, **{field: changed})) == [field]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose headers were read, once for each time."""
    found: list[Path] = []
    real = read_checkpoint

    def counting(path: Path) -> Checkpoint:
        found.append(path)
        return real(path)

    monkeypatch.setattr(fingerprint, "read_checkpoint", counting)
    return found


@pytest.fixture
def all_files_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if: the time of a file's last change is the kernel's to set."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -3_600_000_000_000)


@pytest.mark.usefixtures("all_files_are_old")
def test_headers_are_read_once_while_the_files_stay(tmp_path: Path, reads: list[Path]) -> None:
    spec = spec_for(make_checkpoint(tmp_path / "m", shards=2))
    first = fingerprint_of(spec)
    assert fingerprint_of(spec) == first
    assert len(reads) == 1


def test_files_that_have_just_changed_are_read_again(tmp_path: Path, reads: list[Path]) -> None:
    spec = spec_for(make_checkpoint(tmp_path / "m"))
    assert fingerprint_of(spec) == fingerprint_of(spec)
    assert len(reads) == 2


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    """Other bytes; the same length, and the same time of modification."""
    before, data = path.stat(), path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.usefixtures("all_files_are_old")
def test_no_change_of_a_file_is_overlooked(tmp_path: Path, reads: list[Path]) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    spec = spec_for(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    seen = {fingerprint_of(spec).checkpoint_digest}
    rewrite(folder / "config.json", b'"vocab_size": 40', b'"vocab_size": 41')
    seen.add(fingerprint_of(spec).checkpoint_digest)
    rewrite(shard, b'"format": "pt"', b'"format": "np"')
    seen.add(fingerprint_of(spec).checkpoint_digest)
    assert len(seen) == len(reads) == 3
    rewrite(folder / "model.safetensors.index.json", b"model.norm.weight", b"model.norm.height")
    with pytest.raises(MissingTensorError, match=r"model\.norm\.height"):
        fingerprint_of(spec)
    rewrite(folder / "model.safetensors.index.json", b"model.norm.height", b"model.norm.weight")
    assert fingerprint_of(spec).checkpoint_digest in seen
    shard.unlink()
    with pytest.raises(CheckpointMissingError, match="00002-of-00002"):
        fingerprint_of(spec)


QUANTISED: list[dict[str, Any]] = [
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "marlin"},
    {"quant_method": "compressed-tensors"},
    {"quant_method": "bitsandbytes"},
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"bits": 8},
]


@pytest.mark.parametrize("quant", QUANTISED)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_checkpoints_are_refused_by_name(
    tmp_path: Path, quant: dict[str, Any], key: str
) -> None:
    folder = make_checkpoint(tmp_path / "m", config={key: quant})
    with pytest.raises(UnsupportedQuantizationError) as caught:
        fingerprint_of(spec_for(folder))
    assert "allow-list" in str(caught.value)


def test_a_quantisation_that_only_the_spec_names_is_refused() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="awq"):
        check_quantization(LoadSpec("/m", quantization="awq"), {})


def test_an_empty_quantisation_entry_means_none() -> None:
    empties: list[dict[str, Any] | None] = [None, {}]
    for empty in empties:
        check_quantization(LoadSpec("/m"), {"quantization_config": empty})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"tp_size": 2}, "split"), ({"pp_size": 2}, "split"), ({"dtype": "int8"}, "dtype")],
)
def test_what_this_release_cannot_load_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = make_checkpoint(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=reason):
        fingerprint_of(spec_for(folder, **changes))


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [7]])
def test_a_config_without_an_architecture_is_refused(tmp_path: Path, value: object) -> None:
    folder = make_checkpoint(tmp_path / "m")
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    config["architectures"] = value
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(UnsupportedModelError, match="architecture"):
        fingerprint_of(spec_for(folder))
