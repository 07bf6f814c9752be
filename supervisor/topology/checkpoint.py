"""What a checkpoint folder holds, read without torch: config, safetensors headers, tokenizer.

A safetensors file is 8 bytes of little-endian header length, that much JSON, then the tensors.
The header names every byte of the rest, so a truncated copy shows without reading the data.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

__all__ = [
    "BrokenFileError",
    "Checkpoint",
    "CheckpointProblem",
    "TensorHeader",
    "read_checkpoint",
    "read_header",
]

_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 100_000_000
"""The bound that the format itself sets."""
_MAX_CONFIG_BYTES: Final = 16 << 20
_MAX_TOKENIZER_BYTES: Final = 256 << 20

_DTYPE_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_FLOATING: Final = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file announces it."""

    name: str
    dtype: str
    elements: int
    size_bytes: int

    @property
    def is_floating(self) -> bool:
        """Whether the loader may convert it to the topology's dtype."""
        return self.dtype in _FLOATING


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    """One thing that keeps the folder from being served."""

    what: str
    instead: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder as far as it could be read."""

    path: Path
    config: dict[str, Any]
    tensors: tuple[TensorHeader, ...]
    problems: tuple[CheckpointProblem, ...]

    def text_config(self, key: str) -> object:
        """A value of config.json, also where multimodal models nest it."""
        nested = self.config.get("text_config")
        inner = nested.get(key) if isinstance(nested, dict) else None
        return self.config.get(key, inner)

    def number(self, key: str) -> int | None:
        """A positive whole number of config.json, or None."""
        value = self.text_config(key)
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return int(str(value)) if is_number else None


class BrokenFileError(Exception):
    """A file is not what its name says; the text goes on behind the file's name."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Look at the folder; what is wrong lands in `problems`."""
    try:
        return _read_folder(path)
    except OSError as error:  # no permission on the way, or a name that is too long
        problem = CheckpointProblem(f"{path}: {error.strerror}", "write a folder that you may read")
        return Checkpoint(path, {}, (), (problem,))


def _read_folder(path: Path) -> Checkpoint:
    if not path.is_dir():
        there = "is not a folder" if path.exists() else "does not exist"
        problem = CheckpointProblem(
            f"{path} {there}", "write the folder that holds config.json and *.safetensors"
        )
        return Checkpoint(path, {}, (), (problem,))
    problems: list[CheckpointProblem] = []
    config = _read_config(path / "config.json", problems)
    tensors = tuple(_read_tensors(path, problems))
    _check_tokenizer(path / "tokenizer.json", problems)
    return Checkpoint(path, config, tensors, tuple(problems))


def _check_tokenizer(path: Path, problems: list[CheckpointProblem]) -> None:
    """Whether it is there and whole; what it means is the engine's business."""
    instead = "add the tokenizer of the model"
    try:
        _read_json_object(path, limit_bytes=_MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        problems.append(CheckpointProblem(f"{path.parent} has no tokenizer.json", instead))
    except (OSError, BrokenFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(CheckpointProblem(f"{path} {reason}", "copy the file again"))


def _read_config(path: Path, problems: list[CheckpointProblem]) -> dict[str, Any]:
    try:
        config = _read_json_object(path)
    except FileNotFoundError:
        instead = "write a checkpoint folder in Hugging Face format"
        problems.append(CheckpointProblem(f"{path.parent} has no config.json", instead))
    except (OSError, BrokenFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(CheckpointProblem(f"{path}: {reason}", "copy the checkpoint again"))
    else:
        return config
    return {}


def _read_json_object(path: Path, *, limit_bytes: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    with path.open("rb") as stream:
        raw = stream.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise BrokenFileError(f"is longer than {limit_bytes >> 20} MiB")
    return _json_object(raw)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenFileError("is not JSON") from error
    if not isinstance(value, dict):
        raise BrokenFileError("is not a JSON object")
    return value


def _read_tensors(path: Path, problems: list[CheckpointProblem]) -> Iterator[TensorHeader]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        instead = "convert the weights to safetensors; nothing else is loaded"
        problems.append(CheckpointProblem(f"{path} has no *.safetensors", instead))
    for missing in sorted(_shards(path, problems) - {file.name for file in files}):
        what = f"{path} has no {missing}, which model.safetensors.index.json names"
        problems.append(CheckpointProblem(what, "copy the checkpoint again"))
    for file in files:
        try:
            yield from read_header(file)
        except (OSError, BrokenFileError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(CheckpointProblem(f"{file} {reason}", "copy the file again"))


def _shards(path: Path, problems: list[CheckpointProblem]) -> set[str]:
    """Files that the index of a sharded checkpoint names."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        weight_map = _read_json_object(index).get("weight_map")
    except (OSError, BrokenFileError) as error:
        problems.append(CheckpointProblem(f"{index} {error}", "copy the checkpoint again"))
        return set()
    return {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()


def read_header(path: Path) -> list[TensorHeader]:
    """The tensors of one safetensors file.

    Raises:
        BrokenFileError: the header does not describe the file.
        OSError: it cannot be read.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise BrokenFileError(f"is truncated: {file_bytes} bytes are no safetensors file")
        (header_bytes,) = _LENGTH.unpack(prefix)
        data_bytes = file_bytes - _LENGTH.size - header_bytes
        if header_bytes > _MAX_HEADER_BYTES or data_bytes < 0:
            raise BrokenFileError(
                f"has a corrupt header: {header_bytes} bytes are announced for it"
            )
        raw = stream.read(header_bytes)
    try:
        header = _json_object(raw)
    except BrokenFileError as error:
        raise BrokenFileError(f"has a corrupt header: it {error}") from error
    header.pop("__metadata__", None)
    return _check_layout(header, data_bytes)


def _check_layout(header: dict[str, Any], data_bytes: int) -> list[TensorHeader]:
    spans: list[tuple[int, int]] = []
    tensors = []
    for name, entry in header.items():
        tensor, begin = _tensor(name, entry)
        tensors.append(tensor)
        spans.append((begin, begin + tensor.size_bytes))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise BrokenFileError(f"has a corrupt header: a gap or overlap at data byte {begin}")
        position = end
    if position > data_bytes:
        raise BrokenFileError(f"is truncated: {data_bytes} of {position} data bytes are there")
    if position < data_bytes:
        raise BrokenFileError(f"has {data_bytes - position} bytes behind its last tensor")
    return tensors


def _tensor(name: str, entry: object) -> tuple[TensorHeader, int]:
    corrupt = BrokenFileError(f"has a corrupt header: tensor {name!r} is not described")
    if not isinstance(entry, dict):
        raise corrupt
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise corrupt
    if dtype not in _DTYPE_BYTES:
        raise BrokenFileError(f"holds tensor {name!r} of the unknown type {dtype!r}")
    elements = 1
    for extent in shape:
        elements *= extent
    begin, end = offsets
    if end - begin != elements * _DTYPE_BYTES[str(dtype)]:
        raise BrokenFileError(
            f"has a corrupt header: tensor {name!r} has another size than its shape"
        )
    return TensorHeader(name, str(dtype), elements, end - begin), begin


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
