"""The fingerprint: everything that decides the bytes of an arena, torch-free.

Daemon, loader and each engine compute it on their own from the same files; only equal ones share
memory. It reads headers, not weights: file sizes and mtimes stand for the content.

A process remembers the headers it read last. A zygote's forks inherit them, so that an engine
which starts again only looks whether the files are still the same ones.
"""

import os
import platform
import time
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from cache.blocks import FP8_BLOCK, is_block_fp8
from cache.checkpoint import INDEX_NAME, Checkpoint, read_checkpoint
from cache.errors import UnsupportedModelError, UnsupportedQuantizationError
from cache.families import FAMILIES
from cache.protocol import LAYOUT_VERSION, Fingerprint, LoadSpec

__all__ = [
    "LOADER_VERSION",
    "check_quantization",
    "check_supported",
    "fingerprint_of",
    "fingerprint_of_checkpoint",
]

LOADER_VERSION: Final = 1
"""Version of how the loader turns a checkpoint into bytes; part of the fingerprint."""

_FP8_BLOCK_METHOD: Final = "fp8-block"

_FLOATING: Final = ("float32", "bfloat16", "float16", "float64")

_ISA_FLAGS: Final = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve",
)  # fmt: skip
"""CPU features that change which kernels torch picks, and with them the bits of a result."""


def fingerprint_of(spec: LoadSpec) -> Fingerprint:
    """Fingerprint of what `spec` names, as the files are now.

    Raises:
        CheckpointMissingError, CheckpointCorruptError, MissingTensorError: the files are unusable.
        UnsupportedQuantizationError, UnsupportedModelError: this release cannot load them.
    """
    return fingerprint_of_checkpoint(spec, _checkpoint_now(Path(spec.model_path)))


def fingerprint_of_checkpoint(spec: LoadSpec, checkpoint: Checkpoint) -> Fingerprint:
    """The same for a checkpoint whose headers were read already."""
    config = checkpoint.config
    check_quantization(spec, config)
    check_supported(spec, config)
    return Fingerprint(
        model_path=os.path.realpath(spec.model_path),
        model_arch=config["architectures"][0],
        revision=spec.revision,
        checkpoint_digest=checkpoint.digest(),
        tp_size=spec.tp_size,
        tp_rank=spec.tp_rank,
        pp_size=spec.pp_size,
        pp_rank=spec.pp_rank,
        dp_size=spec.dp_size,
        ep_size=spec.ep_size,
        quant_method=_how_quantised(spec, config),
        quant_config_hash=_quant_hash(config),
        dtype=spec.dtype,
        device_capability=_device_capability(spec.device),
        torch_version=_torch_version(),
        loader_version=LOADER_VERSION,
        layout_version=LAYOUT_VERSION,
    )


