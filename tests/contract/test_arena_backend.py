"""What every arena backend must do, whatever the memory is made of.

A new backend adds itself to `DEVICES` and passes; the CUDA backend also runs over a driver made of
host memory, so its half of the contract is kept where there is no GPU. One that is not built is
refused in one place, by name, before anything else happens.

Device memory knows no seals: tests of what they forbid ask for a `sealing` backend.
"""

import os
from collections.abc import Iterator
from typing import get_args

import pytest

from cache import cuda, cudaworker
from cache.arena import Arena, ArenaBackend, ArenaMapping, Purpose, backend_for
from cache.cudamapping import CudaMapping
from cache.errors import ArenaMemoryError, BackendNotBuiltError, SealError, UnderstudyError
from tests.harness.fake_cuda import FakeDriver, installed

FAKE = "fake-cuda"
DEVICES = ["cpu", FAKE, pytest.param("cuda:0", marks=pytest.mark.gpu)]
SIZE_BYTES = 1_000_000  # deliberately no multiple of anything


@pytest.fixture(params=DEVICES)
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ArenaBackend]:
    if request.param != FAKE:
        yield backend_for(request.param)
        return

    def in_process(device: str, fds: list[int], extent_bytes: list[int]) -> None:
        cudaworker._work(cudaworker.Job(device, list(fds), list(extent_bytes)))

    monkeypatch.setattr(cuda, "zero_in_child", in_process)
    with installed(FakeDriver()):
        yield backend_for("cuda:0")


@pytest.fixture
def sealing(backend: ArenaBackend) -> ArenaBackend:
    if backend.device != "cpu":
        pytest.skip("device memory knows no seals")
    return backend


def read(mapping: ArenaMapping, offset: int, size: int) -> bytes:
    if isinstance(mapping, CudaMapping):
        return mapping.copy_out(offset, size)
    return bytes(mapping.view()[offset : offset + size])


def write(mapping: ArenaMapping, offset: int, data: bytes) -> None:
    if isinstance(mapping, CudaMapping):
        mapping.copy_in(offset, data)
    else:
        mapping.view()[offset : offset + len(data)] = data


@pytest.fixture
def weights(backend: ArenaBackend) -> Iterator[Arena]:
    arena = backend.create("weights", SIZE_BYTES)
    yield arena
    arena.close()


def open_fds() -> int:
    return len(list(os.scandir("/proc/self/fd")))


@pytest.mark.parametrize("device", ["xpu:0", "gpu", ""])
def test_a_device_without_a_backend_is_refused_by_name(device: str) -> None:
    with pytest.raises(BackendNotBuiltError) as caught:
        backend_for(device)
    assert caught.value.stable_code == "backend_not_built"
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_a_new_arena_is_large_enough_and_reads_as_zero(
    backend: ArenaBackend, purpose: Purpose
) -> None:
    arena = backend.create(purpose, SIZE_BYTES)
    assert arena.total_bytes >= SIZE_BYTES
    assert len(arena.fds) == len(arena.extent_bytes)
    backend.reserve(arena)
    mapping = backend.map(arena.fds, arena.extent_bytes)
    assert mapping.size_bytes == mapping.shared_bytes == arena.total_bytes
    if purpose != "weights" or backend.device == "cpu":
        assert not any(read(mapping, 0, SIZE_BYTES))
    mapping.close()
    arena.close()


def test_descriptors_are_not_inherited_and_close_is_idempotent(weights: Arena) -> None:
    assert not any(os.get_inheritable(fd) for fd in weights.fds)
    weights.close()
    weights.close()
    assert weights.total_bytes == 0


def test_what_one_maps_and_writes_another_reads(backend: ArenaBackend, weights: Arena) -> None:
    writer = backend.map(weights.fds, weights.extent_bytes, writable=True)
    reader = backend.map(weights.fds, weights.extent_bytes)
    write(writer, SIZE_BYTES - 1, b"\7")
    assert read(reader, SIZE_BYTES - 1, 1) == b"\7"
    writer.close()
    reader.close()


def test_kv_can_be_raised_to_writable_and_dropped_at_one_address(backend: ArenaBackend) -> None:
    arena = backend.create("kv", SIZE_BYTES)
    mapping = backend.map(arena.fds, arena.extent_bytes, tail_bytes=10)
    address = mapping.address
    mapping.protect(writable=True)
    write(mapping, 0, b"\1")
    mapping.protect(writable=False)
    write(mapping, arena.total_bytes, b"\2")  # the tail stays writable
    assert read(mapping, 0, 1) + read(mapping, arena.total_bytes, 1) == b"\1\2"
    assert mapping.tail_bytes >= 10
    assert mapping.address == address
    mapping.close()
    arena.close()


def test_memory_outlives_the_arena_that_made_it(backend: ArenaBackend, weights: Arena) -> None:
    copies, sizes = [os.dup(fd) for fd in weights.fds], list(weights.extent_bytes)
    writer = backend.map(copies, sizes, writable=True)
    write(writer, 0, b"alive")
    writer.close()
    weights.close()
    mapping = backend.map(copies, sizes)
    for fd in copies:
        os.close(fd)
    assert read(mapping, 0, 5) == b"alive"
    mapping.close()


def test_published_weights_cannot_be_mapped_for_writing_or_raised(
    sealing: ArenaBackend, weights: Arena
) -> None:
    sealing.seal_after_publish(weights)
    with pytest.raises(UnderstudyError):
        sealing.map(weights.fds, weights.extent_bytes, writable=True)
    reader = sealing.map(weights.fds, weights.extent_bytes)
    with pytest.raises(UnderstudyError):
        reader.protect(writable=True)
    reader.close()


def test_readers_do_not_keep_the_last_seals_from_being_set(
    backend: ArenaBackend, weights: Arena
) -> None:
    backend.seal_after_publish(weights)
    reader = backend.map(weights.fds, weights.extent_bytes)
    backend.seal_after_commit(weights)
    backend.check_donated(weights)
    reader.close()


def test_a_donation_of_the_right_memory_is_taken(backend: ArenaBackend, weights: Arena) -> None:
    backend.seal_after_publish(weights)
    backend.check_donated(weights)
    purposes: tuple[Purpose, ...] = ("kv", "slots")
    for purpose in purposes:
        arena = backend.create(purpose, SIZE_BYTES)
        backend.check_donated(arena)
        arena.close()


def test_a_donation_of_unpublished_or_missized_weights_is_refused(
    sealing: ArenaBackend, weights: Arena
) -> None:
    with pytest.raises(SealError):
        sealing.check_donated(weights)
    sealing.seal_after_publish(weights)
    weights.extent_bytes[-1] *= 2
    with pytest.raises(SealError):
        sealing.check_donated(weights)


def test_kv_is_no_weights_and_weights_are_no_kv(sealing: ArenaBackend, weights: Arena) -> None:
    sealing.seal_after_publish(weights)
    disguised = Arena("kv", [os.dup(fd) for fd in weights.fds], list(weights.extent_bytes))
    with pytest.raises(SealError):
        sealing.check_donated(disguised)
    disguised.close()
    kv = sealing.create("kv", SIZE_BYTES)
    kv.purpose = "weights"
    with pytest.raises(SealError):
        sealing.check_donated(kv)
    kv.close()


def test_too_much_is_refused_and_leaks_nothing(backend: ArenaBackend) -> None:
    before = open_fds()
    for purpose in get_args(Purpose):
        with pytest.raises(ArenaMemoryError):
            backend.create(purpose, 1 << 55)
    assert open_fds() == before
