"""Does the topology fit this machine: folders, checkpoints, devices, ports, memory.

Only looks. What it finds may change a moment later, so the supervisor still handles each failure
when it comes; the point here is to say everything at once, before anything is started.
"""

import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from cache.blocks import FP8_BLOCK, is_block_fp8
from supervisor.topology.checkpoint import Checkpoint
from supervisor.topology.findings import Issue, Place, Severity, readable
from supervisor.topology.machine import Machine
from supervisor.topology.memory import (
    GATEWAY_BYTES,
    SUPERVISOR_BYTES,
    checkpoint_of,
    estimate_group,
)
from supervisor.topology.schema import Group, ListenAddress, Topology

__all__ = ["check_surroundings", "needed_bytes"]

_FULL = 0.9
_SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_surroundings(topology: Topology, machine: Machine) -> Iterator[Issue]:
    """Everything on this machine that keeps the topology from running."""
    state_dir = topology.state_dir.absolute()
    yield from _state_dir(state_dir)
    # Processes that run already have their weights and their memory: a supervisor that comes back
    # must be able to take them over, though checkpoint or port are out of reach now.
    in_use = machine.is_in_use(state_dir)
    taken = Severity.WARNING if in_use else Severity.ERROR
    for part, listen in (("admin", topology.admin.listen), ("gateway", topology.gateway.listen)):
        yield from _port(listen, (part, "listen"), state_dir, machine, taken=taken)
    missing = Severity.WARNING if in_use else Severity.ERROR
    checkpoints = [checkpoint_of(group) for group in topology.groups]
    for index, (group, checkpoint) in enumerate(zip(topology.groups, checkpoints, strict=True)):
        place: Place = ("groups", index)
        for problem in checkpoint.problems:
            yield Issue((*place, "model", "path"), problem.what, problem.instead, missing)
        yield from _model(group, checkpoint, place)
        if not group.runs_commands:
            yield from _devices(group, place, machine)
        yield from _client_socket(group, place)
        yield from _programs(group, place)
    if not in_use:
        yield from _memory(topology, checkpoints, machine)


# --- state directory ---------------------------------------------------------------------------


def _state_dir(path: Path) -> Iterator[Issue]:
    place = ("state_dir",)
    try:
        found = _problem_of_folder(path)
    except OSError as error:
        found = (f"{path}: {error.strerror}", "write a folder that you own, such as run/demo")
    if found:
        yield Issue(place, *found)


def _problem_of_folder(path: Path) -> tuple[str, str] | None:
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder", "write a folder that you own, such as run/demo"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable", "write a folder that you own, such as run/demo"
    if existing == path:
        facts = path.stat()
        if facts.st_uid != os.geteuid():
            return f"{path} belongs to another user", "write a folder that you own"
        if facts.st_mode & _SHARED_WRITE:
            return f"{path} is writable for others", f"run chmod 700 {path}"
    for parent in existing.parents if existing == path else (existing, *existing.parents):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            what = f"{parent} is writable for everybody, who could replace the folder below it"
            return what, "write a folder below one that is yours"
    return None


# --- addresses ---------------------------------------------------------------------------------


def _port(
    address: ListenAddress, place: Place, state_dir: Path, machine: Machine, *, taken: Severity
) -> Iterator[Issue]:
    if address.port == 0:
        return
    state = machine.port_state(address)
    if state is None or (state.is_taken and machine.held_by_us(state_dir, address)):
        return
    if state.is_taken:
        what = f"port {address.port} is taken: {state.reason}"
        yield Issue(place, what, "write another port, or stop that process", taken)
    else:
        instead = "write 127.0.0.1 and a port above 1023"
        yield Issue(place, f"{address} cannot be listened on: {state.reason}", instead)


def _programs(group: Group, place: Place) -> Iterator[Issue]:
    """Whether the programs of servers can be found, as the system will look for them."""
    for number, engine in enumerate(group.engines):
        if not engine.command or "\0" in (name := engine.command[0]) or shutil.which(name):
            continue
        what = f"there is no program {name!r}"
        instead = "write its full path, or put its folder into PATH"
        if "/" not in name and " " in name:
            instead = "write program and arguments as entries of their own"
        elif Path(name).is_dir():
            what, instead = f"{name} is a folder", "write the path of a program"
        elif "/" in name and Path(name).is_file():
            what, instead = f"{name} is not executable", f"run: chmod +x {shlex.quote(name)}"
        yield Issue((*place, "engines", number, "command", 0), what, instead)


