"""What each kind of process answers: gateway worker, zygote, cache daemon. Engines: `fakeengine`.

Only what the supervisor can see is modelled, with times like those measured for the real ones.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cache.errors import ErrorBody
from cache.protocol import (
    Attached,
    CacheStatus,
    Client,
    Fingerprint,
    HelloReply,
    KvGeometry,
    KvOpened,
    Manifest,
    Progress,
)
from engines.contract import ChildRecord, Children, Fork, ZygoteHello, ZygoteSpec
from supervisor.gateway.protocol import (
    FirstToken,
    GatewaySpec,
    GatewayStatus,
    GroupRoute,
    Routes,
    RoutesAck,
)
from tests.sim.proc import Memory, Proc, ProcState, Reply
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.connections import FakeClient

__all__ = ["GEOMETRY", "MANIFEST", "FakeCache", "FakeGateway", "FakeZygote"]

FINGERPRINT = Fingerprint(
    "/m", "Sim", "", "00", 1, 0, 1, 0, 1, 1, "none", "", "float32", "cpu:sim", "0", 1, 1
)
MANIFEST = Manifest(FINGERPRINT, 4096, [4096], [])
GEOMETRY = KvGeometry(layers=1, slots=4, kv_heads=1, max_length=128, head_dim=4, dtype="float32")


class FakeGateway(Proc):
    """A gateway worker: its table, and whether it forwards anything."""

    kind = "gateway"

    def __init__(self, world: World, spec: GatewaySpec, listen_fd: int) -> None:
        super().__init__(world, spec.instance)
        self.listener = world.new_memory("socket", self, os.dup(listen_fd))
        self.table = Routes(0, [])
        self.later(self.between(0.1, 0.4), lambda: self._up(spec))

    def _up(self, spec: GatewaySpec) -> None:
        if self.world.take_doom(self):
            return
        self.listen(spec.control_socket)
        self._report()

    def _report(self) -> None:
        self.notify("stats", self._status())
        self.later(1.0, self._report)

    def hello(self) -> GatewayStatus:
        """See the protocol."""
        return self._status()

    def _status(self) -> GatewayStatus:
        epochs = {g.group: g.epoch for g in self.table.groups}
        return GatewayStatus(self.instance, self.process.pid, self.table.sequence, epochs, 0, 0.0)

    def route(self, group: str) -> GroupRoute | None:
        """Where it sends requests; None before the first table."""
        return next((g for g in self.table.groups if g.group == group), None)

    def routes_to(self, instance: str, epoch: int) -> bool:
        """Whether requests go to that engine now."""
        if self.state is not ProcState.RUNNING:
            return False
        targets = [t for g in self.table.groups for t in (g.primary, g.batch)]
        return any(t and (t.instance, t.epoch) == (instance, epoch) for t in targets)

    def handle(
        self, verb: str, params: Any, memories: Sequence[Memory | None], reply: Reply
    ) -> None:
        """See the protocol."""
        match verb:
            case "routes":
                self.later(self.between(0.0002, 0.003), lambda: self._replace(params, reply))
            case "status":
                reply(self._status())
            case "listener":
                reply(None, [self.listener])
            case _:
                super().handle(verb, params, memories, reply)

    def _replace(self, table: Routes, reply: Reply) -> None:
        if table.sequence < self.table.sequence:  # left in a connection by a former supervisor
            reply(RoutesAck(self.table.sequence, 0))
            return
        cut = 0
        for new in table.groups:
            old = self.route(new.group)
            if old is not None and new.epoch < old.epoch:
                self.world.judge.got_stale_routes(self, new.epoch, old.epoch)
                reply(error=ErrorBody("stale_epoch", "older than what is in force"))
                return
            cut += self._change(old, new)
        self.table = table
        reply(RoutesAck(table.sequence, cut))

    def _change(self, old: GroupRoute | None, new: GroupRoute) -> int:
        """What one group's new route does to its streams; how many are cut."""
        if old is not None and old.primary == new.primary:
            return 0
        if new.primary is not None:
            token = FirstToken(new.group, new.epoch, self.world.clock.now_ns, "slot")
            self.later(self.between(0.002, 0.01), lambda: self.notify("first_token", token))
        has_streams = old is not None and old.primary is not None and self.world.has_load
        return 3 if has_streams else 0

    def discard(self) -> None:
        """Its copy of the listening socket."""
        if self.listener.source_fd >= 0:
            os.close(self.listener.source_fd)
            self.listener.source_fd = -1


