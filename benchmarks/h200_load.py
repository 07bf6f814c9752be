"""Loading and mapping weights on a real card: `python -m benchmarks.h200_load --out DIR`.

Makes its own checkpoints in a memory file system, so that a read costs what it costs from the page
cache, and measures in one run: the limits (pinned memory to device, reading alone), our loader, and
what other loaders reach from the same files on the same card. It needs 83 GiB free in the folder of
`--work`, 6 GiB on the disk of `--disk`, and some three minutes. Steps run in order of their value;
each writes the report anew, so a run that is cut short leaves what it had.

Other loaders are used where they are installed and are left out, by name, where they are not.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.checkpoints import MODELS, make_checkpoint
from benchmarks.h200_load_report import NotHereError, Report
from cache.arena import backend_for
from cache.checkpoint import read_checkpoint
from cache.client import AttachedWeights, KvMemory, attach, open_kv
from cache.cudadriver import call, use_context
from cache.cudamapping import CudaMapping
from cache.devicefilling import BUFFER_BYTES, fill_device
from cache.errors import CacheError, UnderstudyError
from cache.loader import plan_of
from cache.plan import LoadPlan
from cache.protocol import PROTOCOL, VERSION, CacheStatus, Donate, KvGeometry, Load, LoadSpec
from cache.rpc import Hello
from cache.wire import Connection

__all__ = ["main"]

DEVICE: Final = "cuda:0"
GIB: Final = 1 << 30
_ROOT: Final = Path(__file__).resolve().parent.parent
_COLD_LAYERS: Final = 8
_KV: Final = KvGeometry(
    layers=32, slots=16, kv_heads=8, max_length=32_768, head_dim=128, dtype="bfloat16"
)  # 64 GiB

_RIVALS: Final = {
    "safetensors": """
from safetensors.torch import load_file
def load():
    return [load_file(f, device='cuda:0') for f in files]
""",
    "fastsafetensors": """
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
def load():
    loader = SafeTensorsFileLoader(SingleGroup(), 'cuda:0', nogds=True)
    loader.add_filenames({0: files})
    found = loader.copy_files_to_device()
    return loader, found, [found.get_tensor(name) for name in loader.get_keys()]
""",
    "runai-model-streamer": """
from runai_model_streamer import SafetensorsStreamer
def load():
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device='cuda:0')
        return [(name, tensor.to('cuda:0')) for name, tensor in streamer.get_tensors()]
""",
}
"""Programs that define `load`; imports and the CUDA context are not counted."""

_RIVAL_FRAME: Final = """
import glob, json, sys, time
import torch
files = sorted(glob.glob(sys.argv[1] + '/*.safetensors'))
torch.zeros(1, device='cuda:0')
{load}
times = []
for _ in range(int(sys.argv[2])):
    torch.cuda.synchronize(); started = time.monotonic()
    kept = load(); torch.cuda.synchronize(); times.append(time.monotonic() - started)
    del kept; torch.cuda.empty_cache()
