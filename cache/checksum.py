"""The two checksums of weights: one for memory that the CPU reads, one for memory that a GPU reads.

`blake2b-128` is for host arenas: it is computed while the bytes pass through the CPU's cache.
`mix128` is for device arenas: the loader would otherwise wait for hashing on the CPU, while the GPU
does it at the speed of its memory, after the copy, over the bytes that are really in the arena.

`mix128` sees the bytes as little-endian 64-bit words, the last one padded with zeros. Word i
becomes m(w, i): add (i + 1) * 0x9E3779B97F4A7C15, then the finaliser of splitmix64. The checksum is
the sum of all m and the sum of all m * (2 i + 1), both modulo 2**64. For a given position m is a
bijection, so a change of one word always shows; sums let threads work in any order. It finds
decay and misplaced copies; it is no protection against somebody who computes it too.
"""

from typing import Final

__all__ = ["BLAKE2B", "CHECKSUM_ALGORITHMS", "MIX128", "mix128"]

BLAKE2B: Final = "blake2b-128"
MIX128: Final = "mix128"
CHECKSUM_ALGORITHMS: Final = frozenset({BLAKE2B, MIX128})

_MASK: Final = (1 << 64) - 1


def mix128(data: bytes | memoryview) -> str:
    """`mix128` by the book: what the kernel is tested against. Slow."""
    plain = weighted = 0
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(bytes(data[8 * index : 8 * index + 8]), "little")
        word = (word + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        word ^= word >> 31
        plain += word
        weighted += word * (2 * index + 1)
    return f"{plain & _MASK:016x}{weighted & _MASK:016x}"
