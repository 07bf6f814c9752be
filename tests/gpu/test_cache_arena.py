"""The cuda arena on a real card: daemon without a context, protection, deaths, donations."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cache.arena import Arena, backend_for
from cache.checksum import mix128
from cache.client import open_kv
from cache.cuda import CudaBackend
from cache.cudachecksum import Checksummer
from cache.cudadriver import call, use_context
from cache.cudamapping import CudaMapping
from cache.errors import ArenaMemoryError, CudaError, MappingError, RemoteError
from cache.manifest import owned_tensors
from cache.protocol import Donate, KvGeometry, Scrubbed
from tests.harness.cache_daemon import DaemonProcess, open_fds, wait_until
from tests.harness.checkpoints import make_checkpoint, spec_for

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEVICE = "cuda:0"
GRANULE = 2 << 20
QUERY = ("--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
GEOMETRY = KvGeometry(layers=4, slots=4, kv_heads=2, max_length=1024, head_dim=64, dtype="bfloat16")


def used_mib() -> int:
    done = subprocess.run(
        ["nvidia-smi", *QUERY],  # noqa: S607
        capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    return int(done.stdout.split()[0])


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = backend_for(DEVICE).create("kv", 3 * GRANULE)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", shards=2)


def in_child(code: str, arena: Arena) -> str:
    """Run code with a mapping of the arena in a process of its own."""
    head = (
        "import sys\nfrom cache.arena import backend_for\n"
        f"mapping = backend_for('{DEVICE}').map({arena.fds}, {arena.extent_bytes})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=ROOT, pass_fds=arena.fds, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_write_to_read_only_memory_ends_the_writer_alone(arena: Arena) -> None:
    backend = backend_for(DEVICE)
    with backend.map(arena.fds, arena.extent_bytes, writable=True) as mapping:
        assert isinstance(mapping, CudaMapping)
        mapping.copy_in(0, b"intact")
        code = (
            "import torch\nfrom cache.devicetensor import tensor_at_device\n"
            "tensor = tensor_at_device(mapping.address, 4096, torch.uint8, 0)\n"
            "print('reads', bytes(tensor[:6].cpu().tolist()))\n"
            "try:\n    tensor.fill_(7); torch.cuda.synchronize()\n"
            "except Exception as error:\n    print('refused', str(error).splitlines()[0])\n"
            "from cache.errors import CudaError\nfrom cache.cudadriver import call, is_sticky\n"
            "try:\n    call('cuCtxSynchronize')\n"
            "except CudaError as error:\n    print('sticky', is_sticky(error), error.error)\n"
        )
        said = in_child(code, arena)
        assert "reads b'intact'" in said
        assert "illegal memory access" in said
        assert "sticky True CUDA_ERROR_ILLEGAL_ADDRESS" in said
        assert mapping.copy_out(0, 6) == b"intact"


def test_access_is_raised_and_dropped_under_a_tensor(arena: Arena) -> None:
    import torch

    from cache.devicetensor import tensor_at_device

    with backend_for(DEVICE).map(arena.fds, arena.extent_bytes, tail_bytes=100) as mapping:
        assert isinstance(mapping, CudaMapping)
        tensor = tensor_at_device(mapping.address, mapping.size_bytes, torch.bfloat16, 0)
        assert tensor.data_ptr() == mapping.address
        mapping.protect(writable=True)
        tensor.fill_(2)
        torch.cuda.synchronize()
        mapping.protect(writable=False)
        tail = tensor[mapping.shared_bytes // 2 :]
        tail.fill_(3)
        torch.cuda.synchronize()
        assert float(tensor[0]) == 2
        assert float(tail[-1]) == 3


def test_an_extent_of_another_size_is_refused(arena: Arena) -> None:
    for size_bytes in (2 * GRANULE, 4 * GRANULE):
        with pytest.raises(MappingError, match="is not"):
            backend_for(DEVICE).map(arena.fds, [size_bytes])
    with Path("/dev/null").open() as null, pytest.raises(MappingError):
        backend_for(DEVICE).map([null.fileno()], [GRANULE])


def test_out_of_memory_says_who_holds_it() -> None:
    before = open_fds()
    with pytest.raises(ArenaMemoryError, match="MiB are free") as caught:
        backend_for(DEVICE).create("weights", 4 << 40)
    assert caught.value.details["free_bytes"] < caught.value.details["total_bytes"]
    assert open_fds() == before


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(CudaError, match="INVALID_DEVICE"):
        CudaBackend("cuda:99")


def test_the_kernel_computes_what_the_book_says(arena: Arena) -> None:
    with backend_for(DEVICE).map(arena.fds, arena.extent_bytes, writable=True) as mapping:
        assert isinstance(mapping, CudaMapping)
        data = os.urandom(300_000)
        mapping.copy_in(0, data)
        spans = [(0, 300_000), (8, 1), (16, 7), (256, 8), (512, 9), (1024, 65_537), (0, 0)]
        checksummer = Checksummer(capacity=4)
        found = checksummer.compute((mapping.address + at, size) for at, size in spans)
        checksummer.close()
        assert found == [mix128(data[at : at + size]) for at, size in spans]


def test_a_daemon_loads_serves_and_scrubs_without_a_context(tmp_path: Path, folder: Path) -> None:
    spec = spec_for(folder, device=DEVICE)
    host = spec_for(folder)
    before_mib = used_mib()
    with DaemonProcess(tmp_path / "cache.sock", "--device", DEVICE) as daemon:
        empty_mib = used_mib()
        assert empty_mib - before_mib <= 16
        status = daemon.serve(spec)
        assert status.weights_bytes >= GRANULE
        weights = daemon.attach(spec)
        assert weights.manifest.checksum_algorithm == "mix128"
        with DaemonProcess(tmp_path / "host.sock", instance="cache-host-1") as other:
            other.serve(host)
            theirs = other.attach(host)
            view = theirs.map().view()
            mapping = weights.map()
            assert isinstance(mapping, CudaMapping)
            pairs = zip(
                owned_tensors(weights.manifest), owned_tensors(theirs.manifest), strict=True
            )
            for ours, entry in pairs:
                data = mapping.copy_out(ours.offset_bytes, ours.size_bytes)
                end = entry.offset_bytes + entry.size_bytes
                assert data == view[entry.offset_bytes : end]
                assert ours.checksum == mix128(data)
            view.release()
            theirs.close()
        scrubbed = msgspec.json.decode(daemon.control.call("scrub", timeout_s=60)[0], type=Scrubbed)
        assert scrubbed.mismatches == []
        mapping.close()
        weights.close()


def test_kv_of_a_daemon_is_clear_and_shared(tmp_path: Path, folder: Path) -> None:
    spec = spec_for(folder, device=DEVICE)
    with DaemonProcess(tmp_path / "cache.sock", "--device", DEVICE) as daemon:
        daemon.serve(spec)
        weights = daemon.attach(spec)
        assert weights.connection is not None
        kv = open_kv(weights.connection, GEOMETRY, timeout_s=60)
        backend = backend_for(DEVICE)
        with backend.map(kv.fds, kv.opened.extent_bytes, writable=True) as mapping:
            assert isinstance(mapping, CudaMapping)
            assert not any(mapping.copy_out(0, mapping.shared_bytes))
            mapping.copy_in(5, b"kv")
            again = open_kv(weights.connection, GEOMETRY, timeout_s=10)
            with backend.map(again.fds, again.opened.extent_bytes) as reader:
                assert isinstance(reader, CudaMapping)
                assert reader.copy_out(5, 2) == b"kv"
            again.close()
        kv.close()
        too_large = msgspec.structs.replace(GEOMETRY, slots=1024, max_length=1 << 20)
        with pytest.raises(RemoteError, match=r"engine-1|MiB are free") as caught:
            open_kv(weights.connection, too_large, timeout_s=60)
        assert caught.value.stable_code == "out_of_memory"
        weights.close()


def test_killing_the_daemon_loses_nothing_and_a_new_one_serves_the_same_memory(
    tmp_path: Path, folder: Path
) -> None:
    spec, socket = spec_for(folder, device=DEVICE), tmp_path / "cache.sock"
    first = DaemonProcess(socket, "--device", DEVICE)
    first.serve(spec)
    weights = first.attach(spec)
    assert weights.connection is not None
    kv = open_kv(weights.connection, GEOMETRY, timeout_s=60)
    mapping = weights.map()
    assert isinstance(mapping, CudaMapping)
    entry = owned_tensors(weights.manifest)[0]
    before = mapping.copy_out(entry.offset_bytes, entry.size_bytes)
    first.kill()
    first.control.close()
    assert mapping.copy_out(entry.offset_bytes, entry.size_bytes) == before
    with DaemonProcess(socket, "--device", DEVICE, instance="cache-test-2") as second:
        wrong = Donate(weights.manifest, spec, kv.opened)
        as_kv = [*weights.fds, *weights.fds[: len(kv.fds)], kv.table_fd]
        assert len(as_kv) == len(weights.fds) + len(kv.fds) + 1
        with pytest.raises(RemoteError, match="as weights and as KV"):
            second.control.call("donate", wrong, fds=as_kv, timeout_s=60)
        null = os.open("/dev/null", os.O_RDONLY)
        foreign = [null, *weights.fds[1:], *kv.fds, kv.table_fd]
        with pytest.raises(RemoteError, match="not shareable"):
            second.control.call("donate", wrong, fds=foreign, timeout_s=60)
        os.close(null)
        fds = [*weights.fds, *kv.fds, kv.table_fd]
        second.control.call("donate", wrong, fds=fds, timeout_s=60)
        second.control.call("donate", wrong, fds=fds, timeout_s=60)  # the same memory: no error
        assert second.status().donations == 1
        assert second.status().loads == 0
        assert weights.rejoin(timeout_s=10), "the very memory that we map"
        other = second.attach(spec, "engine-2")
        with other.map() as theirs:
            assert isinstance(theirs, CudaMapping)
            assert theirs.copy_out(entry.offset_bytes, entry.size_bytes) == before
        other.close()
        kv.close()
        mapping.close()
        weights.close()


def test_only_the_last_holder_s_death_frees_the_memory() -> None:
    before_mib = used_mib()
    arena = backend_for(DEVICE).create("weights", 512 << 20)
    assert used_mib() - before_mib >= 500
    copies = [os.dup(fd) for fd in arena.fds]
    arena.close()
    assert used_mib() - before_mib >= 500
    for fd in copies:
        os.close(fd)
    wait_until(lambda: used_mib() - before_mib < 100, "the memory is free")


def test_pinned_memory_is_given_back() -> None:
    use_context(0)
    address = int(call("cuMemHostAlloc", 1 << 20, 1))
    ctypes.memset(address, 1, 1 << 20)
    call("cuMemFreeHost", address)
