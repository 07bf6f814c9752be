"""One system on one GPU for `benchmarks.h200`: its topology, its streams, its figures."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from chaos.judge import Spread
from chaos.streams import StreamRecord, StreamRequest
from chaos.system import RunningSystem, SystemOptions, free_ports

__all__ = ["Figure", "GpuShape", "gaps_ms", "gpu_system", "requests_for", "timed_ms"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    what: str
    unit: str
    count: int
    p50: float
    p99: float
    worst: float
    target: str = ""
    note: str = ""

    @classmethod
    def of(
        cls,
        what: str,
        values: Sequence[float],
        *,
        unit: str = "ms",
        target: str = "",
        note: str = "",
    ) -> Self:
        """The spread of a sample."""
        spread = Spread.of(values)
        p50, p99, worst = (round(n, 2) for n in (spread.p50, spread.p99, spread.worst))
        return cls(what, unit, spread.count, p50, p99, worst, target, note)


@dataclass(frozen=True, slots=True)
class GpuShape:
    """What the topology of a run says."""

    model: Path
    device: str = "cuda:0"
    quantization: str = "none"
    cache_mode: str = "daemon"
    slots: int = 8
    max_length: int = 32_768
    standby: bool = True
    batch: bool = False


def gpu_system(folder: Path, shape: GpuShape) -> RunningSystem:
    """A system that is not started yet, below a fresh folder."""
    folder.mkdir(parents=True, exist_ok=True)
    gateway_port, admin_port = free_ports(2)
    roles = [("chat-a", "primary", "")]
    if shape.standby:
        roles.append(("chat-b", "standby", ""))
    if shape.batch:
        roles.append(("chat-batch", "batch", ", kv: {slots: 8, max_length: 4096}"))
    engines = "\n".join(
        f"      - {{name: {name}, role: {role}{more}}}" for name, role, more in roles
    )
    dtype = "float32" if shape.device == "cpu" else "bfloat16"
    topology = folder / "topology.yaml"
    topology.write_text(
        f"""\
version: 1
name: h200
state_dir: {folder / "state"}
admin: {{listen: "127.0.0.1:{admin_port}"}}
gateway: {{listen: "127.0.0.1:{gateway_port}", workers: 1}}
groups:
  - name: chat
    model: {{path: {shape.model}, dtype: {dtype}, quantization: {shape.quantization}}}
    devices: ["{shape.device}"]
    cache: {{mode: {shape.cache_mode}, on_mismatch: reload}}
    kv: {{slots: {shape.slots}, max_length: {shape.max_length}}}
    engines:
{engines}
    health: {{interval: 100ms, hang_after: 400ms, canary: 10s}}
    failover: {{intensity: 1000, period: 10m, stable_after: 500ms}}
""",
        "utf-8",
    )
    return RunningSystem(
        folder,
        SystemOptions(device=shape.device, standby=shape.standby, batch=shape.batch),
        topology=topology,
        state_dir=folder / "state",
        ports=(gateway_port, admin_port),
    )


def requests_for(
    prompts: Sequence[int], *, max_tokens: int, vocabulary: int, model: str = "chat"
) -> list[StreamRequest]:
    """One stream for each prompt length, half of them greedy."""
    return [
        StreamRequest(
            name=f"{'greedy' if index % 2 == 0 else 'sampled'}-{index}-of-{length}",
            prompt=" ".join(
                f"w{(n * 7919 + index * 31) % vocabulary}" for n in range(1, length + 1)
            ),
            max_tokens=max_tokens,
            temperature=0.0 if index % 2 == 0 else 1.0,
            seed=1000 + index,
            model=model,
        )
        for index, length in enumerate(prompts)
    ]


def gaps_ms(records: Sequence[StreamRecord], *, after_s: float = 0.0) -> list[float]:
    """Times between two tokens of a stream, once every stream has begun to answer."""
    begun_ns = max(record.arrivals_ns[0] for record in records) + int(after_s * 1e9)
    return [
        (after - before) / 1e6
        for record in records
        for before, after in zip(record.arrivals_ns, record.arrivals_ns[1:], strict=False)
        if before >= begun_ns
    ]


def timed_ms(work: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.monotonic()
    work()
    return (time.monotonic() - began) * 1e3