print(json.dumps(times))
"""


def rate(size_bytes: int, seconds: float) -> str:
    """GiB/s, for people."""
    return f"{size_bytes / seconds / GIB:.1f} GiB/s"


# ------------------------------------------------------------------ limits


def pinned_limit(report: Report) -> float:
    """Bytes per second from pinned memory to the device, large blocks, two streams."""
    use_context(0)
    size = 1 * GIB
    host = int(call("cuMemHostAlloc", size, 1))
    ctypes.memset(host, 1, size)
    device = int(call("cuMemAlloc", size))
    streams = [call("cuStreamCreate", 1) for _ in range(2)]
    best = float("inf")
    for _ in range(4):
        started_s = time.monotonic()
        for index in range(16):
            at = index * (size // 16)
            stream = streams[index % 2]
            call("cuMemcpyHtoDAsync", device + at, host + at, size // 16, stream)
        for stream in streams:
            call("cuStreamSynchronize", stream)
        best = min(best, time.monotonic() - started_s)
    call("cuMemFree", device)
    call("cuMemFreeHost", host)
    report.row("limit: pinned memory to device", rate(size, best))
    return size / best


def read_limit(report: Report, folder: Path, name: str, *, direct: bool = False) -> float:
    """Bytes per second of reading alone: sixteen threads, each into one buffer."""
    jobs: list[tuple[int, int, int]] = []
    block = 8 << 20
    with contextlib.ExitStack() as stack:
        for file in sorted(folder.glob("*.safetensors")):
            flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
            fd = os.open(file, flags)
            stack.callback(os.close, fd)
            jobs += [(fd, at, block) for at in range(0, file.stat().st_size, block)]
        local = threading.local()

        def work(job: tuple[int, int, int]) -> int:
            if not hasattr(local, "buffer"):
                local.memory = (ctypes.c_ubyte * (block + 4096))()
                start = -ctypes.addressof(local.memory) % 4096
                local.buffer = memoryview(local.memory).cast("B")[start : start + block]
            return os.preadv(job[0], [local.buffer], job[1])

        started_s = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            size = sum(pool.map(work, jobs))
        seconds = time.monotonic() - started_s
    report.row(f"limit: reading alone, {name}", rate(size, seconds), "16 threads")
    return size / seconds


# ------------------------------------------------------------------ our loader


@contextlib.contextmanager
def arena_for(plan: LoadPlan) -> Iterator[CudaMapping]:
    """Memory of the size of a plan, mapped for writing."""
    backend = backend_for(DEVICE)
    arena = backend.create("weights", plan.manifest.total_bytes)
    try:
        with backend.map(arena.fds, arena.extent_bytes, writable=True) as mapping:
            assert isinstance(mapping, CudaMapping)  # noqa: S101 - DEVICE is one
            yield mapping
    finally:
        arena.close()


def spec_of(folder: Path, quantization: str = "none") -> LoadSpec:
    return LoadSpec(str(folder), dtype="bfloat16", device=DEVICE, quantization=quantization)


def ours(
    report: Report,
    folder: Path,
    name: str,
    *,
    quantization: str = "none",
    repeat: int = 3,
    threads: int | None = None,
    buffer_bytes: int | None = None,
) -> dict[str, Any]:
    """Seconds of filling an arena, checksums included; imports and context are not counted."""
    plan = plan_of(spec_of(folder, quantization), read_checkpoint(folder))
    times = []
    with arena_for(plan) as mapping:
        for _ in range(repeat):
            started_s = time.monotonic()
            fill_device(plan, mapping, threads=threads, buffer_bytes=buffer_bytes)
            times.append(time.monotonic() - started_s)
    best = min(times)
    note = f"{plan.source_bytes / GIB:.1f} GiB in {best:.2f} s, best of {repeat}"
    report.row(f"our loader, {name}", rate(plan.source_bytes, best), note)
    return {
        "seconds": times,
        "bytes": plan.source_bytes,
        "best_bytes_per_s": plan.source_bytes / best,
    }


def tune(
    report: Report, folder: Path, quantization: str, choices: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """How the number of threads and the size of buffers matter."""
    found = {}
    for threads, mib in choices:
        name = f"{threads} threads, 2 x {mib} MiB each"
        if quantization != "none":
            name = f"to block FP8, {name}"
        found[name] = ours(
            report,
            folder,
            name,
            quantization=quantization,
            repeat=2,
            threads=threads,
            buffer_bytes=mib << 20,
        )
    return found


def rivals(report: Report, folder: Path, repeat: int) -> dict[str, Any]:
    """The same files by other loaders, each in a process of its own."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found: dict[str, Any] = {}
    for name, load in _RIVALS.items():
        code = _RIVAL_FRAME.format(load=load)
        environment = {**os.environ, "RUNAI_STREAMER_CONCURRENCY": "16"}
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(repeat)],
            capture_output=True, text=True, timeout=90, check=False, env=environment,
        )  # fmt: skip
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:160]
            found[name] = {"error": reason}
            report.row(name, "does not run here", reason)
            continue
        times = json.loads(done.stdout.strip().splitlines()[-1])
        found[name] = {"seconds": times, "best_bytes_per_s": size / min(times)}
        report.row(name, rate(size, min(times)), f"best of {repeat}")
    return found


# ------------------------------------------------------------------ the daemon


def used_mib() -> int:
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


