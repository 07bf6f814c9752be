"""Rules between the values of one topology. Pure: no file, no socket, no machine is looked at."""

import ipaddress
from collections import Counter
from collections.abc import Iterator

from supervisor.core.ladder import parse_condition
from supervisor.topology.commands import check_kinds
from supervisor.topology.findings import Issue, Place, Severity
from supervisor.topology.schema import EngineRole, Group, ListenAddress, Topology
from supervisor.topology.support import unsupported

__all__ = ["check_semantics"]

WARNING = Severity.WARNING


def check_semantics(topology: Topology) -> Iterator[Issue]:
    """Every broken rule, in the order of the file."""
    yield from _addresses(topology)
    yield from _group_names(topology)
    yield from _engine_names(topology)
    for index, group in enumerate(topology.groups):
        place: Place = ("groups", index)
        if not group.runs_commands:
            yield from _devices(group, place)
            yield from _batch(group, place)
        yield from _quantization(group, place)
        yield from _roles(group, place)
        yield from check_kinds(group, place)
        yield from _private_kv(group, place)
        yield from _cache(group, place)
        yield from _timing(group, place)
    yield from unsupported(topology)


def _addresses(topology: Topology) -> Iterator[Issue]:
    admin, gateway = topology.admin.listen, topology.gateway.listen
    admin_place, gateway_place = ("admin", "listen"), ("gateway", "listen")
    if not _is_loopback(admin):
        what = f"the admin API would listen on {admin}, which other machines can reach"
        yield Issue(admin_place, what, f"write 127.0.0.1:{admin.port}")
    if _same(admin, gateway):
        what = f"the admin API and the gateway share the address {gateway}"
        instead = f"write another port, such as {gateway.host}:{_another_port(admin)}"
        yield Issue(gateway_place, what, instead, needs=(admin_place,))
    if not _is_loopback(gateway):
        what = f"the gateway listens on {gateway} and asks nobody for a password"
        instead = f"write 127.0.0.1:{gateway.port}, or keep a firewall or proxy before it"
        yield Issue(gateway_place, what, instead, WARNING)


def _is_loopback(address: ListenAddress) -> bool:
    return address.host == "localhost" or ipaddress.ip_address(address.host).is_loopback


def _quantization(group: Group, place: Place) -> Iterator[Issue]:
    if group.model is None:
        return
    if group.model.quantization != "none" and "cpu" in group.devices:
        what = f"quantization {group.model.quantization} needs a GPU"
        yield Issue((*place, "model", "quantization"), what, "write none, or devices: [cuda:0]")


def _same(one: ListenAddress, other: ListenAddress) -> bool:
    if one.port != other.port or one.port == 0:
        return False
    hosts = {"127.0.0.1" if a.host == "localhost" else a.host for a in (one, other)}
    return len(hosts) == 1 or not hosts.isdisjoint({"0.0.0.0", "::"})


def _another_port(taken: ListenAddress) -> int:
    return 8000 if taken.port != 8000 else 8001


def _group_names(topology: Topology) -> Iterator[Issue]:
    first: dict[str, Place] = {}
    for index, group in enumerate(topology.groups):
        place = ("groups", index, "name")
        if group.name in first:
            what = f"group {group.name!r} exists already, as groups[{first[group.name][1]}]"
            yield Issue(place, what, f"write another name, such as {group.name}-{index + 1}")
        first.setdefault(group.name, place)


def _engine_names(topology: Topology) -> Iterator[Issue]:
    first: dict[str, str] = {}
    for index, group in enumerate(topology.groups):
        for number, engine in enumerate(group.engines):
            here = f"groups[{index}].engines[{number}]"
            if engine.name in first:
                what = f"engine {engine.name!r} exists already, as {first[engine.name]}"
                instead = f"write another name, such as {group.name}-{chr(ord('a') + number % 26)}2"
                yield Issue(("groups", index, "engines", number, "name"), what, instead)
            first.setdefault(engine.name, here)