class FakeZygote(Proc):
    """Forks engines, reaps them, reports."""

    kind = "zygote"

    def __init__(self, world: World, spec: ZygoteSpec) -> None:
        super().__init__(world, spec.instance)
        self._records: list[ChildRecord] = []
        self.later(self.between(0.3, 1.0), lambda: self._up(spec))

    def _up(self, spec: ZygoteSpec) -> None:
        if not self.world.take_doom(self):
            self.listen(spec.control_socket)

    def hello(self) -> ZygoteHello:
        """See the protocol."""
        return ZygoteHello(self.instance, self.process.pid, 1, 1.0)

    def handle(
        self, verb: str, params: Any, memories: Sequence[Memory | None], reply: Reply
    ) -> None:
        """See the protocol."""
        match verb:
            case "fork":
                client = self.asked_over
                self.later(self.between(0.01, 0.05), lambda: self._fork(params, client, reply))
            case "children":
                reply(Children(self._records[-100:]))
            case _:
                super().handle(verb, params, memories, reply)

    def _fork(self, fork: Fork, client: "FakeClient | None", reply: Reply) -> None:
        """A fork of which nobody can be told any more happens all the same: a stray."""
        is_stray = client is None or client.is_closed or client.machine.is_gone
        if self.world.failing_forks > 0:
            self.world.failing_forks -= 1
            reply(error=ErrorBody("fork_failed", "no memory for a process"))
            return
        child = self.world.new_engine(fork.spec, parent=self, is_stray=is_stray)
        reply(ChildRecord(child.instance, child.process.pid, child.process.start_ticks))

    def child_reaped(self, child: Proc) -> None:
        """Report how it ended."""
        record = ChildRecord(
            child.instance, child.process.pid, child.process.start_ticks, child.wait_status
        )
        self._records.append(record)
        self.when_running(lambda: self.notify("exited", record))


class FakeCache(Proc):
    """A cache daemon."""

    kind = "cache"

    def __init__(self, world: World, instance: str, socket: str) -> None:
        super().__init__(world, instance)
        self.weights: Memory | None = None
        self.kv: list[Memory] = []
        self._state = "empty"
        self._error: ErrorBody | None = None
        self._loads = self._donations = 0
        self.attached: dict[str, Proc] = {}
        self.later(self.between(0.05, 0.15), lambda: self._up(socket))

    def _up(self, socket: str) -> None:
        if not self.world.take_doom(self):
            self.listen(socket)

    @property
    def is_serving(self) -> bool:
        """Whether an engine may attach now."""
        return self._state == "serving" and self.state is ProcState.RUNNING

    def hello(self) -> HelloReply:
        """See the protocol."""
        return HelloReply(self.instance, self.process.pid, self._state)  # type: ignore[arg-type]

    def _status(self) -> CacheStatus:
        return CacheStatus(
            state=self._state,  # type: ignore[arg-type]
            instance=self.instance,
            pid=self.process.pid,
            device="cpu",
            weights_bytes=4096 if self.weights else 0,
            loads=self._loads,
            donations=self._donations,
            attached=[Client(p.instance, "", 0) for p in self.attached.values()],
            fingerprint=FINGERPRINT if self._state == "serving" else None,
            kv=GEOMETRY if self.kv else None,
            error=self._error,
        )

    def handle(
        self, verb: str, params: Any, memories: Sequence[Memory | None], reply: Reply
    ) -> None:
        """See the protocol."""
        match verb:
            case "status":
                reply(self._status())
            case "load":
                self._load(reply)
            case "attach":
                assert self.weights is not None
                reply(Attached(MANIFEST), [self.weights])
            case "kv.open":
                reply(KvOpened(GEOMETRY, [4096], 4096), self.open_kv())
            case "donate":
                self.later(self.between(0.005, 0.05), lambda: self._donate(memories, reply))
            case _:
                super().handle(verb, params, memories, reply)

    def forget(self, instance: str) -> None:
        """The connection of an engine has ended."""
        self.attached.pop(instance, None)

    def open_kv(self) -> list[Memory]:
        """The KV extent and the slot table; made when absent."""
        if not self.kv:
            self.kv = [self.world.new_memory("kv", self), self.world.new_memory("kv", self)]
            self.notify("state", self._status())
        return self.kv

    def _load(self, reply: Reply) -> None:
        if self._state in ("empty", "failed"):
            self._state, self._error = "loading", None
            self.world.judge.note(f"{self} loads the weights from disk")
            self.world.check_load(self)
            self.later(self.between(0.2, 0.4), lambda: self.notify("progress", Progress(1, 2)))
            self.later(self.between(0.4, 0.9), self._loaded)
        reply(self._status())

    def _loaded(self) -> None:
        if self.world.failing_loads > 0:
            self.world.failing_loads -= 1
            self._state, self.is_blemished = "failed", "failing load"
            self._error = ErrorBody("load_failed", "the loader died")
        else:
            self._state, self._loads = "serving", self._loads + 1
            self.weights = self.world.new_memory("weights", self)
        self.notify("state", self._status())

    def _donate(self, memories: Sequence[Memory | None], reply: Reply) -> None:
        kinds = [m.kind if m is not None else "closed" for m in memories]
        if kinds not in (["weights"], ["weights", "kv", "kv"]):
            self.world.judge.breach(f"a donation of {kinds}")
            reply(error=ErrorBody("donation_refused", "descriptors do not fit"))
            return
        held = [m for m in memories if m is not None]
        self.weights, self.kv = held[0], held[1:]
        self._state, self._donations = "serving", self._donations + 1
        reply(self._status())
        self.notify("state", self._status())
