"""Public-domain prose for the demo model: the six novels of Jane Austen.

The text comes from Debian's package `r-cran-janeaustenr`, which stores each novel as an R
character vector in a lazy-load database. The novels (1811-1818) are in the public domain;
the package around them is under the MIT licence. No R is needed: the format is a short header
and length-prefixed strings, and only that little is read here.

Warning: this is a reader for one known file, not for R data in general.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RDB_INSIDE_PACKAGE", "paragraphs"]

RDB_INSIDE_PACKAGE = Path("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
"""Where the database lies below the folder into which the Debian package was unpacked."""

_STRING_VECTOR = 16
_PUNCTUATION = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "_": None, "\u2014": "--"}
)
_APPARATUS = re.compile(r"^(CHAPTER|VOLUME|Chapter|Volume|by Jane Austen|THE END|FINIS|\[|\()")


def paragraphs(package_root: Path) -> Iterator[list[str]]:
    """Yield each novel as a list of paragraphs, in the order of the file.

    Args:
        package_root: folder into which `dpkg -x` unpacked the Debian package.
    """
    blob = (package_root / RDB_INSIDE_PACKAGE).read_bytes()
    for payload in _objects(blob):
        yield _join_lines(_string_vector(payload))


def _objects(blob: bytes) -> Iterator[bytes]:
    """Decompress every object: each is a 4-byte size, not needed here, and a zlib stream."""
    rest = blob
    while rest:
        stream = zlib.decompressobj()
        yield stream.decompress(rest[4:])
        rest = stream.unused_data


def _string_vector(payload: bytes) -> list[str]:
    """Read a serialised string vector (format X version 3, which begins with its encoding)."""
    (encoding_bytes,) = struct.unpack_from(">I", payload, 14)
    offset = 18 + encoding_bytes
    flags, count = struct.unpack_from(">II", payload, offset)
    if flags & 0xFF != _STRING_VECTOR:
        raise ValueError(f"expected a string vector, found R type {flags & 0xFF}")
    offset += 8
    lines: list[str] = []
    for _ in range(count):
        (size_bytes,) = struct.unpack_from(">I", payload, offset + 4)
        offset += 8
        lines.append(payload[offset : offset + size_bytes].decode("utf-8"))
        offset += size_bytes
    return lines


def _join_lines(lines: list[str]) -> list[str]:
    """Join wrapped lines into paragraphs; drop headings and editorial brackets."""
    joined: list[str] = []
    for block in "\n".join(lines).split("\n\n"):
        text = " ".join(block.split()).translate(_PUNCTUATION).replace("--", " -- ")
        if len(text) > 30 and not _APPARATUS.match(text):
            joined.append(" ".join(text.split()))
    return joined
