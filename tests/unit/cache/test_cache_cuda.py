"""The CUDA backend, its errors and its loader, over a driver made of host memory."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import cuda, cudaworker, deviceconvert
from cache.arena import Arena, backend_for
from cache.checkpoint import read_checkpoint
from cache.checksum import mix128
from cache.client import load_private
from cache.cuda import CudaBackend, split_device_extents
from cache.cudadriver import is_sticky
from cache.cudamapping import CudaMapping
from cache.donation import make_kv
from cache.errors import (
    ArenaMemoryError,
    BackendNotBuiltError,
    CheckpointCorruptError,
    CheckpointMissingError,
    CudaBindingsMissingError,
    CudaError,
    DeadlineExceededError,
    LoadFailedError,
    MappingError,
    RemoteError,
    SealError,
)
from cache.gpumemory import CardUnknownError, MemoryUse, describe_use, described, parse_card
from cache.holdings import Holdings
from cache.loader import plan_of
from cache.manifest import owned_tensors
from cache.protocol import KvGeometry
from cache.received import is_same_memory
from cache.rpc import Hello
from cache.transfers import plan_reads
from cache.wire import MAX_FDS_PER_FRAME
from tests.harness.checkpoints import make_checkpoint, spec_for
from tests.harness.fake_cuda import GRANULE, FakeDriver, installed, tensor_on_host

if TYPE_CHECKING:
    from cache.protocol import Progress
    from cache.rpc import RpcPeer

SIZE_BYTES = 5 * GRANULE - 1000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    def in_process(device: str, fds: list[int], extent_bytes: list[int]) -> None:
        cudaworker._work(cudaworker.Job(device, list(fds), list(extent_bytes)))

    monkeypatch.setattr(cuda, "zero_in_child", in_process)
    monkeypatch.setattr(deviceconvert, "tensor_at_device", tensor_on_host)
    monkeypatch.setattr(
        deviceconvert.DeviceConverter, "on_stream", lambda _self, _stream: nullcontext()
    )
    with installed(FakeDriver()) as fake:
        yield fake


@pytest.fixture
def backend(driver: FakeDriver) -> CudaBackend:
    found = backend_for("cuda:0")
    assert isinstance(found, CudaBackend)
    return found


@pytest.fixture
def arena(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(cuda, "_GIB", 2 * GRANULE)  # several extents without gigabytes
    arena = backend.create("kv", SIZE_BYTES)
    yield arena
    arena.close()


# ------------------------------------------------------------------ devices and errors


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1"])
def test_what_is_no_device_is_refused_by_name(driver: FakeDriver, device: str) -> None:
    with pytest.raises(BackendNotBuiltError, match=device):
        backend_for(device)


def test_a_device_that_is_not_there_is_refused_with_a_hint(driver: FakeDriver) -> None:
    with pytest.raises(CudaError, match="INVALID_DEVICE") as caught:
        backend_for("cuda:3")
    assert "nvidia-smi" in caught.value.hint


def test_missing_bindings_name_the_extra() -> None:
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("the CUDA bindings are installed here")
    with pytest.raises(CudaBindingsMissingError, match=r"understudy\[cuda\]"):
        backend_for("cuda:0")


def test_the_owner_makes_no_context(arena: Arena, driver: FakeDriver) -> None:
    assert driver.contexts == 0
    assert not driver.handles, "descriptors alone hold the memory"


# ------------------------------------------------------------------ extents and descriptors


@given(total=st.integers(0, 1 << 42), granule=st.sampled_from([1 << 16, 2 << 20, 512 << 20]))
def test_extents_cover_the_arena_in_whole_granules_and_fit_one_frame(
    total: int, granule: int
) -> None:
    sizes = split_device_extents(total, granule)
    assert total <= sum(sizes) < max(total, 1) + granule
    assert all(size > 0 and size % granule == 0 for size in sizes)
    assert 2 * len(sizes) + 1 <= MAX_FDS_PER_FRAME
    assert all(earlier >= later for earlier, later in pairwise(sizes))


def test_large_arenas_have_large_extents() -> None:
    assert split_device_extents(16 << 30, GRANULE) == [1 << 30] * 16
    assert split_device_extents(96 << 30, GRANULE) == [2 << 30] * 48


def test_descriptors_are_close_on_exec(arena: Arena) -> None:
    assert len(arena.fds) == 3
    assert not any(os.get_inheritable(fd) for fd in arena.fds)


def test_a_copy_of_a_descriptor_is_the_same_memory(arena: Arena) -> None:
    copy = os.dup(arena.fds[0])
    assert is_same_memory(copy, arena.fds[0])
    assert not is_same_memory(copy, arena.fds[1])
    os.close(copy)


def test_descriptors_of_one_device_node_are_compared_by_open_file() -> None:
    first, second = os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)
    copy = os.dup(first)
    assert is_same_memory(first, copy)
    assert not is_same_memory(first, second)
    for fd in (first, second, copy):
        os.close(fd)


def test_out_of_memory_gives_everything_back_and_says_who_holds_it(
    driver: FakeDriver, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(uuid: str) -> MemoryUse:
        asked.append(uuid)
        return described(parse_card("100, 143771\n", "77, 90000\n12, [N/A]\n"))

    monkeypatch.setattr(cuda, "describe_use", answer)
    monkeypatch.setattr(cuda, "_GIB", 2 * GRANULE)
    driver.capacity_bytes = 3 * GRANULE
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ArenaMemoryError) as caught:
        backend.create("kv", SIZE_BYTES)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert asked == ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"]
    error = caught.value.with_holdings(weights_bytes=5, kv_bytes=6, attached=["chat-a"])
    for words in (
        "100 of 143,771 MiB are free",
        "pid 77: 90,000 MiB",
        "chat-a",
        "5 bytes of",
    ):
        assert words in str(error)
    assert error.details["free_bytes"] == 100 << 20


@dataclass(frozen=True)
class AttachedPeer:
    pid: int
    hello: Hello


def smi_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = folder / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $2 in *gpu=*) echo 100, 143771;; *) printf '812, 1420\\n81, 7\\n';; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_kv_that_cannot_be_cleared_for_lack_of_memory_says_which_engine_holds_it(
    driver: FakeDriver, backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that clears it needs a CUDA context: the last 500 MiB may not be there."""
    monkeypatch.setattr(cuda, "zero_in_child", cudaworker.zero_in_child)
    lack = CudaError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    answer = msgspec.json.encode(cudaworker._Answer(error=lack.to_body())).decode()
    monkeypatch.setattr(cudaworker, "ARGV", (sys.executable, "-c", f"print({answer!r})"))
    smi_on_path(tmp_path, monkeypatch)
    held = Holdings("cache-1", "cuda:0", backend)
    held.attached.add(cast("RpcPeer", AttachedPeer(812, Hello("p", 1, "chat-a-3fd0"))))
    with pytest.raises(ArenaMemoryError) as caught:
        make_kv(backend, KvGeometry(2, 3, 2, 32, 16, "float32"))
    assert not driver.handles
    text = str(held.explained(caught.value))
    assert "not enough memory for the process that clears it" in text
    assert "held by chat-a-3fd0 (pid 812): 1,420 MiB, pid 81: 7 MiB" in text
    assert "attached: chat-a-3fd0" in text
    assert held.status().device_uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


