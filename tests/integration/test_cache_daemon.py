"""The cache daemon as real processes: what dies, what lives on, who is told what."""

import concurrent.futures
import itertools
import json
import os
import re
import resource
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache.client import AttachedWeights, KvMemory, open_kv
from cache.errors import (
    CacheNotReadyError,
    ConnectionClosedError,
    RemoteError,
    UnderstudyError,
)
from cache.mapping import Mapping
from cache.protocol import (
    Abort,
    Attach,
    CacheStatus,
    Commit,
    Donate,
    KvGeometry,
    LoadSpec,
    Manifest,
    Progress,
    Scrubbed,
)
from cache.slots import SlotTable
from cache.wire import Connection, Event, Request, close_all, encode_frame
from tests.harness.cache_daemon import ROOT, DaemonProcess, open_fds, wait_until
from tests.harness.checkpoints import make_checkpoint, spec_for
from tests.harness.lines import read_line
from tests.integration.engines_support import settled_numbers

GEOMETRY = KvGeometry(2, 4, 2, 64, 16, "float32")


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "cache-test.sock"


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(socket_path) as process:
        yield process


@pytest.fixture
def spec(tmp_path: Path) -> LoadSpec:
    return spec_for(make_checkpoint(tmp_path / "model"))


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(64) as executor:
        yield executor


def weights_in_memory(process: int | str) -> int:
    """Bytes of weight files that a process maps or holds open."""
    found = {}
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if "understudy-weights" in str(entry.readlink()):
                info = entry.stat()
                found[info.st_ino] = info.st_size
        except FileNotFoundError:  # closed while we looked
            continue
    return sum(found.values())


def error_of(call: "concurrent.futures.Future[AttachedWeights]") -> UnderstudyError:
    error = call.exception(20)
    assert isinstance(error, UnderstudyError), error
    return error


# ------------------------------------------------------------------ attach and wait


