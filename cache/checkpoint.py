"""Reading a checkpoint's table of contents: safetensors headers and config, no tensor bytes.

Done here rather than with the safetensors package because the cache daemon needs it too and must
not import torch, and because a loader that knows file offsets can read straight into the arena.
The format is eight bytes of length, that much JSON, then raw bytes.

Invariants
    1. Nothing is believed: lengths, offsets, shapes and dtypes are checked against the file.
    2. Only safetensors. Pickled checkpoints run code when they are read, and are refused.
"""

import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from cache.errors import (
    CheckpointCorruptError,
    CheckpointMissingError,
    MissingTensorError,
    UnexpectedDtypeError,
)
from cache.protocol import dtype_bytes

__all__ = [
    "INDEX_NAME",
    "Checkpoint",
    "CheckpointFile",
    "TensorSource",
    "read_checkpoint",
    "read_config",
]

INDEX_NAME: Final = "model.safetensors.index.json"

_MAX_HEADER_BYTES: Final = 100 << 20  # the format's own bound
_MAX_CONFIG_BYTES: Final = 4 << 20
_MAX_INDEX_BYTES: Final = 256 << 20
_LENGTH: Final = struct.Struct("<Q")

_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one tensor lies on disk."""

    name: str
    file: Path
    dtype: str  # torch name
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One safetensors file, by what decides whether it changed."""

    path: Path
    size_bytes: int
    mtime_ns: int
    header_digest: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder: its config, its files, and every tensor in them."""

    path: Path
    config: dict[str, Any]
    config_digest: bytes
    files: tuple[CheckpointFile, ...]
    tensors: dict[str, TensorSource]

    def digest(self) -> str:
        """Digest over config, headers, sizes and mtimes: changes whenever a file does."""
        total = blake2b(self.config_digest, digest_size=16)
        for file in self.files:
            total.update(f"{file.path.name}\0{file.size_bytes}\0{file.mtime_ns}\0".encode())
            total.update(file.header_digest)
        return total.hexdigest()


def read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    """`config.json` of a model folder, and a digest of its bytes.

    Raises:
        CheckpointMissingError: no such file.
        CheckpointCorruptError: it is no JSON object.
    """
    data = _read_small(path / "config.json", _MAX_CONFIG_BYTES)
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CheckpointCorruptError(str(path / "config.json"), str(error)) from error
    return config, blake2b(data, digest_size=16).digest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Config and headers of the model folder `path`; takes milliseconds, reads no weights.

    Raises:
        CheckpointMissingError: the folder, its config or one of its files is not there.
        CheckpointCorruptError: a file is truncated or its header makes no sense.
        MissingTensorError: the index names a tensor that its shard does not hold.
    """
    config, config_digest = read_config(path)
    index = _read_index(path)
    names = sorted(set(index.values())) if index else ["model.safetensors"]
    files: list[CheckpointFile] = []
    tensors: dict[str, TensorSource] = {}
    shards: dict[str, str] = {}
    for name in names:
        file, found = _read_header(path / name)
        files.append(file)
        tensors.update(found)
        shards.update(dict.fromkeys(found, name))
    absent = sorted(n for n in index if n not in tensors)
    misplaced = sorted(n for n, s in index.items() if n in tensors and shards[n] != s)
    if absent or misplaced:
        names = absent or misplaced
        raise MissingTensorError(
            f"the index of {path} names {len(names)} tensors that their shards do not hold, "
            f"{names[0]} first",
            names,
        )
    return Checkpoint(path, config, config_digest, tuple(files), tensors)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard name; empty for a checkpoint in one file."""
    file = path / INDEX_NAME
    if not file.is_file():
        if not (path / "model.safetensors").is_file():
            raise CheckpointMissingError(
                f"{path} holds no model.safetensors and no index of shards",
                hint="only safetensors checkpoints are loaded; convert pickled ones",
            )
        return {}

    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    try:
        index = msgspec.json.decode(_read_small(file, _MAX_INDEX_BYTES), type=Index)
    except msgspec.MsgspecError as error:
        raise CheckpointCorruptError(str(file), str(error)) from error
    for shard in index.weight_map.values():
        if "/" in shard or not shard.endswith(".safetensors"):
            raise CheckpointCorruptError(str(file), f"{shard!r} is no shard in this folder")
    if not index.weight_map:
        raise CheckpointCorruptError(str(file), "it names no tensor")
    return index.weight_map


def _read_header(file: Path) -> tuple[CheckpointFile, dict[str, TensorSource]]:
    try:
        with file.open("rb", buffering=0) as raw:
            info = os.fstat(raw.fileno())
            head = raw.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                raise CheckpointCorruptError(str(file), f"it has only {info.st_size} bytes")
            (length,) = _LENGTH.unpack(head)
            if length > min(_MAX_HEADER_BYTES, info.st_size - _LENGTH.size):
                raise CheckpointCorruptError(
                    str(file),
                    f"a header of {length} bytes does not fit a file of {info.st_size}",
                )
            data = raw.read(length)
    except OSError as error:
        raise CheckpointMissingError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) != length:
        raise CheckpointCorruptError(str(file), "the header ends early")
    digest = blake2b(data, digest_size=16).digest()
    entries = _decode_header(file, data)
    start = _LENGTH.size + length
    tensors = {n: _source(file, n, e, start, info.st_size) for n, e in entries.items()}
    return CheckpointFile(file, info.st_size, info.st_mtime_ns, digest), tensors


def _decode_header(file: Path, data: bytes) -> dict[str, _HeaderEntry]:
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {n: msgspec.json.decode(value, type=_HeaderEntry) for n, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointCorruptError(str(file), f"the header is not readable: {error}") from error


def _source(
    file: Path, name: str, entry: _HeaderEntry, start: int, file_bytes: int
) -> TensorSource:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise UnexpectedDtypeError(f"{name} in {file} has the unknown dtype {entry.dtype}")
    begin, end = entry.data_offsets
    size_bytes = dtype_bytes(dtype)
    for length in entry.shape:
        if length < 0:
            raise CheckpointCorruptError(str(file), f"{name} has the shape {entry.shape}")
        size_bytes *= length
    if begin < 0 or end - begin != size_bytes:
        raise CheckpointCorruptError(
            str(file), f"{name} of shape {entry.shape} {dtype} has {end - begin} bytes"
        )
    if start + end > file_bytes:
        raise CheckpointCorruptError(
            str(file), f"{name} ends at byte {start + end}, the file at {file_bytes}: truncated"
        )
    return TensorSource(name, file, dtype, tuple(entry.shape), start + begin, size_bytes)


def _read_small(file: Path, bound_bytes: int) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(bound_bytes + 1)
    except OSError as error:
        raise CheckpointMissingError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > bound_bytes:
        raise CheckpointCorruptError(str(file), f"it is longer than {bound_bytes} bytes")
    return data
