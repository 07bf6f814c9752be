"""What `supervisor run` would start, in order, and what it would take. Nothing is touched.

Argument lists are shown as far as they are known before the start: instance names carry random
digits, and specifications go to the children as files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.topology import memory
from supervisor.topology.commands import placeholders_in
from supervisor.topology.memory import GroupMemory, checkpoint_of, estimate_group
from supervisor.topology.schema import Engine, EngineRole, Group, Topology

__all__ = ["GroupPlan", "Plan", "PlannedProcess", "plan_topology"]

_ROLE_ORDER: Final = (EngineRole.PRIMARY, EngineRole.STANDBY, EngineRole.BATCH)


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process to come."""

    kind: str
    name: str
    group: str
    device: str
    argv: tuple[str, ...]
    started_by: str
    """`supervisor`, `zygote` (a fork), `cache daemon` or `engine` (their child)."""
    sockets: tuple[str, ...]
    """`<8 hex>` stands for the digits that tell one life of a process from the next."""
    memory_bytes: int
    """Its own memory; weights and KV that it shares are counted with the cache daemon."""
    is_short_lived: bool = False


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one group takes."""

    name: str
    model: str
    devices: tuple[str, ...]
    memory: GroupMemory


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything, in start order."""

    name: str
    state_dir: str
    admin_listen: str
    admin_socket: str
    gateway_listen: str
    processes: tuple[PlannedProcess, ...]
    groups: tuple[GroupPlan, ...]
    total_bytes: int


def plan_topology(topology: Topology) -> Plan:
    """The plan for a topology that has been loaded; looks at checkpoints, changes nothing."""
    state_dir = topology.state_dir.absolute()
    # As the daemon starts them: the address answers at once, requests wait for a primary.
    processes = [_supervisor(topology, state_dir), *_gateways(topology, state_dir / "run")]
    groups = []
    for group in topology.groups:
        estimate = estimate_group(group, checkpoint_of(group))
        model = str(group.model.path) if group.model is not None else ""
        groups.append(GroupPlan(group.name, model, tuple(group.devices), estimate))
        processes += _group_processes(group, estimate, state_dir / "run")
    return Plan(
        name=topology.name,
        state_dir=str(state_dir),
        admin_listen=str(topology.admin.listen),
        admin_socket=str(state_dir / "admin.sock"),
        gateway_listen=str(topology.gateway.listen),
        processes=tuple(processes),
        groups=tuple(groups),
        total_bytes=sum(p.memory_bytes for p in processes if not p.is_short_lived),
    )


def _supervisor(topology: Topology, state_dir: Path) -> PlannedProcess:
    return PlannedProcess(
        kind="supervisor",
        name=topology.name,
        group="",
        device="",
        argv=("supervisor", "run"),
        started_by="operator",
        sockets=(str(state_dir / "admin.sock"), str(topology.admin.listen)),
        memory_bytes=memory.SUPERVISOR_BYTES,
    )


def _group_processes(group: Group, estimate: GroupMemory, run: Path) -> Iterator[PlannedProcess]:
    if group.runs_commands:
        for engine in _in_start_order(group):
            yield from _server(group, engine, run)
        return
    if group.cache.mode == "daemon":
        yield from _cache(group, estimate, run)
    name = f"zygote-{group.name}"
    yield PlannedProcess(
        kind="zygote",
        name=name,
        group=group.name,
        device="",
        argv=("python", "-m", "engines.zygote", f"<{name}.json>"),
        started_by="supervisor",
        sockets=(_instance(run, name, "sock"),),
        memory_bytes=memory.ZYGOTE_BYTES,
    )
    for engine in _in_start_order(group):
        own_weights = estimate.weights_bytes or 0 if group.cache.mode == "off" else 0
        private_kv = estimate.private_kv_bytes.get(engine.name, 0)
        yield PlannedProcess(
            kind=f"engine ({engine.role.value})",
            name=engine.name,
            group=group.name,
            device=",".join(group.devices),
            argv=("python", "-m", "engines.native", f"<{engine.name}.json>"),
            started_by="zygote",
            sockets=tuple(_instance(run, engine.name, s) for s in ("sock", "gen", "http")),
            memory_bytes=memory.ENGINE_BYTES + own_weights + private_kv + engine.ballast,
        )


def _in_start_order(group: Group) -> list[Engine]:
    return sorted(group.engines, key=lambda engine: _ROLE_ORDER.index(engine.role))


def _server(group: Group, engine: Engine, run: Path) -> Iterator[PlannedProcess]:
    """The adapter and the server below it."""
    yield PlannedProcess(
        kind=f"engine ({engine.role.value})",
        name=engine.name,
        group=group.name,
        device="",
        argv=("python", "-m", "engines.command", f"<{engine.name}.json>"),
        started_by="supervisor",
        sockets=tuple(_instance(run, engine.name, s) for s in ("sock", "gen", "http")),
        memory_bytes=memory.COMMAND_BYTES,
    )
    command = tuple(engine.command or ())
    uses_socket = any("socket" in placeholders_in(word) for word in command)
    yield PlannedProcess(
        kind="server",
        name=engine.name,
        group=group.name,
        device="",  # its command says where it computes
        argv=command,
        started_by="engine",
        sockets=(_instance(run, engine.name, "srv") if uses_socket else "127.0.0.1:<free port>",),
        memory_bytes=0,
    )


def _cache(group: Group, estimate: GroupMemory, run: Path) -> Iterator[PlannedProcess]:
    device, socket = group.devices[0], str(run / f"cache-{group.name}.sock")
    shared = (estimate.weights_bytes or 0) + (estimate.kv_bytes or 0)
    yield PlannedProcess(
        kind="cache daemon",
        name=f"cache-{group.name}",
        group=group.name,
        device=device,
        argv=("python", "-m", "cache.daemon", "--socket", socket, "--device", device),
        started_by="supervisor",
        sockets=(socket,),
        memory_bytes=memory.CACHE_DAEMON_BYTES + shared,
    )
    yield PlannedProcess(
        kind="loader",
        name=f"loader-{group.name}",
        group=group.name,
        device=device,
        argv=("python", "-m", "cache.loader", "--socket", socket),
        started_by="cache daemon",
        sockets=(),
        memory_bytes=memory.LOADER_BYTES,
        is_short_lived=True,
    )


def _gateways(topology: Topology, run: Path) -> Iterator[PlannedProcess]:
    for number in range(topology.gateway.workers):
        name = f"gateway-{number}"
        yield PlannedProcess(
            kind="gateway worker",
            name=name,
            group="",
            device="",
            argv=("python", "-m", "supervisor.gateway", f"<{name}.json>"),
            started_by="supervisor",
            sockets=(_instance(run, name, "sock"), str(topology.gateway.listen)),
            memory_bytes=memory.GATEWAY_BYTES,
        )


def _instance(run: Path, name: str, suffix: str) -> str:
    return str(run / f"{name}-<8 hex>.{suffix}")