def test_an_engine_that_comes_first_waits_for_the_load_and_reads_the_file_s_bytes(
    daemon: DaemonProcess, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    early = [pool.submit(daemon.attach, spec, f"engine-{n}") for n in range(5)]
    wait_until(lambda: daemon.peers() == 5, "everybody is connected")
    daemon.load(spec)
    attached = [call.result(20) for call in early]
    status = daemon.status()
    assert [client.instance for client in status.attached] == [f"engine-{n}" for n in range(5)]
    assert (status.state, status.loads) == ("serving", 1)
    data = (Path(spec.model_path) / "model.safetensors").read_bytes()
    for weights in attached:
        with_mapping = weights.map()
        entry = weights.manifest.tensors[0]
        first = bytes(with_mapping.view()[entry.offset_bytes : entry.offset_bytes + 64])
        assert first in data
        with_mapping.close()
        weights.close()
    wait_until(lambda: daemon.status().attached == [], "registrations end with connections")


def test_an_engine_waits_for_a_daemon_that_is_not_there_yet(
    socket_path: Path, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    from cache.client import attach

    early = pool.submit(attach, socket_path, spec, instance="engine-1", timeout_s=20)
    with DaemonProcess(socket_path) as daemon:
        daemon.load(spec)
        early.result(20).close()


def test_a_wait_ends_at_its_deadline(daemon: DaemonProcess, spec: LoadSpec) -> None:
    started = time.monotonic()
    with pytest.raises(RemoteError, match="the cache is empty") as caught:
        daemon.attach(spec, timeout_s=0.2)
    assert caught.value.stable_code == "cache_not_ready"
    assert 0.15 < time.monotonic() - started < 2


def test_a_wait_without_a_daemon_ends_at_its_deadline(socket_path: Path, spec: LoadSpec) -> None:
    from cache.client import attach

    with pytest.raises(CacheNotReadyError, match="nobody listens"):
        attach(socket_path, spec, instance="engine-1", timeout_s=0.1)


def test_a_wait_survives_the_daemon_s_death_and_its_successor_serves(
    socket_path: Path, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    with DaemonProcess(socket_path) as first:
        waiting = pool.submit(first.attach, spec, "engine-1")
        wait_until(lambda: first.peers() == 1, "the engine waits")
        first.kill()
        with DaemonProcess(socket_path, instance="cache-test-2") as second:
            second.load(spec)
            waiting.result(20).close()


def test_load_is_idempotent_for_the_same_weights(daemon: DaemonProcess, spec: LoadSpec) -> None:
    daemon.load(spec)
    daemon.load(spec)
    daemon.wait_state("serving")
    assert daemon.load(spec).state == "serving"
    assert daemon.status().loads == 1


def test_attaching_takes_milliseconds(daemon: DaemonProcess, spec: LoadSpec) -> None:
    daemon.serve(spec)
    taken_ms = []
    for number in range(20):
        started = time.perf_counter()
        weights = daemon.attach(spec, f"engine-{number}")
        weights.map().close()
        taken_ms.append((time.perf_counter() - started) * 1e3)
        weights.close()
    assert statistics.median(taken_ms) < 30, taken_ms


def test_progress_and_states_are_told(daemon: DaemonProcess, spec: LoadSpec) -> None:
    listener = daemon.connect("listener", "supervisor")
    daemon.serve(spec)
    events: list[Event] = []

    def everything_was_told() -> bool:
        events.extend(listener.drain())
        return is_served(events)

    wait_until(everything_was_told, "loading and serving were told")
    progress = [e for e in events if e.name == "progress"]
    assert msgspec.json.decode(progress[-1].params, type=Progress).bytes_total > 0
    listener.close()


def is_served(events: list[Event]) -> bool:
    states = [
        msgspec.json.decode(event.params, type=CacheStatus).state
        for event in events
        if event.name == "state"
    ]
    return states[:1] == ["loading"] and states[-1:] == ["serving"]


def test_the_daemon_imports_no_torch(daemon: DaemonProcess, spec: LoadSpec) -> None:
    daemon.serve(spec)
    assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()
    resident_kib = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{daemon.pid}/status").read_text())
    assert resident_kib is not None
    assert int(resident_kib[1]) < 80_000


# ------------------------------------------------------------------ one copy, read only


READER = """
import sys
from pathlib import Path
from cache.client import attach
from cache.protocol import LoadSpec
import msgspec
spec = msgspec.json.decode(sys.argv[2], type=LoadSpec)
weights = attach(sys.argv[1], spec, instance=sys.argv[3], timeout_s=20)
mapping = weights.map()
view = mapping.view()
total = sum(view[i] for i in range(0, len(view), 4096))
print("ready", len(view), total, flush=True)
for line in sys.stdin:
    if line.strip() == "write":
        view[0] = 1
    if line.strip() == "sum":
        print(sum(view[i] for i in range(0, len(view), 4096)), flush=True)
    if line.strip() == "rejoin":
        print(weights.rejoin(timeout_s=10), flush=True)
"""


class Reader:
    """An engine reduced to what matters here: it attaches, maps and touches every page."""

    def __init__(self, daemon: DaemonProcess, spec: LoadSpec, instance: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", READER, str(daemon.socket)),
                *(msgspec.json.encode(spec).decode(), instance),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        word, self.size, self.sum = self._line().split()
        assert word == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return read_line(self.process.stdout, timeout_s=30)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def ask(self, word: str) -> str:
        self.tell(word)
        return self._line()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def pss_kib(pid: int) -> int:
    """This process's share of the weights, as the kernel accounts it."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            inside = "understudy-weights" in line
            assert not inside or " r--s " in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total


def test_two_readers_share_one_copy(daemon: DaemonProcess, tmp_path: Path) -> None:
    config = {"vocab_size": 20_000, "hidden_size": 64, "intermediate_size": 64}
    spec = spec_for(make_checkpoint(tmp_path / "larger", config=config))
    copy_bytes = daemon.serve(spec).weights_bytes
    assert copy_bytes > 4 << 20
    readers = [Reader(daemon, spec, f"engine-{n}") for n in range(2)]
    try:
        shares_kib = [pss_kib(reader.process.pid) for reader in readers]
        assert abs(sum(shares_kib) * 1024 - copy_bytes) < copy_bytes * 0.05, shares_kib
    finally:
        for reader in readers:
            reader.end()


def test_a_write_to_the_weights_kills_the_writer_only(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.serve(spec)
    good, bad = Reader(daemon, spec, "engine-1"), Reader(daemon, spec, "engine-2")
    try:
        bad.tell("write")
        assert bad.process.wait(10) == -signal.SIGSEGV
        assert good.ask("sum") == good.sum
        wait_until(lambda: len(daemon.status().attached) == 1, "the writer's registration ended")
        assert scrub(daemon.control).mismatches == []
    finally:
        good.end()
        bad.end()


def test_nobody_can_open_the_weights_for_writing(daemon: DaemonProcess, spec: LoadSpec) -> None:
    daemon.serve(spec)
    weights = daemon.attach(spec)
    wait_until(lambda: daemon.loader_pid() is None, "the loader is gone")
    fd = os.open(f"/proc/self/fd/{weights.fds[0]}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(UnderstudyError):
            Mapping([fd], weights.manifest.extent_bytes, writable=True)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
        weights.close()


def scrub(connection: Connection) -> Scrubbed:
    raw, fds = connection.call("scrub", timeout_s=20)
    close_all(fds)
    return msgspec.json.decode(raw, type=Scrubbed)


# ------------------------------------------------------------------ mismatches


def test_another_model_is_refused_with_the_names_of_the_fields(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    other = spec_for(make_checkpoint(tmp_path / "other", seed=9), revision="r9")
    with pytest.raises(RemoteError) as caught:
        daemon.attach(other)
    assert caught.value.stable_code == "fingerprint_mismatch"
    assert caught.value.details["fields"] == ["model_path", "revision", "checkpoint_digest"]
    assert daemon.status().state == "serving"


def test_a_mismatch_is_told_at_once_even_while_loading(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.load(spec)
    pid = daemon.stop_loader()
    other = spec_for(make_checkpoint(tmp_path / "other", seed=9))
    with pytest.raises(RemoteError) as caught:
        daemon.attach(other)
    assert caught.value.stable_code == "fingerprint_mismatch"
    os.kill(pid, signal.SIGCONT)
    daemon.wait_state("serving")


def test_reload_replaces_the_weights_when_nobody_is_attached(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    other = spec_for(make_checkpoint(tmp_path / "other", seed=9))
    weights = daemon.attach(other, on_mismatch="reload")
    status = daemon.status()
    assert (status.loads, status.fingerprint) == (2, weights.manifest.fingerprint)
    assert weights_in_memory(daemon.pid) == status.weights_bytes  # the first copy is gone
    weights.close()


def test_reload_is_refused_while_others_are_attached_and_names_them(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    holder = daemon.attach(spec, "chat-a-1234")
    other = spec_for(make_checkpoint(tmp_path / "other", seed=9))
    with pytest.raises(RemoteError, match="chat-a-1234") as caught:
        daemon.attach(other, on_mismatch="reload")
    assert caught.value.stable_code == "cache_in_use"
    with pytest.raises(RemoteError, match="chat-a-1234"):
        daemon.control.call("drop", timeout_s=10)
    with pytest.raises(RemoteError, match="chat-a-1234"):
        daemon.load(other)
    holder.close()
    wait_until(lambda: not daemon.status().attached, "it has left")
    daemon.attach(other, on_mismatch="reload").close()


def test_two_engines_that_both_want_a_reload_get_one(
    daemon: DaemonProcess,
    spec: LoadSpec,
    tmp_path: Path,
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    daemon.serve(spec)
    other = spec_for(make_checkpoint(tmp_path / "other", seed=9))
    calls = [
        pool.submit(daemon.attach, other, f"engine-{n}", on_mismatch="reload") for n in range(4)
    ]
    for call in calls:
        call.result(20).close()
    assert daemon.status().loads == 2


def test_drop_frees_the_memory_and_a_load_follows(daemon: DaemonProcess, spec: LoadSpec) -> None:
    daemon.serve(spec)
    daemon.control.call("drop", timeout_s=10)
    assert daemon.status().state == "empty"
    assert weights_in_memory(daemon.pid) == 0
    daemon.serve(spec)


def test_drop_ends_a_load_in_progress(
    daemon: DaemonProcess, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    daemon.load(spec)
    pid = daemon.stop_loader()
    before = daemon.peers()  # the loader may have come as far as its connection
    waiting = pool.submit(daemon.attach, spec, "engine-1")
    wait_until(lambda: daemon.peers() == before + 1, "an engine waits")
    daemon.control.call("drop", timeout_s=10)
    assert not Path(f"/proc/{pid}").exists()
    assert daemon.status().state == "empty"
    assert "dropped" in str(error_of(waiting))
    daemon.serve(spec)


# ------------------------------------------------------------------ loads that fail


def fails_with(
    daemon: DaemonProcess,
    spec: LoadSpec,
    pool: concurrent.futures.ThreadPoolExecutor,
    code: str,
    good: LoadSpec,
) -> UnderstudyError:
    """Two clients wait, the load fails: both get the error, and the next load works."""
    before = open_fds(daemon.pid)
    waiting = [pool.submit(daemon.attach, spec, f"engine-{n}") for n in range(2)]
    wait_until(lambda: daemon.peers() == 2, "two engines wait")
    daemon.load(spec)
    errors = [error_of(call) for call in waiting]
    assert [error.stable_code for error in errors] == [code, code]
    status = daemon.status()
    assert (status.state, status.error and status.error.code) == ("failed", code)
    assert weights_in_memory(daemon.pid) == 0
    assert daemon.loader_pid() is None
    wait_until(lambda: open_fds(daemon.pid) <= before, "every descriptor is closed")
    daemon.serve(good)
    return errors[0]


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        ({"leave_out": ["model.norm.weight"]}, "missing_tensor"),
        ({"other_dtype": {"model.norm.weight": "I64"}}, "unexpected_dtype"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_named_to_every_waiter(
    daemon: DaemonProcess,
    spec: LoadSpec,
    pool: concurrent.futures.ThreadPoolExecutor,
    harm: dict[str, Any],
    code: str,
) -> None:
    folder = make_checkpoint(daemon.socket.parent / "bad", **harm)
    error = fails_with(daemon, spec_for(folder), pool, code, spec)
    assert "model.norm.weight" in str(error)


def test_a_model_larger_than_memory_is_refused_before_any_is_taken(
    daemon: DaemonProcess,
    spec: LoadSpec,
    tmp_path: Path,
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    folder = sparse_checkpoint(tmp_path / "giant", vocab_size=1 << 30)
    error = fails_with(daemon, spec_for(folder), pool, "out_of_memory", spec)
    assert "available" in str(error)


def sparse_checkpoint(folder: Path, *, vocab_size: int) -> Path:
    """A model of any size that takes no disk: its embedding is a hole in the file."""
    make_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_")
    size = vocab_size * 16 * 4
    header["model.embed_tokens.weight"] = {
        "dtype": "F32", "shape": [vocab_size, 16], "data_offsets": [end, end + size],
    }  # fmt: skip
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
    os.truncate(file, 8 + len(encoded) + end + size)
    return folder


def test_a_loader_that_is_killed_is_named_with_its_signal(
    daemon: DaemonProcess, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    waiting = pool.submit(daemon.attach, spec, "engine-1")
    daemon.load(spec)
    os.kill(daemon.stop_loader(), signal.SIGKILL)
    error = error_of(waiting)
    assert error.stable_code == "load_failed"
    assert "SIGKILL" in str(error)
    assert weights_in_memory(daemon.pid) == 0
    daemon.serve(spec)


def test_a_loader_that_hangs_is_killed_at_the_time_limit(socket_path: Path, spec: LoadSpec) -> None:
    with DaemonProcess(socket_path, "--load-timeout", "0.6") as daemon:
        daemon.load(spec)
        pid = daemon.stop_loader()
        status = daemon.wait_state("failed")
        assert status.error is not None
        assert "longer than 0.6 s" in status.error.message
        assert not Path(f"/proc/{pid}").exists()


def test_a_file_that_is_cut_short_after_the_load_began(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.load(spec)
    pid = daemon.stop_loader()
    file = Path(spec.model_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    os.kill(pid, signal.SIGCONT)
    status = daemon.wait_state("failed")
    assert status.error is not None
    assert status.error.code in ("checkpoint_corrupt", "fingerprint_mismatch")


def test_a_checkpoint_that_cannot_be_read_at_all_is_refused_by_load_itself(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    file = Path(spec.model_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:100])
    with pytest.raises(RemoteError) as caught:
        daemon.load(spec)
    assert caught.value.stable_code == "checkpoint_corrupt"
    assert daemon.status().state == "failed"
    file.write_bytes(data)
    daemon.serve(spec)


def test_a_loader_without_room_for_its_pages_says_so(
    daemon: DaemonProcess,
    spec: LoadSpec,
    tmp_path: Path,
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """The kernel refuses the pages only when the loader writes: a limit on file size stands in."""
    config = {"vocab_size": 20_000, "hidden_size": 64}
    larger = spec_for(make_checkpoint(tmp_path / "larger", config=config))
    daemon.load(larger)
    pid = daemon.stop_loader()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    waiting = pool.submit(daemon.attach, larger, "engine-1")
    os.kill(pid, signal.SIGCONT)
    assert error_of(waiting).stable_code == "out_of_memory"
    assert weights_in_memory(daemon.pid) == 0
    daemon.serve(spec)


def test_kv_without_room_is_a_typed_error(daemon: DaemonProcess, spec: LoadSpec) -> None:
    daemon.serve(spec)
    weights = daemon.attach(spec)
    assert weights.connection is not None
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 40))
    with pytest.raises(RemoteError) as caught:
        open_kv(weights.connection, GEOMETRY, timeout_s=10)
    assert caught.value.stable_code == "out_of_memory"
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))
    open_kv(weights.connection, GEOMETRY, timeout_s=10).close()
    weights.close()


def test_a_daemon_out_of_descriptors_refuses_and_recovers(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.serve(spec)
    wait_until(lambda: daemon.peers() == 0 and not daemon.loader_pid(), "the loader has left")
    # The limit is on numbers, not on how many: leave one free number, for accept.
    taken = settled_numbers(daemon.pid)  # what closes behind this look would be free as well
    free = (number for number in itertools.count() if number not in taken)
    next(free)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (next(free), 1024))
    with pytest.raises(UnderstudyError):
        daemon.attach(spec, timeout_s=1.0)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    daemon.attach(spec).close()


def test_nobody_but_the_loader_may_publish_commit_or_abort(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.load(spec)
    pid = daemon.stop_loader()
    fingerprint = daemon.status().fingerprint
    assert fingerprint is not None
    intruder = daemon.connect("intruder", "loader")
    calls = [
        ("publish", Manifest(fingerprint, 0, [], [])),
        ("commit", Commit({}, 0.0)),
        ("abort", Abort(UnderstudyError("no").to_body())),
        ("progress", Progress(1, 2)),
    ]
    for verb, params in calls:
        with pytest.raises(RemoteError, match="only the loader"):
            intruder.call(verb, params, timeout_s=5)
    intruder.close()
    os.kill(pid, signal.SIGCONT)
    daemon.wait_state("serving")


# ------------------------------------------------------------------ deaths


def test_a_killed_daemon_takes_its_loader_and_the_half_filled_memory_along(
    socket_path: Path, tmp_path: Path
) -> None:
    spec = spec_for(sparse_checkpoint(tmp_path / "larger", vocab_size=12_000_000))
    daemon = DaemonProcess(socket_path)
    daemon.load(spec)
    wait_until(lambda: has_begun(daemon.status()), "bytes are being read")
    pid = daemon.loader_pid()
    assert pid is not None
    assert weights_in_memory(pid) > 0
    daemon.control.close()
    daemon.kill()
    wait_until(lambda: is_gone(pid), "the loader is gone")


def has_begun(status: CacheStatus) -> bool:
    assert status.state == "loading", "the load was over before it could be looked at"
    return status.progress is not None and status.progress.bytes_done > 0


def is_gone(pid: int) -> bool:
    """No such process, or only its record: nobody is left to reap an orphan's in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_sigterm_stops_it_in_order_even_while_loading(socket_path: Path, spec: LoadSpec) -> None:
    daemon = DaemonProcess(socket_path)
    daemon.load(spec)
    pid = daemon.stop_loader()
    client = daemon.connect("engine-1")
    daemon.process.terminate()
    assert daemon.process.wait(10) == 0, daemon.log.read_text()
    assert not socket_path.exists()
    assert is_gone(pid)
    with pytest.raises(ConnectionClosedError):
        client.call("status", timeout_s=5)
    client.close()
    daemon.control.close()
    assert "Traceback" not in daemon.log.read_text()


def test_a_second_daemon_takes_the_path_and_the_first_leaves_it_alone(
    socket_path: Path, spec: LoadSpec
) -> None:
    with (
        DaemonProcess(socket_path) as first,
        DaemonProcess(socket_path, instance="cache-test-2") as second,
    ):
        first.process.terminate()
        assert first.process.wait(10) == 0
        second.serve(spec)
        second.attach(spec).close()


# ------------------------------------------------------------------ donation


class Held:
    """What a supervisor holds: duplicates of everything."""

    def __init__(self, daemon: DaemonProcess, spec: LoadSpec) -> None:
        self.spec = spec
        self.connection = daemon.connect("holder", "supervisor")
        fingerprint = daemon.status().fingerprint
        assert fingerprint is not None
        raw, self.fds = self.connection.call("attach", Attach(spec, fingerprint, 10), timeout_s=10)
        self.manifest = msgspec.convert(msgspec.json.decode(raw)["manifest"], Manifest)
        self.kv: KvMemory = open_kv(self.connection, GEOMETRY, timeout_s=10)

    def all_fds(self) -> list[int]:
        return [*self.fds, *self.kv.fds, self.kv.table_fd]

    def donate_to(self, daemon: DaemonProcess, *, fds: list[int] | None = None) -> CacheStatus:
        request = Donate(self.manifest, self.spec, self.kv.opened)
        raw, got = daemon.control.call(
            "donate", request, fds=self.all_fds() if fds is None else fds, timeout_s=10
        )
        close_all(got)
        return msgspec.json.decode(raw, type=CacheStatus)

    def close(self) -> None:
        close_all(self.fds)
        self.kv.close()
        self.connection.close()


def test_a_restarted_daemon_serves_the_very_same_memory_without_the_disk(
    socket_path: Path, spec: LoadSpec
) -> None:
    with DaemonProcess(socket_path) as first:
        first.serve(spec)
        reader = Reader(first, spec, "engine-1")
        held = Held(first, spec)
        with Mapping([held.kv.table_fd], [held.kv.opened.table_bytes], writable=True) as area:
            table = SlotTable(area.view())
            table.claim(1)
            table.begin(2, b"r" * 16, [5, 6, 7], b"{}", 64)
            table.append(2, 8)
            table.activate(2)
            table.release()
        first.kill()
        (Path(spec.model_path) / "model.safetensors").rename(Path(spec.model_path) / "hidden")
        with DaemonProcess(socket_path, instance="cache-test-2") as second:
            started = time.monotonic()
            status = held.donate_to(second)
            took_s = time.monotonic() - started
            assert (status.state, status.loads, status.donations) == ("serving", 0, 1)
            assert took_s < 1
            assert reader.ask("rejoin") == "True"
            assert [c.instance for c in second.status().attached] == ["engine-1"]
            assert reader.ask("sum") == reader.sum
            again = Held(second, spec)
            assert os.fstat(again.fds[0]).st_ino == os.fstat(held.fds[0]).st_ino
            with Mapping([again.kv.table_fd], [again.kv.opened.table_bytes]) as area:
                table = SlotTable(area.view())
                assert [record.token_ids for record in table.active()] == [[8]]
                table.release()
            again.close()
        reader.end()
        held.close()


@pytest.mark.parametrize("is_same", [True, False], ids=["donated", "loaded anew"])
def test_kv_is_opened_at_the_daemon_that_followed_a_dead_one(
    socket_path: Path, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor, is_same: bool
) -> None:
    with DaemonProcess(socket_path) as first:
        first.serve(spec)
        held = Held(first, spec)
        weights = first.attach(spec)
        first.kill()
        opened = pool.submit(weights.open_kv, GEOMETRY, timeout_s=20)
        with DaemonProcess(socket_path, instance="cache-test-2") as second:
            if not is_same:
                second.serve(spec)
                with pytest.raises(CacheNotReadyError, match="another copy"):
                    opened.result(30)
            else:
                held.donate_to(second)
                kv = opened.result(30)
                assert os.fstat(kv.fds[0]).st_ino == os.fstat(held.kv.fds[0]).st_ino
                assert [c.instance for c in second.status().attached] == ["engine-1"]
                kv.close()
            weights.close()
        held.close()


def test_a_donation_is_idempotent_and_never_makes_a_second_copy(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    held = Held(daemon, spec)
    assert held.donate_to(daemon).donations == 0  # it is what it serves already
    with DaemonProcess(tmp_path / "other.sock", instance="cache-test-2") as other:
        other.serve(spec)
        with pytest.raises(RemoteError) as caught:
            held.donate_to(other)
        assert caught.value.stable_code == "donation_refused"
    held.close()


def test_a_load_in_progress_and_a_donation_exclude_each_other(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    held = Held(daemon, spec)
    with DaemonProcess(tmp_path / "other.sock", instance="cache-test-2") as other:
        other.load(spec)
        pid = other.stop_loader()
        with pytest.raises(RemoteError) as caught:
            held.donate_to(other)
        assert caught.value.stable_code == "cache_busy"
        os.kill(pid, signal.SIGCONT)
        other.wait_state("serving")
    held.close()


@pytest.mark.parametrize("harm", ["missing", "swapped", "plain", "bytes", "manifest", "kv", "none"])
def test_a_donation_that_does_not_fit_is_refused_and_leaks_nothing(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path, harm: str
) -> None:
    daemon.serve(spec)
    held = Held(daemon, spec)
    fds, extra = held.all_fds(), []
    if harm == "missing":
        fds = fds[:-1]
    elif harm == "swapped":
        fds = fds[::-1]
    elif harm == "none":
        fds = []
    elif harm == "plain":
        extra.append(os.memfd_create("plain"))
        os.ftruncate(extra[0], held.manifest.extent_bytes[0])
        fds[0] = extra[0]
    elif harm == "bytes":  # sealed memory of the right size with other contents
        from cache.host import HostBackend

        arena = HostBackend().create("weights", held.manifest.extent_bytes[0])
        HostBackend().seal_after_publish(arena)
        extra += arena.fds
        fds[0] = extra[0]
    elif harm == "manifest":
        tensors = list(held.manifest.tensors)
        tensors[0] = msgspec.structs.replace(tensors[0], offset_bytes=1 << 30)
        held.manifest = msgspec.structs.replace(held.manifest, tensors=tensors)
    elif harm == "kv":
        geometry = msgspec.structs.replace(GEOMETRY, slots=5)
        held.kv.opened = msgspec.structs.replace(held.kv.opened, geometry=geometry)
    with DaemonProcess(tmp_path / "other.sock", instance="cache-test-2") as other:
        before = open_fds(other.pid)
        with pytest.raises(RemoteError) as caught:
            held.donate_to(other, fds=fds)
        assert caught.value.stable_code in ("donation_refused", "seals")
        assert other.status().state == "empty"
        assert open_fds(other.pid) == before
        other.serve(spec)
    close_all(extra)
    held.close()


# ------------------------------------------------------------------ KV


def test_the_kv_arena_is_zero_filled_sealed_and_the_same_for_everybody(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.serve(spec)
    one, two = daemon.attach(spec, "engine-1"), daemon.attach(spec, "engine-2")
    assert one.connection is not None
    assert two.connection is not None
    first = open_kv(one.connection, GEOMETRY, timeout_s=10)
    second = open_kv(two.connection, GEOMETRY, timeout_s=10)
    assert os.fstat(first.fds[0]).st_ino == os.fstat(second.fds[0]).st_ino
    with (
        Mapping(first.fds, first.opened.extent_bytes, writable=True, tail_bytes=1) as writer,
        Mapping(second.fds, second.opened.extent_bytes) as reader,
    ):
        assert not any(reader.view())
        writer.view()[7] = 9
        assert reader.view()[7] == 9
    with pytest.raises(PermissionError):
        os.ftruncate(first.fds[0], 0)
    with Mapping([second.table_fd], [second.opened.table_bytes]) as area:
        table = SlotTable(area.view())
        assert (table.slots, table.max_length, table.active()) == (4, 64, [])
        table.release()
    other = msgspec.structs.replace(GEOMETRY, slots=8)
    with pytest.raises(RemoteError, match="engine-1") as caught:
        open_kv(two.connection, other, timeout_s=10)
    assert caught.value.stable_code == "cache_in_use"
    one.close()
    wait_until(lambda: len(daemon.status().attached) == 1, "engine-1 has left")
    open_kv(two.connection, other, timeout_s=10).close()
    assert daemon.status().kv == other
    for memory in (first, second):
        memory.close()
    two.close()


@pytest.mark.parametrize(
    "changes", [{"slots": 0}, {"layers": -1}, {"dtype": "int3"}, {"max_length": 1 << 40}]
)
def test_a_kv_shape_that_cannot_be_is_refused(
    daemon: DaemonProcess, spec: LoadSpec, changes: dict[str, int]
) -> None:
    daemon.serve(spec)
    weights = daemon.attach(spec)
    assert weights.connection is not None
    with pytest.raises(RemoteError) as caught:
        open_kv(weights.connection, msgspec.structs.replace(GEOMETRY, **changes), timeout_s=10)
    assert caught.value.stable_code == "slot_table"
    weights.close()


def test_many_engines_that_open_kv_at_once_get_one_arena(
    daemon: DaemonProcess, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    daemon.serve(spec)

    def engine(number: int) -> int:
        weights = daemon.attach(spec, f"engine-{number}")
        assert weights.connection is not None
        memory = open_kv(weights.connection, GEOMETRY, timeout_s=10)
        inode = os.fstat(memory.fds[0]).st_ino
        memory.close()
        weights.close()
        return inode

    assert len(set(pool.map(engine, range(12)))) == 1


# ------------------------------------------------------------------ scrub


def test_a_scrub_of_sound_weights_finds_nothing(daemon: DaemonProcess, spec: LoadSpec) -> None:
    status = daemon.serve(spec)
    result = scrub(daemon.control)
    assert result.mismatches == []
    assert 0 < result.checked_bytes <= status.weights_bytes
    assert daemon.status().state == "serving"


def test_scrub_keeps_to_its_rate_and_others_are_served_meanwhile(
    socket_path: Path, tmp_path: Path, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    config = {"vocab_size": 20_000, "hidden_size": 64}
    spec = spec_for(make_checkpoint(tmp_path / "larger", config=config))
    with DaemonProcess(socket_path, "--scrub-rate", "10") as daemon:
        size_mib = daemon.serve(spec).weights_bytes / (1 << 20)
        own = daemon.connect("scrubber", "supervisor")
        running = pool.submit(scrub, own)
        while not running.done():
            started = time.monotonic()
            daemon.status()
            assert time.monotonic() - started < 0.5
            daemon.attach(spec).close()
        result = running.result()
        own.close()
        assert result.duration_s >= 0.8 * size_mib / 10


def test_sigterm_does_not_wait_for_a_slow_scrub(socket_path: Path, spec: LoadSpec) -> None:
    with DaemonProcess(socket_path, "--scrub-rate", "0.0001") as daemon:
        daemon.serve(spec)
        own = daemon.connect("scrubber", "supervisor")
        own.send(Request(99, "scrub"), timeout_s=5)
        wait_until(lambda: b"scrub" in thread_names(daemon.pid), "the scrub runs")
        daemon.process.terminate()
        assert daemon.process.wait(5) == 0
        own.close()


def thread_names(pid: int) -> bytes:
    """Names of the threads; a thread that was only just named counts as soon as it is there."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return b"scrub" if len(tasks) > 1 else b""


# ------------------------------------------------------------------ bad company


def test_the_daemon_answers_promptly_beside_waiting_stopped_and_rude_clients(
    daemon: DaemonProcess, spec: LoadSpec, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    daemon.load(spec)
    pid = daemon.stop_loader()
    waiting = [pool.submit(daemon.attach, spec, f"engine-{n}") for n in range(40)]
    stopped = [daemon.connect(f"stopped-{n}") for n in range(10)]  # they never read events
    rude = []
    for rubbish in (b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1[", b"\0\0"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(daemon.socket))
        sock.send(rubbish)
        rude.append(sock)
    stop = threading.Event()
    flood = pool.submit(send_status_requests, daemon, stop)
    taken_ms = []
    for _ in range(200):
        started = time.perf_counter()
        assert daemon.status().state == "loading"
        taken_ms.append((time.perf_counter() - started) * 1e3)
    stop.set()
    flood.result(10)
    assert statistics.median(taken_ms) < 20, sorted(taken_ms)[-5:]
    os.kill(pid, signal.SIGCONT)
    for call in waiting:
        call.result(20).close()
    for connection in stopped:
        connection.close()
    for sock in rude:
        sock.close()
    wait_until(lambda: daemon.peers() == 0, "only the test's own connection is left")


def send_status_requests(daemon: DaemonProcess, stop: threading.Event) -> None:
    """A client that asks and asks, and reads its answers slowly."""
    connection = daemon.connect("chatty")
    while not stop.is_set():
        connection.call("status", timeout_s=10)
    connection.close()


def test_two_hundred_failing_attaches_leak_nothing(
    daemon: DaemonProcess, spec: LoadSpec, tmp_path: Path
) -> None:
    daemon.serve(spec)
    other = spec_for(make_checkpoint(tmp_path / "other", seed=9))
    wait_until(lambda: daemon.peers() == 0 and not daemon.loader_pid(), "the loader has left")
    before, own, mapped = open_fds(daemon.pid), open_fds(), weights_in_memory("self")
    fingerprint = daemon.status().fingerprint
    assert fingerprint is not None
    for number in range(200):
        if number % 4 == 0:  # refused: another model
            with pytest.raises(RemoteError):
                daemon.attach(other)
        elif number % 4 == 1:  # gone before the descriptors came
            connection = daemon.connect("hasty")
            connection.send(Request(5, "attach", attach_params(spec, daemon)), timeout_s=5)
            connection.close()
        elif number % 4 == 2:  # gone in the middle of a frame, with descriptors on the way
            connection = daemon.connect("torn")
            frame = encode_frame(Request(5, "donate", fds=2))
            with socket.socket(fileno=os.dup(connection.fileno())) as raw:
                socket.send_fds(raw, [frame[:9]], [0, 0])
            connection.close()
        else:  # descriptors for a verb that takes none
            connection = daemon.connect("generous")
            connection.call("status", fds=[0, 0, 0], timeout_s=5)
            connection.close()
    # At most: when it was counted before, the daemon may still have been closing something.
    wait_until(lambda: open_fds(daemon.pid) <= before, "the daemon has closed everything")
    assert open_fds() == own
    assert weights_in_memory("self") == mapped  # what other tests of this process still map


def attach_params(spec: LoadSpec, daemon: DaemonProcess) -> msgspec.Raw:
    fingerprint = daemon.status().fingerprint
    assert fingerprint is not None
    return msgspec.Raw(msgspec.json.encode(Attach(spec, fingerprint, 5.0)))


def test_a_role_that_is_announced_shows_in_the_status(
    daemon: DaemonProcess, spec: LoadSpec
) -> None:
    daemon.serve(spec)
    weights = daemon.attach(spec, "engine-1")
    weights.announce("primary", 7)
    (client,) = daemon.status().attached
    assert (client.role, client.epoch) == ("primary", 7)
    assert weights.poll()
    weights.close()


def test_a_daemon_for_a_device_without_a_backend_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cache.daemon", "--instance", "x", "--device", "xpu:0"),
            *("--socket", str(tmp_path / "s.sock")),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "xpu:0" in done.stderr
    assert "Traceback" not in done.stderr
