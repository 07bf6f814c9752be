"""Keeping a proof: the self-check of a GPU runs once for a group, not at each start of an engine.

What the self-check proves is a property of kernels and shapes, and the same card, libraries and
shapes give the same kernels. On a GPU it costs a second (attention plans for every length), which
is most of what an engine needs to start, so its result is kept beside the sockets, under a name
that holds everything it depends on. On the CPU it is quick and always run.
"""

import hashlib
import logging
import os
from functools import lru_cache
from pathlib import Path

import msgspec
import torch

from cache.cudadriver import call
from cache.protocol import Fingerprint, KvGeometry
from engines.native.model import SlotModel
from engines.native.selfcheck import SelfCheck, prove

__all__ = ["code_digest", "prove_once"]

log = logging.getLogger(__name__)


class _Proof(msgspec.Struct, frozen=True):
    """What the file holds."""

    exact: bool
    lengths: list[int]
    failures: list[str]
    decode_experts: str


class _Circumstances(msgspec.Struct, frozen=True):
    """Everything that the result depends on."""

    code: str
    fingerprint: Fingerprint  # holds torch's version
    geometry: KvGeometry
    chunk_tokens: int
    card: str
    cudnn: int
    driver: int
    triton: str


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of the engine's own code: any change of it has to be proven anew."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def prove_once(model: SlotModel, fingerprint: Fingerprint, folder: Path) -> SelfCheck:
    """The self-check, or on a GPU its kept result. Sets how experts are computed."""
    if not model.device.is_cuda:
        return prove(model)
    path = folder / f"selfcheck-{_key(model, fingerprint)}.json"
    kept = _read(path)
    if kept is not None:
        model.decode_experts = "dense" if kept.decode_experts == "dense" else "grouped"
        return SelfCheck(kept.exact, tuple(kept.lengths), tuple(kept.failures), 0.0)
    check = prove(model)
    proof = _Proof(check.exact, list(check.lengths), list(check.failures), model.decode_experts)
    _write(path, proof)
    return check


def _key(model: SlotModel, fingerprint: Fingerprint) -> str:
    properties = torch.cuda.get_device_properties(model.device.index)
    import triton  # only where there is a GPU

    circumstances = _Circumstances(
        code=code_digest(),
        fingerprint=fingerprint,
        geometry=model.geometry,
        chunk_tokens=model.chunk_tokens,
        card=f"{properties.name} {getattr(properties, 'uuid', '')}",
        cudnn=torch.backends.cudnn.version() or 0,
        driver=int(call("cuDriverGetVersion")),
        triton=triton.__version__,
    )
    return hashlib.blake2b(msgspec.json.encode(circumstances), digest_size=8).hexdigest()


def _read(path: Path) -> _Proof | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Proof)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be used, proving anew: %s", path, error)
        return None


def _write(path: Path, proof: _Proof) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(msgspec.json.encode(proof))
        part.replace(path)
    except OSError as error:  # the next engine proves again: slower, not wrong
        log.warning("the proof cannot be kept: %s", error)
