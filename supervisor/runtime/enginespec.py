"""What an instance of an engine is told when it is started."""

import os
from typing import Final

from cache.protocol import LoadSpec
from engines.contract import CommandSpec, EngineSpec
from supervisor.runtime.services import Services
from supervisor.topology.schema import Engine, EngineRole, Group

__all__ = ["command_spec_of", "spec_of"]

_BATCH_NICENESS: Final = 10


def spec_of(
    services: Services,
    group: Group,
    engine: Engine,
    instance: str,
    *,
    load: LoadSpec,
    attach_timeout_s: float,
) -> EngineSpec:
    """The specification of the next instance, from the topology."""
    cache, is_batch = group.cache, engine.role is EngineRole.BATCH
    socket = cache.socket if cache.mode == "client" else services.paths.cache(group.name)
    return EngineSpec(
        name=engine.name,
        group=group.name,
        instance=instance,
        run_dir=str(services.paths.run),
        cache_socket=None if cache.mode == "off" else str(socket),
        load=load,
        on_mismatch=cache.on_mismatch,
        slots=engine.kv.slots or group.kv.slots,
        max_length=engine.kv.max_length or group.kv.max_length,
        private_kv=is_batch,
        max_queue=group.max_queue,
        adopt_grace_s=group.failover.adopt_grace,
        attach_timeout_s=attach_timeout_s,
        ballast_bytes=engine.ballast,
        niceness=_BATCH_NICENESS if is_batch else 0,
    )


def command_spec_of(
    services: Services, group: Group, engine: Engine, instance: str, *, load_timeout_s: float
) -> CommandSpec:
    """The same for an adapter and the server that it runs."""
    return CommandSpec(
        name=engine.name,
        group=group.name,
        instance=instance,
        run_dir=str(services.paths.run),
        command=engine.command or [],
        max_open=group.kv.slots + group.max_queue,
        start_timeout_s=group.health.start_timeout + load_timeout_s,
        hang_after_s=group.health.hang_after,
        python_path=os.environ.get("PYTHONPATH"),
    )
