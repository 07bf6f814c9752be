"""A manifest decides which addresses become tensors: each contradiction is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache.checkpoint import read_checkpoint
from cache.errors import ManifestError
from cache.loader import plan_of
from cache.manifest import check_checksums, check_manifest, completed, owned_tensors
from cache.protocol import Manifest
from tests.harness.checkpoints import make_checkpoint, spec_for


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    folder = make_checkpoint(tmp_path / "m")
    return plan_of(spec_for(folder), read_checkpoint(folder)).manifest


def with_entry(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    tensors = list(manifest.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **changes)
    return msgspec.structs.replace(manifest, tensors=tensors)


def test_the_loader_s_own_manifest_is_accepted(manifest: Manifest) -> None:
    check_manifest(manifest)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"offset_bytes": 257}, "not aligned"),
        ({"offset_bytes": 1 << 40}, "leaves the arena"),
        ({"offset_bytes": -256}, "leaves the arena"),
        ({"offset_bytes": 0}, "overlap"),
        ({"size_bytes": 12}, "bytes for"),
        ({"shape": [-1], "stride": [1]}, "shape"),
        ({"stride": [7]}, "contiguous"),
        ({"dtype": "complex64"}, "dtype"),
        ({"name": "model.embed_tokens.weight"}, "twice"),
        ({"alias_of": "nobody"}, "alias"),
        ({"alias_of": "model.embed_tokens.weight"}, "tied but differ"),
        ({"alias_of": "lm_head.weight"}, "alias"),
    ],
)
def test_a_contradiction_is_named(manifest: Manifest, changes: dict[str, Any], reason: str) -> None:
    index = next(i for i, e in enumerate(manifest.tensors) if e.name == "model.norm.weight")
    with pytest.raises(ManifestError, match=reason):
        check_manifest(with_entry(manifest, index, **changes))


def test_an_arena_smaller_than_its_tensors_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="leaves the arena"):
        check_manifest(msgspec.structs.replace(manifest, total_bytes=manifest.total_bytes - 1))


def test_no_tensors_and_foreign_algorithms_are_refused(manifest: Manifest) -> None:
    bad: list[dict[str, Any]] = [{"tensors": []}, {"checksum_algorithm": "crc32"}]
    for changes in bad:
        with pytest.raises(ManifestError):
            check_manifest(msgspec.structs.replace(manifest, **changes))


def test_checksums_must_be_one_each_and_well_formed(manifest: Manifest) -> None:
    good = {entry.name: "0" * 32 for entry in owned_tensors(manifest)}
    check_checksums(manifest, good)
    name = next(iter(good))
    for bad in (
        {},
        {**good, "ghost": "0" * 32},
        {k: v for k, v in good.items() if k != name},
        {**good, name: "0" * 31},
        {**good, name: "g" * 32},
        {**good, "lm_head.weight": "0" * 32},  # an alias has no bytes of its own
    ):
        with pytest.raises(ManifestError):
            check_checksums(manifest, bad)


def test_a_completed_manifest_gives_an_alias_its_target_s_checksum(manifest: Manifest) -> None:
    sums = {e.name: f"{i:032x}" for i, e in enumerate(owned_tensors(manifest))}
    done = completed(manifest, sums, [1 << 20])
    by_name = {entry.name: entry for entry in done.tensors}
    assert by_name["lm_head.weight"].checksum == sums["model.embed_tokens.weight"]
    assert done.extent_bytes == [1 << 20]
    assert msgspec.json.decode(msgspec.json.encode(done), type=Manifest) == done
