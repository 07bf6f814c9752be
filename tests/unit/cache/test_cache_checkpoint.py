"""Reading headers: what is damaged, missing or dangerous is named, not loaded."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.checkpoint import read_checkpoint
from cache.errors import (
    CacheError,
    CheckpointCorruptError,
    CheckpointMissingError,
    MissingTensorError,
    UnexpectedDtypeError,
)
from tests.harness.checkpoints import make_checkpoint, write_safetensors


def model_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def with_header(folder: Path, header: object, body: bytes = b"") -> Path:
    make_checkpoint(folder)
    encoded = json.dumps(header).encode()
    model_file(folder).write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)
    return folder


def test_every_tensor_is_found_where_its_bytes_are(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    write_safetensors(model_file(folder), [("a", "F32", (2,), b"abcdefgh"), ("b", "U8", (), b"x")])
    tensors = read_checkpoint(folder).tensors
    data = model_file(folder).read_bytes()
    for name, wanted in (("a", b"abcdefgh"), ("b", b"x")):
        source = tensors[name]
        assert data[source.offset_bytes : source.offset_bytes + source.size_bytes] == wanted
    assert (tensors["a"].dtype, tensors["a"].shape) == ("float32", (2,))


def test_shards_are_read_together(tmp_path: Path) -> None:
    whole = read_checkpoint(make_checkpoint(tmp_path / "one"))
    parts = read_checkpoint(make_checkpoint(tmp_path / "three", shards=3))
    assert whole.tensors.keys() == parts.tensors.keys()
    assert len(parts.files) == 3


def test_the_digest_changes_with_any_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    first = read_checkpoint(folder).digest()
    assert read_checkpoint(folder).digest() == first
    shard = sorted(folder.glob("*.safetensors"))[1]
    info = shard.stat()
    os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    second = read_checkpoint(folder).digest()
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert len({first, second, read_checkpoint(folder).digest()}) == 3


@pytest.mark.parametrize("keep", [0, 7, 8, 50, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = make_checkpoint(tmp_path / "m")
    file = model_file(folder)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointCorruptError) as caught:
        read_checkpoint(folder)
    assert caught.value.details["file"] == str(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},  # too few bytes
        {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [100, 108]},  # behind the end
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "no", "data_offsets": [0, 8]},
        {"dtype": "F32"},
        [],
    ],
)
def test_an_entry_that_contradicts_the_file_is_corrupt(tmp_path: Path, entry: object) -> None:
    with pytest.raises(CheckpointCorruptError):
        read_checkpoint(with_header(tmp_path / "m", {"t": entry}, bytes(8)))


def test_an_unknown_dtype_is_an_error_of_its_own(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    with pytest.raises(UnexpectedDtypeError, match="F4"):
        read_checkpoint(with_header(tmp_path / "m", {"t": entry}, bytes(1)))


@given(noise=st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_noise_is_never_more_than_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    folder = make_checkpoint(tmp_path_factory.getbasetemp() / "noise")
    model_file(folder).write_bytes(struct.pack("<Q", len(noise)) + noise)
    try:
        found = read_checkpoint(folder)
    except CacheError:
        return
    assert not found.tensors  # an empty table of contents is legal, the plan will miss everything


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_weights(folder: Path) -> None:
    model_file(folder).unlink()


def pickle_instead(folder: Path) -> None:
    model_file(folder).rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize("harm", [remove_config, remove_weights, pickle_instead])
def test_what_is_not_there_is_missing(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = make_checkpoint(tmp_path / "m")
    harm(folder)
    with pytest.raises(CheckpointMissingError):
        read_checkpoint(folder)


def test_a_folder_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError):
        read_checkpoint(tmp_path / "nowhere")


def test_an_absent_shard_is_missing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(CheckpointMissingError):
        read_checkpoint(folder)


def change_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_names_more_than_its_shards_hold(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    shard = next(iter(folder.glob("*.safetensors"))).name
    change_index(folder, {"ghost.weight": shard})
    with pytest.raises(MissingTensorError, match=r"ghost\.weight"):
        read_checkpoint(folder)


def test_a_shard_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    for name in ("../other.safetensors", "/etc/passwd", "", ".."):
        change_index(folder, {"t": name})
        with pytest.raises(CheckpointCorruptError, match="no shard in this folder"):
            read_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_config_that_is_no_object_is_corrupt(tmp_path: Path, text: str) -> None:
    folder = make_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointCorruptError):
        read_checkpoint(folder)