def _devices(group: Group, place: Place) -> Iterator[Issue]:
    devices = (*place, "devices")
    seen: set[str] = set()
    for number, device in enumerate(group.devices):
        if device in seen:
            yield Issue((*devices, number), f"{device} is named twice", "write each device once")
        seen.add(device)
    if group.tensor_parallel != len(group.devices):
        what = (
            f"tensor_parallel is {group.tensor_parallel} and {len(group.devices)} devices are named"
        )
        instead = f"write tensor_parallel: {len(group.devices)}, or name as many devices"
        yield Issue((*place, "tensor_parallel"), what, instead, needs=(devices,))


def _roles(group: Group, place: Place) -> Iterator[Issue]:
    engines = (*place, "engines")
    roles = [engine.role for engine in group.engines]
    count = Counter(roles)
    primaries = [i for i, role in enumerate(roles) if role is EngineRole.PRIMARY]
    for number in primaries[1:]:
        what = f"group {group.name!r} has two primaries, the other is engines[{primaries[0]}]"
        yield Issue((*engines, number, "role"), what, "write standby", needs=(engines,))
    if primaries:
        return
    if count[EngineRole.STANDBY]:
        number = roles.index(EngineRole.STANDBY)
        what = f"a standby without a primary in group {group.name!r}"
        yield Issue((*engines, number, "role"), what, "write primary", needs=(engines,))
    else:
        what = f"group {group.name!r} has no primary"
        instead = f"write one more engine: {{name: {group.name}-a, role: primary}}"
        yield Issue(engines, what, instead, needs=(engines,))


def _private_kv(group: Group, place: Place) -> Iterator[Issue]:
    for number, engine in enumerate(group.engines):
        set_keys = engine.kv.model_fields_set
        if engine.role is not EngineRole.BATCH and set_keys:
            here = (*place, "engines", number)
            what = f"{engine.role.value} engines share the group's KV and have none of their own"
            instead = "write it under the group's kv, or leave it out"
            yield Issue((*here, "kv"), what, instead, needs=((*here, "role"),))


def _cache(group: Group, place: Place) -> Iterator[Issue]:
    if group.cache.mode == "client" and group.cache.socket is None:
        what = "cache mode client needs the socket of a running daemon"
        instead = "write socket: /path/to/cache.sock beside it, or mode: daemon"
        needs = ((*place, "cache", "socket"),)
        yield Issue((*place, "cache", "mode"), what, instead, needs=needs)
    if group.cache.mode != "client" and group.cache.socket is not None:
        what = f"cache mode {group.cache.mode} takes no socket"
        instead = "write mode: client, or leave the socket out"
        needs = ((*place, "cache", "mode"),)
        yield Issue((*place, "cache", "socket"), what, instead, needs=needs)


def _timing(group: Group, place: Place) -> Iterator[Issue]:
    health = group.health
    if health.hang_after < 2 * health.interval:
        what = f"hang_after is shorter than two intervals ({health.interval:g} s each)"
        instead = f"write {2000 * health.interval:g}ms or more: two samples make a judgement"
        needs = ((*place, "health", "interval"),)
        yield Issue((*place, "health", "hang_after"), what, instead, needs=needs)


def _batch(group: Group, place: Place) -> Iterator[Issue]:
    engines, batch = (*place, "engines"), (*place, "batch")
    if not group.batch.model_fields_set:
        return
    if group.batch.freeze_when is not None:
        try:
            parse_condition(group.batch.freeze_when)
        except ValueError as error:
            what, _, instead = str(error).partition("; ")
            yield Issue((*batch, "freeze_when"), what, instead)
    elif group.batch.evict_after is not None:
        what = "evict_after never comes without freeze_when: only a frozen engine is evicted"
        yield Issue(
            (*batch, "evict_after"), what, 'write freeze_when: "queue > 0" beside it', WARNING
        )
    if all(engine.role is not EngineRole.BATCH for engine in group.engines):
        what = f"group {group.name!r} has rules for a batch engine and none of that role"
        instead = f"write one more engine: {{name: {group.name}-batch, role: batch}}"
        yield Issue(batch, what, instead, WARNING, needs=(engines,), at_key=True)
