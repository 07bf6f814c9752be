"""The host backend: seals in their order, sizes, and memory that is not there."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.arena import Arena
from cache.errors import ArenaMemoryError, SealError
from cache.host import MAX_EXTENT_BYTES, HostBackend, available_bytes, split_extents
from cache.mapping import PAGE_BYTES
from cache.wire import MAX_FDS_PER_FRAME

ROOT = Path(__file__).parents[3]
BACKEND = HostBackend()
FUTURE_WRITE = 0x10


def seals(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


@given(total=st.integers(0, 1 << 42))
def test_extents_cover_the_arena_in_whole_pages_and_fit_one_frame(total: int) -> None:
    sizes = split_extents(total)
    assert sum(sizes) >= max(total, 1)
    assert sum(sizes) - total <= PAGE_BYTES
    assert all(size > 0 and size % PAGE_BYTES == 0 for size in sizes)
    assert 2 * len(sizes) + 1 <= MAX_FDS_PER_FRAME
    if total <= 100 << 30:
        assert max(sizes) <= MAX_EXTENT_BYTES


def test_kv_and_table_cannot_be_resized_from_the_start_but_can_be_written() -> None:
    for purpose in ("kv", "slots"):
        arena = BACKEND.create(purpose, 3 * PAGE_BYTES)
        assert seals(arena.fds[0]) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (PAGE_BYTES, 9 * PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fds[0], size)
        BACKEND.map(arena.fds, arena.extent_bytes, writable=True).close()
        arena.close()


def test_published_weights_take_no_new_writer_and_readers_get_read_only_descriptors() -> None:
    arena = BACKEND.create("weights", PAGE_BYTES)
    loader = BACKEND.map(arena.fds, arena.extent_bytes, writable=True)
    BACKEND.seal_after_publish(arena)
    assert seals(arena.fds[0]) == FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    assert fcntl.fcntl(arena.fds[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    loader.view()[0] = 5  # the loader's own mapping lives on
    again = os.open(f"/proc/self/fd/{arena.fds[0]}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)
    loader.close()
    arena.close()


def test_the_last_seals_wait_for_the_last_writer() -> None:
    arena = BACKEND.create("weights", PAGE_BYTES)
    loader = BACKEND.map(arena.fds, arena.extent_bytes, writable=True)
    BACKEND.seal_after_publish(arena)
    reader = BACKEND.map(arena.fds, arena.extent_bytes)
    with pytest.raises(SealError, match="can still write"):
        BACKEND.seal_after_commit(arena)
    loader.close()
    BACKEND.seal_after_commit(arena)
    BACKEND.seal_after_commit(arena)  # idempotent
    assert seals(arena.fds[0]) & (fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    reader.close()
    arena.close()


def published_weights() -> Arena:
    arena = BACKEND.create("weights", PAGE_BYTES)
    BACKEND.seal_after_publish(arena)
    return arena


def test_donated_weights_without_the_last_seals_get_them() -> None:
    arena = published_weights()
    BACKEND.check_donated(arena)
    assert seals(arena.fds[0]) & fcntl.F_SEAL_WRITE
    arena.close()


def test_donated_weights_that_somebody_can_still_write_are_refused() -> None:
    arena = BACKEND.create("weights", PAGE_BYTES)
    writer = BACKEND.map(arena.fds, arena.extent_bytes, writable=True)
    BACKEND.seal_after_publish(arena)
    with pytest.raises(SealError, match="can still write"):
        BACKEND.check_donated(arena)
    writer.close()
    arena.close()


def test_donated_weights_that_were_never_committed_are_refused() -> None:
    arena = BACKEND.create("weights", PAGE_BYTES)
    with pytest.raises(SealError, match="never committed"):
        BACKEND.check_donated(arena)
    arena.close()


def test_a_donated_extent_of_another_size_is_refused() -> None:
    arena = published_weights()
    arena.extent_bytes[0] += PAGE_BYTES
    with pytest.raises(SealError, match="bytes, not"):
        BACKEND.check_donated(arena)
    arena.close()


def test_the_same_extent_twice_is_refused() -> None:
    arena = published_weights()
    arena.fds.append(os.dup(arena.fds[0]))
    arena.extent_bytes.append(PAGE_BYTES)
    with pytest.raises(SealError, match="twice"):
        BACKEND.check_donated(arena)
    arena.close()


def test_what_is_no_memory_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plain"
    file.write_bytes(bytes(PAGE_BYTES))
    for path, size in ((file, PAGE_BYTES), (Path("/dev/null"), 0)):
        arena = Arena("kv", [os.open(path, os.O_RDONLY)], [size])
        with pytest.raises(SealError):
            BACKEND.check_donated(arena)
        arena.close()


def test_donated_kv_that_a_peer_could_truncate_is_refused() -> None:
    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    arena = Arena("kv", [fd], [PAGE_BYTES])
    with pytest.raises(SealError, match="wrong seals"):
        BACKEND.check_donated(arena)
    arena.close()


def test_more_memory_than_there_is_is_refused_before_any_is_taken() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ArenaMemoryError, match="available"):
        BACKEND.create("weights", 1 << 50)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_size_limit_is_a_typed_error_and_leaks_nothing() -> None:
    code = """
import os, resource, signal
from cache.errors import ArenaMemoryError
from cache.host import HostBackend
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
before = len(os.listdir("/proc/self/fd"))
try:
    HostBackend().create("kv", 2 << 20)
except ArenaMemoryError as error:
    assert "too large" in error.message, error.message
    assert len(os.listdir("/proc/self/fd")) == before
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "refused\n"


def fake_machine(folder: Path, *, limit: str, current: int, cache: int = 0) -> tuple[Path, Path]:
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    (cgroup / "outer/inner").mkdir(parents=True)
    (cgroup / "outer/inner/memory.max").write_text("max\n")
    (cgroup / "outer/memory.max").write_text(limit + "\n")
    (cgroup / "outer/memory.current").write_text(f"{current}\n")
    (cgroup / "outer/memory.stat").write_text(f"anon 5\nactive_file {cache}\ninactive_file 0\n")
    return proc, cgroup


def test_available_memory_is_the_machine_s_without_a_limit(tmp_path: Path) -> None:
    proc, cgroup = fake_machine(tmp_path, limit="max", current=0)
    assert available_bytes(proc=proc, cgroup_root=cgroup) == 8000 * 1024


def test_available_memory_heeds_the_limit_of_an_outer_cgroup(tmp_path: Path) -> None:
    proc, cgroup = fake_machine(tmp_path, limit="5000000", current=4_000_000, cache=300_000)
    assert available_bytes(proc=proc, cgroup_root=cgroup) == 1_300_000
