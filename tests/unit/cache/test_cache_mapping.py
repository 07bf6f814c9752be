"""Mapping extents in a row, raising and dropping protection, and who dies of a write."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.errors import MappingError
from cache.mapping import PAGE_BYTES, Mapping

ROOT = Path(__file__).parents[3]


@pytest.fixture
def extents() -> Iterator[tuple[list[int], list[int]]]:
    """Three files of different sizes, each filled with its own number."""
    sizes = [2 * PAGE_BYTES, PAGE_BYTES, 3 * PAGE_BYTES]
    fds = []
    for number, size in enumerate(sizes, start=1):
        fd = os.memfd_create(f"extent-{number}")
        os.ftruncate(fd, size)
        os.pwrite(fd, bytes([number]) * size, 0)
        fds.append(fd)
    yield fds, sizes
    for fd in fds:
        os.close(fd)


def mapped_ranges() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_extents_lie_in_a_row_and_a_tensor_may_cross_them(
    extents: tuple[list[int], list[int]],
) -> None:
    fds, sizes = extents
    with Mapping(fds, sizes) as mapping:
        view = mapping.view()
        assert mapping.size_bytes == len(view) == sum(sizes)
        border = sizes[0]
        assert bytes(view[border - 2 : border + 2]) == b"\x01\x01\x02\x02"
        assert view[-1] == 3


def test_no_core_dump_holds_what_is_mapped(extents: tuple[list[int], list[int]]) -> None:
    fds, sizes = extents
    with Mapping(fds, sizes, tail_bytes=PAGE_BYTES) as mapping:
        assert flags_of(mapping) == {"dd"}
        mapping.protect(writable=True)
        assert flags_of(mapping) == {"dd"}, "also after a promotion"


def flags_of(mapping: Mapping) -> set[str]:
    """`dd` (do not dump) of every area inside the mapping, or `-`."""
    found, is_inside = set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start = int(match[1], 16)
            is_inside = mapping.address <= start < mapping.address + mapping.size_bytes
        elif is_inside and line.startswith("VmFlags:"):
            found.add("dd" if "dd" in line.split() else "-")
    return found


def test_the_tail_is_private_zero_filled_and_writable_while_the_rest_is_not(
    extents: tuple[list[int], list[int]],
) -> None:
    fds, sizes = extents
    with Mapping(fds, sizes, tail_bytes=100) as one, Mapping(fds, sizes, tail_bytes=100) as two:
        assert one.tail_bytes == PAGE_BYTES
        assert one.size_bytes == one.shared_bytes + one.tail_bytes
        first, second = one.view(), two.view()
        first[one.shared_bytes] = 77
        assert second[two.shared_bytes] == 0
        one.protect(writable=True)
        one.protect(writable=False)
        first[one.shared_bytes + 1] = 78  # still writable


def test_writes_after_raising_are_seen_by_everybody_at_unchanged_addresses(
    extents: tuple[list[int], list[int]],
) -> None:
    fds, sizes = extents
    with Mapping(fds, sizes) as writer, Mapping(fds, sizes) as reader:
        view, address = writer.view(), writer.address
        writer.protect(writable=True)
        view[sizes[0]] = 99
        assert writer.address == address
        assert writer.is_writable
        assert reader.view()[sizes[0]] == 99


def test_populate_works_in_both_modes(extents: tuple[list[int], list[int]]) -> None:
    fds, sizes = extents
    for writable in (False, True):
        with Mapping(fds, sizes, writable=writable) as mapping:
            mapping.populate()


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([2 * PAGE_BYTES, PAGE_BYTES], "descriptors for"),
        ([2 * PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES], "whole pages"),
        ([2 * PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES], "has a file of"),
        ([2 * PAGE_BYTES, 0, 3 * PAGE_BYTES], "whole pages"),
    ],
)
def test_sizes_that_do_not_fit_the_files_are_refused_before_mapping(
    extents: tuple[list[int], list[int]], sizes: list[int], reason: str
) -> None:
    before = mapped_ranges()
    with pytest.raises(MappingError, match=reason):
        Mapping(extents[0], sizes)
    assert mapped_ranges() == before


def test_a_mapping_that_fails_half_way_leaves_nothing_mapped(
    extents: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    fds, sizes = extents
    file = tmp_path / "read-only"
    file.write_bytes(bytes(PAGE_BYTES))
    fd = os.open(file, os.O_RDONLY)
    before = mapped_ranges()
    try:
        with pytest.raises(MappingError, match="Permission denied"):
            Mapping([*fds, fd], [*sizes, PAGE_BYTES], writable=True)
    finally:
        os.close(fd)
    assert mapped_ranges() == before


def test_close_is_idempotent_and_a_closed_mapping_gives_no_view(
    extents: tuple[list[int], list[int]],
) -> None:
    mapping = Mapping(*extents)
    mapping.close()
    mapping.close()
    with pytest.raises(MappingError, match="closed"):
        mapping.view()


def test_memory_outlives_its_descriptors(extents: tuple[list[int], list[int]]) -> None:
    fds, sizes = extents
    copies = [os.dup(fd) for fd in fds]
    with Mapping(copies, sizes) as mapping:
        for fd in copies:
            os.close(fd)
        assert mapping.view()[0] == 1


def test_a_write_to_a_read_only_mapping_kills_the_writer_only(
    extents: tuple[list[int], list[int]],
) -> None:
    fds, sizes = extents
    code = (
        "from cache.mapping import Mapping\n"
        f"view = Mapping({fds}, {sizes}).view()\n"
        "assert view[0] == 1\n"
        "view[0] = 5\n"
    )
    with Mapping(fds, sizes) as mapping:
        done = subprocess.run(
            [sys.executable, "-c", code], pass_fds=fds, cwd=ROOT, check=False, timeout=30
        )
        assert done.returncode == -signal.SIGSEGV
        assert mapping.view()[0] == 1