async def test_a_loader_without_memory_says_who_holds_it(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi_on_path(tmp_path, monkeypatch)
    held = Holdings("cache-1", "cuda:0", backend)
    held.attached.add(cast("RpcPeer", AttachedPeer(81, Hello("p", 1, "chat-b-77aa"))))
    lack = CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", hint="free device memory")
    error = await held.explained_remote(RemoteError(lack.to_body()))
    assert error.stable_code == "cuda"
    assert (
        "100 of 143,771 MiB are free; held by pid 812: 1,420 MiB, chat-b-77aa (pid 81): 7 MiB"
        in (str(error))
    )
    assert error.details["free_bytes"] == 100 << 20
    other = RemoteError(CudaError("cuInit", "CUDA_ERROR_NO_DEVICE").to_body())
    assert await held.explained_remote(other) is other


def test_any_other_trouble_of_the_clearing_process_stays_what_it_is(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RemoteError(CudaError("cuMemsetD8", "CUDA_ERROR_ILLEGAL_ADDRESS").to_body())

    monkeypatch.setattr(cuda, "zero_in_child", fail)
    with pytest.raises(RemoteError, match="ILLEGAL_ADDRESS"):
        make_kv(backend, KvGeometry(2, 3, 2, 32, 16, "float32"))


def test_an_unknown_holder_is_no_second_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unknown: nvidia-smi: No such file" in describe_use("GPU-1").text
    with pytest.raises(CardUnknownError, match="no figures"):
        parse_card("[N/A], [N/A]", "")


# ------------------------------------------------------------------ mappings


def test_extents_lie_in_a_row_with_a_private_tail_behind(
    backend: CudaBackend, arena: Arena
) -> None:
    with backend.map(arena.fds, arena.extent_bytes, writable=True, tail_bytes=100) as mapping:
        assert mapping.shared_bytes == arena.total_bytes
        assert mapping.tail_bytes == GRANULE
        assert mapping.size_bytes == mapping.shared_bytes + mapping.tail_bytes
        border = arena.extent_bytes[0]
        mapping.copy_in(border - 3, b"across")
        mapping.copy_in(mapping.shared_bytes, b"mine")
        with backend.map(arena.fds, arena.extent_bytes) as other:
            assert other.copy_out(border - 3, 6) == b"across"
            with pytest.raises(MappingError, match="leave"):
                other.copy_out(other.shared_bytes, 1)


def test_a_write_to_read_only_memory_ends_the_writer_s_context(
    backend: CudaBackend, arena: Arena, driver: FakeDriver
) -> None:
    mapping = backend.map(arena.fds, arena.extent_bytes)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS") as caught:
        mapping.copy_in(0, b"x")
    assert is_sticky(caught.value)
    with pytest.raises(MappingError, match="ILLEGAL_ADDRESS"):
        mapping.protect(writable=True)
    mapping.close()  # nothing to be done any more, and no error on top
    driver.is_lost = False


def test_protection_is_raised_and_dropped_at_one_address(
    backend: CudaBackend, arena: Arena, driver: FakeDriver
) -> None:
    with backend.map(arena.fds, arena.extent_bytes, tail_bytes=1) as mapping:
        address = mapping.address
        mapping.protect(writable=True)
        mapping.copy_in(7, b"kept")
        mapping.protect(writable=False)
        assert (mapping.address, mapping.is_writable) == (address, False)
        assert mapping.copy_out(7, 4) == b"kept"
        mapping.copy_in(mapping.shared_bytes, b"tail")  # always writable


def test_what_does_not_fit_is_refused_and_leaves_nothing_mapped(
    backend: CudaBackend, arena: Arena, driver: FakeDriver
) -> None:
    wrong: list[tuple[list[int], list[int], str]] = [
        (arena.fds, arena.extent_bytes[:-1], "descriptors for"),
        (arena.fds[:1], [arena.extent_bytes[0] * 2], "is not"),
        (arena.fds[:1], [1000], "granules"),
        ([], [], "no extent"),
    ]
    for fds, sizes, reason in wrong:
        with pytest.raises(MappingError, match=reason):
            backend.map(fds, sizes)
    with pytest.raises(MappingError, match="INVALID_HANDLE"), Path("/dev/null").open() as null:
        backend.map([null.fileno()], [GRANULE])
    assert not driver.ranges
    assert not driver.handles


def test_closing_is_idempotent_and_the_memory_outlives_its_maker(
    backend: CudaBackend, arena: Arena
) -> None:
    copies, sizes = [os.dup(fd) for fd in arena.fds], list(arena.extent_bytes)
    arena.close()
    mapping = backend.map(copies, sizes, writable=True)
    for fd in copies:
        os.close(fd)
    mapping.copy_in(0, b"alive")
    assert mapping.copy_out(0, 5) == b"alive"
    mapping.close()
    mapping.close()
    with pytest.raises(MappingError, match="closed"):
        mapping.copy_out(0, 1)


def test_device_memory_has_no_view(backend: CudaBackend, arena: Arena) -> None:
    with (
        backend.map(arena.fds, arena.extent_bytes) as mapping,
        pytest.raises(MappingError, match="copy it out"),
    ):
        mapping.view()


def test_kv_is_cleared_before_anyone_gets_it(backend: CudaBackend, arena: Arena) -> None:
    with backend.map(arena.fds, arena.extent_bytes, writable=True) as mapping:
        mapping.copy_in(0, b"\xff" * 64)
        backend.reserve(arena)
        assert mapping.copy_out(0, 64) == bytes(64)


# ------------------------------------------------------------------ donations


def test_donations_are_looked_at(backend: CudaBackend, arena: Arena, driver: FakeDriver) -> None:
    backend.check_donated(arena)
    with pytest.raises(SealError, match="twice"):
        backend.check_donated(Arena("kv", [arena.fds[0], arena.fds[0]], [GRANULE, GRANULE]))
    with Path("/dev/null").open() as null, pytest.raises(SealError, match="not shareable"):
        backend.check_donated(Arena("weights", [null.fileno()], [GRANULE]))
    driver.devices = 2
    other = CudaBackend("cuda:1").create("weights", GRANULE)
    with pytest.raises(SealError, match="cuda:1, not on cuda:0"):
        backend.check_donated(other)
    other.close()
    assert not driver.handles


# ------------------------------------------------------------------ loading


def load_on_fake(folder: Path, **changes: Any) -> tuple[Any, CudaMapping]:
    weights = load_private(spec_for(folder, device="cuda:0", **changes))
    mapping = weights.map()
    assert isinstance(mapping, CudaMapping)
    return weights, mapping


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_puts_the_same_bytes_on_the_device_as_on_the_host(
    driver: FakeDriver, tmp_path: Path, dtype: str
) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    host = load_private(spec_for(folder, dtype=dtype))
    weights, mapping = load_on_fake(folder, dtype=dtype)
    view = host.map().view()
    assert weights.manifest.checksum_algorithm == "mix128"
    for ours, theirs in zip(weights.manifest.tensors, host.manifest.tensors, strict=True):
        assert (ours.name, ours.offset_bytes) == (theirs.name, theirs.offset_bytes)
        data = mapping.copy_out(ours.offset_bytes, ours.size_bytes)
        assert data == view[theirs.offset_bytes : theirs.offset_bytes + theirs.size_bytes]
        assert ours.checksum == mix128(data)
    mapping.close()
    weights.close()
    assert not driver.blocks, "pinned buffers and staging memory are given back"


def test_a_load_tells_how_far_it_is_and_stops_at_the_first_failure(
    driver: FakeDriver, tmp_path: Path
) -> None:
    from cache.devicefilling import fill_device

    folder = make_checkpoint(tmp_path / "m", shards=2)
    plan = plan_of(spec_for(folder, device="cuda:0"), read_checkpoint(folder))
    backend = CudaBackend("cuda:0")
    arena = backend.create("weights", plan.manifest.total_bytes)
    seen: list[Progress] = []
    with backend.map(arena.fds, arena.extent_bytes, writable=True) as mapping:
        fill_device(plan, mapping, threads=3, buffer_bytes=512, on_progress=seen.append)
        assert seen[-1].bytes_done == seen[-1].bytes_total == plan.source_bytes
        file = folder / "model-00002-of-00002.safetensors"
        os.truncate(file, file.stat().st_size - 8)
        with pytest.raises(CheckpointCorruptError, match="ends at byte"):
            fill_device(plan, mapping, threads=3, buffer_bytes=512)
        file.unlink()
        with pytest.raises(CheckpointMissingError):
            fill_device(plan, mapping)
    arena.close()
    assert not driver.blocks


def test_a_scrub_finds_the_tensor_that_changed(driver: FakeDriver, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    weights, mapping = load_on_fake(folder)
    entries = owned_tensors(weights.manifest)
    job = cudaworker.Job(
        "cuda:0", list(weights.fds), weights.manifest.extent_bytes, entries, rate_bytes_per_s=1e9
    )
    scrubbed = cudaworker._work(job)
    assert scrubbed is not None
    assert scrubbed.mismatches == []
    assert scrubbed.checked_bytes == sum(entry.size_bytes for entry in entries)
    victim = entries[3]
    mapping.protect(writable=True)
    before = mapping.copy_out(victim.offset_bytes + 5, 1)
    mapping.copy_in(victim.offset_bytes + 5, bytes([before[0] ^ 1]))
    scrubbed = cudaworker._work(job)
    assert scrubbed is not None
    assert scrubbed.mismatches == [victim.name]
    mapping.close()
    weights.close()


# ------------------------------------------------------------------ the worker process


def test_the_worker_s_own_error_comes_back() -> None:
    with pytest.raises(RemoteError) as caught:
        cudaworker.zero_in_child("cuda:0", [], [])
    assert caught.value.stable_code in ("cuda_bindings_missing", "cuda", "mapping")


def test_a_worker_that_dies_hangs_or_is_not_wanted_any_more_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = cudaworker.Job("cuda:0", [], [], entries=[])
    monkeypatch.setattr(cudaworker, "ARGV", (sys.executable, "-c", "raise SystemExit(9)"))
    with pytest.raises(LoadFailedError, match="status 9"):
        cudaworker.scrub_in_child(job, stop=threading.Event())
    monkeypatch.setattr(cudaworker, "ARGV", (sys.executable, "-c", "import time; time.sleep(60)"))
    stop = threading.Event()
    stop.set()
    assert cudaworker.scrub_in_child(job, stop=stop) is None
    monkeypatch.setattr(cudaworker, "_ZERO_TIMEOUT_S", 0.1)
    with pytest.raises(DeadlineExceededError):
        cudaworker.zero_in_child("cuda:0", [], [])


def test_reads_are_in_file_order_and_only_what_is_needed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    plan = plan_of(spec_for(folder), read_checkpoint(folder))
    for buffer_bytes in (64, 1000, 1 << 20):
        reads = plan_reads(plan, buffer_bytes)
        assert sum(read.size_bytes for read in reads) == plan.source_bytes
        assert all(read.size_bytes <= buffer_bytes for read in reads)
        places = [(str(read.file), read.offset) for read in reads]
        assert places == sorted(places)
        for read in reads:
            end = read.offset
            for part in read.parts:
                assert part.file_offset == end
                end += part.size_bytes
            assert end == read.offset + read.size_bytes
    assert len(plan_reads(plan, 1 << 20)) == 2