class Daemon:
    """A cache daemon of our own."""

    def __init__(self, work: Path) -> None:
        self.socket = work / "cache.sock"
        before_s = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cache.daemon", "--socket", str(self.socket)),
                *("--instance", "cache-bench-1", "--device", DEVICE),
            ],
            cwd=_ROOT,
        )
        self.control = self._connect()
        self.start_s = time.monotonic() - before_s

    def _connect(self) -> Connection:
        deadline = time.monotonic() + 30
        while True:
            try:
                connection = Connection.open(self.socket, timeout_s=5)
                hello = Hello(PROTOCOL, VERSION, "bench", 0, "supervisor")
                raw, _ = connection.call("hello", hello, timeout_s=5)
                if msgspec.json.decode(raw)["pid"] == self.process.pid:
                    return connection
            except (OSError, CacheError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.002)

    def status(self) -> CacheStatus:
        return msgspec.json.decode(self.control.call("status", timeout_s=5)[0], type=CacheStatus)

    def load(self, spec: LoadSpec) -> float:
        """Seconds from the request until the weights are served."""
        started_s = time.monotonic()
        self.control.call("load", Load(spec), timeout_s=30)
        while (status := self.status()).state == "loading":
            time.sleep(0.002)
        if status.state != "serving":
            raise RuntimeError(f"the load failed: {status.error}")
        return time.monotonic() - started_s

    def kill(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


def through_daemon(report: Report, work: Path, folder: Path, name: str, kv: bool) -> dict[str, Any]:
    """Load, attach, KV, protection, and a daemon that dies, as a system meets them."""
    found: dict[str, Any] = {}
    quantised = "quantization_config" in read_checkpoint(folder).config
    spec = spec_of(folder, "fp8_block" if quantised else "none")
    use_context(0)
    before_mib = used_mib()
    daemon = Daemon(work)
    found["daemon_start_s"], found["daemon_mib"] = daemon.start_s, used_mib() - before_mib
    report.row("device memory of an empty cache daemon", f"{found['daemon_mib']} MiB")
    found["load_s"] = daemon.load(spec)
    loaded = daemon.status()
    found["loader_s"] = loaded.load_s
    report.row(
        f"load through the daemon, {name}",
        f"{found['load_s']:.2f} s",
        f"loader process included; {loaded.load_s:.2f} s of it plan to commit",
    )
    found["attach"] = [attach_once(daemon, spec) for _ in range(10)]
    spread = sorted(sum(parts.values()) * 1000 for parts in found["attach"])
    report.row(
        f"attach, {name}: connect, receive, map, tensors",
        f"{spread[len(spread) // 2]:.1f} ms",
        f"worst of 10 {spread[-1]:.1f} ms; map alone "
        f"{min(p['map_s'] for p in found['attach']) * 1000:.1f} ms",
    )
    weights = attach(daemon.socket, spec, instance="engine-1", timeout_s=30)
    memory = kv_figures(report, found, weights) if kv else None
    found |= after_death(report, work, daemon, weights, memory)
    return found


def converting(report: Report, work: Path, folder: Path) -> dict[str, float]:
    """A load that quantises, loader process and its import of torch included."""
    daemon = Daemon(work)
    seconds = daemon.load(spec_of(folder, "fp8_block"))
    report.row("load through the daemon, 8B bf16 to block FP8", f"{seconds:.2f} s")
    daemon.kill()
    return {"load_s": seconds}


def attach_once(daemon: Daemon, spec: LoadSpec) -> dict[str, float]:
    """One engine's way to its weights, the context apart."""
    import torch

    from cache.devicetensor import tensor_at_device
    from engines.native.binding import tensors_of

    at = [time.monotonic()]
    weights = attach(daemon.socket, spec, instance="engine-0", timeout_s=30)
    at.append(time.monotonic())
    mapping = weights.map()
    at.append(time.monotonic())
    arena = tensor_at_device(mapping.address, mapping.size_bytes, torch.uint8, 0)
    tensors_of(weights.manifest, arena)
    at.append(time.monotonic())
    mapping.close()
    weights.close()
    names = ("attach_s", "map_s", "tensors_s")
    return {name: at[i + 1] - at[i] for i, name in enumerate(names)}


def kv_figures(report: Report, found: dict[str, Any], weights: AttachedWeights) -> KvMemory:
    assert weights.connection is not None  # noqa: S101 - it came from a daemon
    started_s = time.monotonic()
    memory = open_kv(weights.connection, _KV, timeout_s=60)
    found["kv_open_s"] = time.monotonic() - started_s
    size_gib = _KV.total_bytes / GIB
    report.row(f"KV of {size_gib:.0f} GiB made and cleared", f"{found['kv_open_s']:.2f} s")
    mapping = backend_for(DEVICE).map(memory.fds, memory.opened.extent_bytes, tail_bytes=1 << 20)
    raises = []
    for index in range(20):
        started_s = time.monotonic()
        mapping.protect(writable=index % 2 == 0)
        raises.append(time.monotonic() - started_s)
    found["protect_s"] = raises
    mapping.close()
    report.row(
        f"KV of {size_gib:.0f} GiB raised to read-write",
        f"{sorted(raises[::2])[5] * 1000:.1f} ms",
        f"worst of 10 {max(raises[::2]) * 1000:.1f} ms",
    )
    return memory


def after_death(
    report: Report, work: Path, daemon: Daemon, weights: AttachedWeights, memory: KvMemory | None
) -> dict[str, float]:
    """SIGKILL of the daemon until a new one serves the same memory to a new engine."""
    killed_s = time.monotonic()
    daemon.kill()
    second = Daemon(work)
    listening_s = time.monotonic()
    fds = [*weights.fds, *([*memory.fds, memory.table_fd] if memory else [])]
    request = Donate(weights.manifest, weights.spec, memory.opened if memory else None)
    second.control.call("donate", request, fds=fds, timeout_s=60)
    donated_s = time.monotonic()
    other = attach(second.socket, weights.spec, instance="engine-2", timeout_s=10)
    with other.map():
        attached_s = time.monotonic()
    report.row(
        "cache daemon killed, a new one serves the same memory",
        f"{attached_s - killed_s:.2f} s",
        f"listening {listening_s - killed_s:.2f} s, donation and spot check "
        f"{donated_s - listening_s:.2f} s, attach and map {attached_s - donated_s:.3f} s",
    )
    other.close()
    weights.close()
    if memory:
        memory.close()
    second.kill()
    return {
        "restart_listening_s": listening_s - killed_s,
        "restart_donated_s": donated_s - listening_s,
        "restart_attached_s": attached_s - donated_s,
    }


# ------------------------------------------------------------------ cold


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", "utf-8")
    except OSError:  # not ours to drop: then nothing here is cold
        return False
    return True


def cold(report: Report, disk: Path) -> dict[str, float]:
    """From the disk: reading alone, and our loader."""
    config = {**MODELS["llama-8b"], "num_hidden_layers": _COLD_LAYERS}
    folder = make_checkpoint(disk / "cold", config)
    try:
        if not drop_caches():
            raise NotHereError("the page cache cannot be dropped here")
        found = {"limit": read_limit(report, folder, "cold disk", direct=True)}
        drop_caches()
        found["ours"] = ours(report, folder, "cold disk", repeat=1)["best_bytes_per_s"]
        drop_caches()
        found["limit again"] = read_limit(report, folder, "cold disk, again", direct=True)
        return found
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Measure what time allows; 0 when every step that was run came through."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "benchmarks")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/understudy"))  # noqa: S108
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp/understudy"))  # noqa: S108
    parser.add_argument("--deadline", type=float, default=540.0, metavar="S")
    parser.add_argument("--only", default="", help="names of steps, with commas between")
    arguments = parser.parse_args()
    try:
        report = Report(arguments.out, time.monotonic() + arguments.deadline)
    except UnderstudyError as error:
        sys.stderr.write(f"error: {error.stable_code}: {error}\n")
        return 2
    small, large = arguments.work / "llama-8b", arguments.work / "llama-70b-fp8"
    arguments.work.mkdir(parents=True, exist_ok=True)
    steps: dict[str, tuple[float, Callable[[], Any]]] = {
        "make 8b": (20, lambda: make_checkpoint(small, MODELS["llama-8b"]).name),
        "pinned": (3, lambda: pinned_limit(report)),
        "read first": (5, lambda: read_limit(report, small, "memory file system, first time")),
        "read": (5, lambda: read_limit(report, small, "memory file system, again")),
        "ours": (8, lambda: ours(report, small, f"8B bf16, {BUFFER_BYTES >> 20} MiB buffers")),
        "daemon 8b": (30, lambda: through_daemon(report, arguments.work, small, "8B bf16", True)),
        "rivals": (60, lambda: rivals(report, small, 2)),
        "online fp8": (
            15, lambda: ours(report, small, "8B bf16 to block FP8", quantization="fp8_block"),
        ),
        "daemon fp8": (12, lambda: converting(report, arguments.work, small)),
        "tune": (12, lambda: tune(report, small, "none", ((4, 4), (8, 4), (16, 2), (16, 8)))),
        "tune fp8": (
            15,
            lambda: tune(report, small, "fp8_block", ((4, 16), (8, 8), (8, 32), (16, 16))),
        ),
        "cold": (30, lambda: cold(report, arguments.disk)),
        "make 70b": (15, lambda: make_checkpoint(large, MODELS["llama-70b-fp8"]).name),
        "large": (20, lambda: ours(report, large, "70B block FP8", quantization="fp8_block",
                                   repeat=2)),
        "daemon 70b": (
            25, lambda: through_daemon(report, arguments.work, large, "70B block FP8", False),
        ),
    }  # fmt: skip
    for name, (needs_s, work) in steps.items():
        if not arguments.only or name in arguments.only.split(","):
            report.step(name, needs_s, work)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