def _client_socket(group: Group, place: Place) -> Iterator[Issue]:
    path = group.cache.socket
    if group.cache.mode == "client" and path is not None and not _is_socket(path):
        what = f"{path} is not the socket of a running cache daemon"
        yield Issue((*place, "cache", "socket"), what, "start the daemon first, or write its path")


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # no permission on the way: nothing that we can use
        return False


# --- model and devices -------------------------------------------------------------------------


def _model(group: Group, checkpoint: Checkpoint, place: Place) -> Iterator[Issue]:
    path = (*place, "model", "path")
    yield from _quantised(group, checkpoint, place)
    limit = checkpoint.number("max_position_embeddings")
    if limit is None:
        return
    if group.kv.max_length > limit:
        yield _too_long(group.kv.max_length, limit, (*place, "kv", "max_length"), path)
    for number, engine in enumerate(group.engines):
        own = engine.kv.max_length
        if own is not None and own > limit:
            yield _too_long(own, limit, (*place, "engines", number, "kv", "max_length"), path)


def _too_long(wanted: int, limit: int, place: Place, path: Place) -> Issue:
    what = f"{wanted} tokens are more than the model's max_position_embeddings of {limit}"
    return Issue(place, what, f"write {limit // 128 * 128} or less", needs=(path,))


def _quantised(group: Group, checkpoint: Checkpoint, place: Place) -> Iterator[Issue]:
    """A quantised checkpoint must be in the one format that is loaded, and be asked for so."""
    settings = checkpoint.text_config("quantization_config")
    if not settings:
        return
    if not isinstance(settings, dict) or not is_block_fp8(settings):
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        named = str(method) if method else "an unnamed method"
        what = f"the checkpoint is quantised with {named}, which is not in the allow-list"
        instead = "write an unquantised checkpoint"
        if method == "fp8":
            what = "the checkpoint is FP8, but not in blocks of 128 x 128 with dynamic activations"
            instead = "write one in block-wise FP8, or an unquantised checkpoint"
        yield Issue((*place, "model", "path"), what, instead)
    elif group.model is not None and group.model.quantization != FP8_BLOCK:
        what = "the checkpoint is quantised in block-wise FP8"
        yield Issue((*place, "model", "quantization"), what, f"write {FP8_BLOCK}")


def _devices(group: Group, place: Place, machine: Machine) -> Iterator[Issue]:
    present = machine.gpu_indices()
    for number, device in enumerate(group.devices):
        kind, _, index = device.partition(":")
        if kind != "cuda":
            continue
        if not present:
            what, instead = f"{device}: no NVIDIA driver or GPU on this machine", "write cpu"
        elif int(index) not in present:
            known = ", ".join(f"cuda:{gpu}" for gpu in sorted(present))
            what, instead = f"this machine has no {device}", f"write one of {known}"
        else:
            continue
        yield Issue((*place, "devices", number), what, instead)


# --- memory ------------------------------------------------------------------------------------


def needed_bytes(topology: Topology, checkpoints: list[Checkpoint]) -> int:
    """Main memory that the whole topology takes; groups on GPUs count their processes only."""
    total = SUPERVISOR_BYTES + GATEWAY_BYTES * topology.gateway.workers
    for group, checkpoint in zip(topology.groups, checkpoints, strict=True):
        estimate = estimate_group(group, checkpoint)
        on_host = group.devices[0] == "cpu"
        total += estimate.total_bytes if on_host else estimate.processes_bytes
    return total


def _memory(topology: Topology, checkpoints: list[Checkpoint], machine: Machine) -> Iterator[Issue]:
    memory = machine.memory()
    needed = needed_bytes(topology, checkpoints)
    if needed <= memory.available_bytes * _FULL:
        return
    fits = needed <= memory.available_bytes
    what = (
        f"about {readable(needed)} of memory are needed and {readable(memory.available_bytes)} "
        f"of {readable(memory.total_bytes)} are available"
    )
    severity = Severity.WARNING if fits else Severity.ERROR
    instead = "write fewer kv slots or a smaller max_length, or free memory"
    yield Issue(("groups",), what, instead, severity, needs=(("gateway", "workers"),), at_key=True)
