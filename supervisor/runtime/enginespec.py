"""What an instance of an engine is told when it is started."""

from typing import Final

from cache.protocol import LoadSpec
from engines.contract import EngineSpec
from supervisor.runtime.services import Services
from supervisor.topology.schema import Engine, EngineRole, Group

__all__ = ["spec_of"]

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