class _FileState(NamedTuple):
    """What tells a changed file from an unchanged one without reading it."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class _Remembered(NamedTuple):
    """A checkpoint as it was read, and its files, of which none had changed lately."""

    checkpoint: Checkpoint
    files: dict[Path, _FileState | None]  # None: it was not there


_SETTLED_NS: Final = 2_000_000_000
"""A file that changed this shortly ago may change again and keep its times: their steps are 4 ms
on most file systems, 2 s on the coarsest. It is read again each time."""

_remembered: dict[Path, _Remembered] = {}  # one at most; replaced, never changed


def _checkpoint_now(path: Path) -> Checkpoint:
    """What `read_checkpoint` gives; headers are read only where a file has changed."""
    global _remembered  # noqa: PLW0603 - a memory of this process, right in any of its threads
    known = _remembered.get(path)
    if known is not None and all(_state_of(file) == was for file, was in known.files.items()):
        return known.checkpoint
    before_ns = time.time_ns()
    small = {file: _state_of(file) for file in (path / "config.json", path / INDEX_NAME)}
    checkpoint = read_checkpoint(path)
    files = small | {file.path: _state_of(file.path) for file in checkpoint.files}
    states = [state for state in files.values() if state is not None]
    newest_ns = max(max(state.mtime_ns, state.ctime_ns) for state in states)
    are_those_read = all(
        (file.size_bytes, file.mtime_ns) == (state.size_bytes, state.mtime_ns)
        for file in checkpoint.files
        if (state := files[file.path]) is not None
    )
    if are_those_read and newest_ns < before_ns - _SETTLED_NS:
        _remembered = {path: _Remembered(checkpoint, files)}
    return checkpoint


def _state_of(file: Path) -> _FileState | None:
    try:
        info = file.stat()
    except OSError:  # whoever reads it next will say what is wrong
        return None
    return _FileState(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def check_quantization(spec: LoadSpec, config: dict[str, Any]) -> None:
    """Refuse everything that is not on the allow-list, on both sides, before memory is taken.

    Raises:
        UnsupportedQuantizationError: the checkpoint or the spec names a quantisation that the
            cache cannot share without changing what the weights mean.
    """
    method = _quant_method(config)
    allowed = {"none": ("none",), FP8_BLOCK: ("none", _FP8_BLOCK_METHOD)}
    if method in allowed.get(spec.quantization, ()):
        return
    hint = "use an unquantised checkpoint, or one in block-wise FP8 (E4M3, 128 x 128)"
    if spec.quantization not in allowed:
        named = f"quantization {spec.quantization!r} in the topology"
        hint = f"write one of {', '.join(allowed)}"
    else:
        named = f"{spec.model_path} is quantised with {method}"
        if method == _FP8_BLOCK_METHOD:
            hint = f"write quantization: {FP8_BLOCK}"
    raise UnsupportedQuantizationError(
        f"{named}: not on the allow-list for quantization {spec.quantization}",
        hint=hint,
        details={"method": method, "quantization": spec.quantization, "device": spec.device},
    )


def check_supported(spec: LoadSpec, config: dict[str, Any]) -> None:
    """Refuse what this release cannot load at all.

    Raises:
        UnsupportedModelError: the reason in one sentence.
    """
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not all(isinstance(name, str) for name in architectures)
    ):
        raise UnsupportedModelError(f"the config of {spec.model_path} names no architecture")
    if spec.dtype not in _FLOATING:
        raise UnsupportedModelError(
            f"dtype {spec.dtype!r} is none that weights are loaded as",
            hint=f"use one of {', '.join(_FLOATING)}",
        )
    if spec.quantization != "none" and architectures[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"which tensors of {architectures[0]} are linear layers is not known here",
            hint=f"use quantization: none, or a model of {', '.join(sorted(FAMILIES))}",
        )
    parallel = {n: getattr(spec, n) for n in ("tp_size", "pp_size", "dp_size", "ep_size")}
    if any(size != 1 for size in parallel.values()):
        raise UnsupportedModelError(
            f"a model split over devices ({parallel}) cannot be loaded on {spec.device}",
            hint="use one device per group",
        )


def _how_quantised(spec: LoadSpec, config: dict[str, Any]) -> str:
    """As in the checkpoint, or what the loader makes of it."""
    method = _quant_method(config)
    if method == "none" and spec.quantization == FP8_BLOCK:
        return f"{_FP8_BLOCK_METHOD}-online"
    return method


def _quant_method(config: dict[str, Any]) -> str:
    """`none`, `fp8-block` for the one format that we load, else the method's own name."""
    quant = config.get("quantization_config") or config.get("compression_config")
    if not quant:
        return "none"
    if not isinstance(quant, dict):
        return "unknown"
    method = str(quant.get("quant_method") or "unknown")
    if method == "fp8":
        if is_block_fp8(quant):
            return _FP8_BLOCK_METHOD
        return "fp8-other" if quant.get("weight_block_size") else "fp8-per-tensor"
    return method


def _quant_hash(config: dict[str, Any]) -> str:
    quant = config.get("quantization_config") or config.get("compression_config")
    if not quant:
        return ""
    return blake2b(msgspec.json.encode(quant, order="sorted"), digest_size=8).hexdigest()


@lru_cache(maxsize=1)
def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # a daemon alone may live without torch
        return "none"


@lru_cache(maxsize=4)
def _device_capability(device: str) -> str:
    machine = platform.machine()
    if device != "cpu":
        return f"{device}:{machine}:{'+'.join(_gpu_models())}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no features known: still the same on both sides of one machine
        lines = []
    flags: set[str] = set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return ":".join([device, machine, "+".join(f for f in _ISA_FLAGS if f in flags)])


def _gpu_models() -> list[str]:
    """What the NVIDIA driver calls its cards; empty where it does not say.

    Read from /proc, not asked of CUDA: the supervisor computes fingerprints too, and must not
    initialise a driver that a fork would inherit.
    """
    models = set()
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = file.read_text().splitlines()
        except OSError:  # hidden from this container: the same for everybody in it
            continue
        models |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return sorted(models)
