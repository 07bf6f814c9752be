"""A model that answers every question with a coin toss of rounding errors.

Texts that are equal prove little when the best token is far ahead of the next: an engine that
recomputed a stream with other roundings would still write the same words. Here every other token
has a twin whose embedding differs from its own in the last bits only, so which of the two wins is
decided by the last bit of a logit, many times in every stream.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import UnderstudyError

__all__ = ["make_near_tie_model"]

FIRST_TOKEN = 5  # below it are the marks of turns
TWIST_ULPS = 3  # enough to part the twins, less than the rounding of a sum of products
EMBEDDING = "model.embed_tokens.weight"


def make_near_tie_model(source: Path, target: Path, *, seed: int = 1) -> Path:
    """Copy a checkpoint with tied float32 embeddings, and give its tokens twins.

    Raises:
        UnderstudyError: its embeddings are not float32.
    """
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    raw = bytearray(file.read_bytes())
    size = struct.unpack("<Q", raw[:8])[0]
    entry: dict[str, Any] = json.loads(raw[8 : 8 + size])[EMBEDDING]
    if entry["dtype"] != "F32":
        raise UnderstudyError(f"{EMBEDDING} is {entry['dtype']}, twins need float32")
    begin, end = (8 + size + offset for offset in entry["data_offsets"])
    rows = np.frombuffer(raw[begin:end], dtype=np.int32).reshape(entry["shape"]).copy()
    half = (rows.shape[0] - FIRST_TOKEN) // 2
    twists = np.random.default_rng(seed).integers(
        -TWIST_ULPS, TWIST_ULPS, size=(half, rows.shape[1]), dtype=np.int32, endpoint=True
    )
    # The bits of a float, read as an integer, count in units in the last place.
    rows[FIRST_TOKEN + half : FIRST_TOKEN + 2 * half] = (
        rows[FIRST_TOKEN : FIRST_TOKEN + half] + twists
    )
    raw[begin:end] = rows.tobytes()
    file.write_bytes(raw)
    return target
