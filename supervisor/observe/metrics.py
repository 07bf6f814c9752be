"""Every metric of the control plane: one registry, typed methods, no label invented elsewhere.

Prefix `understudy_`, base units, counters end in `_total`, state sets are one-hot. All series of
the topology's names exist from the first scrape, with zeros, so that `increase()` sees the first
event. `docs/METRICS.md` is printed from here (`python -m supervisor.observe.metrics_doc`).

Methods are cheap and never raise for an unknown name: a state that is not in its set yet joins
it. `render` takes some milliseconds of CPU; the admin server calls it in a thread.

Longer than most files here: a name, its method and its zeros are found in one place.
"""

import platform
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from cache.protocol import CacheStatus
from engines.contract import EngineStatus
from supervisor.gateway.protocol import GatewayStatus
from supervisor.observe.cachemetrics import CacheCollector
from supervisor.observe.devicememory import DeviceMemoryCollector, DeviceMemoryReport
from supervisor.observe.events import EventLog
from supervisor.observe.gatewaymetrics import GatewayCollector
from supervisor.observe.journal import Journal
from supervisor.observe.looplag import LoopLag
from supervisor.observe.stateset import StateSet
from supervisor.topology.schema import EngineRole, Topology

__all__ = ["DEGRADED_CAUSES", "DURATION_BUCKETS_S", "FAILOVER_PHASES", "Metrics"]

DURATION_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""The targets (100 ms, 200 ms, 600 ms, 1 s) are bounds, so that they can be read off exactly."""

FAILOVER_PHASES: Final = ("detect", "fence", "promote", "verify", "route", "first_token", "total")
FAILOVER_CAUSES: Final = ("dead", "hung", "wrong", "forced")
OUTCOMES: Final = ("done", "failed", "refused")
BATCH_ACTIONS: Final = ("freeze", "thaw", "evict", "resume")
ENGINE_STATES: Final = (
    "absent", "starting", "ready", "standby", "promoting", "primary", "demoting", "batch",
    "frozen", "fencing", "stopped", "evicted", "fatal", "unkillable",
)  # fmt: skip
DEGRADED_CAUSES: Final = ("disk", "descriptors", "start", "address")
VERDICTS: Final = ("healthy", "busy", "degraded", "hung", "dead")
ROLES: Final = ("none", "primary", "standby", "batch")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` beside each counter doubles the page and helps nobody


class Metrics:
    """The registry of one supervisor, filled from its topology."""

    def __init__(self, topology: Topology, *, version: str = "") -> None:
        self.registry = CollectorRegistry()
        workers = [f"gateway-{index}" for index in range(topology.gateway.workers)]
        self._events: EventLog | None = None
        self._journal: Journal | None = None
        self._lag: LoopLag | None = None
        self._count_tasks: Callable[[], int] = lambda: 0
        self._look_lock = threading.Lock()
        self._make_group_families()
        self._make_engine_families()
        self._make_own_families()
        self._gateway = GatewayCollector(
            workers, _models(topology), (g.name for g in topology.groups)
        )
        self._cache = CacheCollector((g.name, d) for g in topology.groups for d in g.devices)
        self._device_memory = DeviceMemoryCollector(
            (g.name, g.devices[0]) for g in topology.groups if g.devices[0].startswith("cuda")
        )
        for collector in (self._gateway, self._cache, self._device_memory):
            self.registry.register(collector)
        ProcessCollector(namespace="understudy", registry=self.registry)
        self._zeros(topology, workers)
        self._build_info.labels(version, platform.python_version()).set(1)

    # ------------------------------------------------------------- recoveries

    def failover(self, group: str, cause: str, outcome: str, phases_s: Mapping[str, float]) -> None:
        """A failover ended: `cause` dead, hung, wrong, forced; `outcome` done, failed, refused."""
        self._failovers.labels(group, cause, outcome).inc()
        for phase, seconds in phases_s.items():
            self.failover_phase(group, phase, seconds)

    def failover_phase(self, group: str, phase: str, seconds: float) -> None:
        """One phase by itself: `first_token` is known only after the failover is over."""
        self._failover_duration.labels(group, phase).observe(seconds)

    def switchover(self, group: str, outcome: str, phases_s: Mapping[str, float]) -> None:
        """A planned switchover ended."""
        self._switchovers.labels(group, outcome).inc()
        for phase, seconds in phases_s.items():
            self._switchover_duration.labels(group, phase).observe(seconds)

    def eviction(self, group: str, engine: str, outcome: str, duration_s: float) -> None:
        """The batch engine gave way: from the order to its memory being back."""
        self._evictions.labels(group, engine, outcome).inc()
        if outcome == "done":
            self._eviction_duration.labels(group).observe(duration_s)

    def batch_action(self, group: str, action: str, outcome: str, duration_s: float) -> None:
        """A step of the ladder: freeze, thaw, evict or resume."""
        self._batch_actions.labels(group, action, outcome).inc()
        if outcome == "done":
            self._batch_action_duration.labels(group, action).observe(duration_s)

    # ----------------------------------------------------------------- groups

    def set_epoch(self, group: str, epoch: int) -> None:
        """The epoch in force."""
        self._epoch.labels(group).set(epoch)

    def set_primary_ready(self, group: str, is_ready: bool) -> None:
        """Whether a primary serves this group."""
        self._primary_ready.labels(group).set(is_ready)

    def set_standby_ready(self, group: str, is_ready: bool) -> None:
        """Whether a verified standby could take over now."""
        self._standby_ready.labels(group).set(is_ready)

    def set_group_state(self, group: str, state: str) -> None:
        """The state of the group as `GET /v1/status` names it."""
        self._group_state.set((group,), state)

    def set_blocked(self, group: str, is_blocked: bool) -> None:
        """Whether failovers by judgement have used up their intensity."""
        self._blocked.labels(group).set(is_blocked)

    def set_zygote_up(self, group: str, is_up: bool) -> None:
        """Whether engines can be forked."""
        self._zygote_up.labels(group).set(is_up)

    def fingerprint_mismatch(self, group: str) -> None:
        """The cache held other weights than the topology names."""
        self._mismatches.labels(group).inc()

    def scrub(self, group: str, mismatches: int) -> None:
        """All checksums were computed again."""
        self._scrubs.labels(group).inc()
        self._scrub_mismatches.labels(group).inc(mismatches)

    def set_cache(self, group: str, status: CacheStatus | None) -> None:
        """What the group's cache daemon reports; None when it is gone."""
        if status is None:
            self._cache.down(group)
        else:
            self._cache.update(group, status)

    def set_device_memory(self, group: str, report: DeviceMemoryReport) -> None:
        """How the memory of the group's card is used."""
        self._device_memory.update(group, report)

    # ---------------------------------------------------------------- engines

    def set_engine(
        self,
        group: str,
        engine: str,
        state: str,
        verdict: str,
        *,
        role: str | None = None,
        status: EngineStatus | None = None,
    ) -> None:
        """State and verdict of an engine; its own numbers where it has reported."""
        self._engine_state.set((group, engine), str(state))
        self._engine_verdict.set((group, engine), str(verdict))
        if role is not None:
            self._engine_role.set((group, engine), str(role))
        if status is not None:
            for name, gauge in self._engine_numbers.items():
                gauge.labels(group, engine).set(getattr(status, name))

    def engine_started(self, group: str, how: str, seconds: float) -> None:
        """From spawn to ready; `how` is zygote or cold."""
        self._engine_start.labels(group, how).observe(seconds)

    def attach(self, group: str, seconds: float) -> None:
        """An engine received, mapped and bound the weights."""
        self._attach.labels(group).observe(seconds)

    def canary(self, group: str, engine: str, seconds: float, *, matches: bool) -> None:
        """An engine answered the known prompt."""
        self._canary.labels(group).observe(seconds)
        if not matches:
            self._canary_failures.labels(group, engine).inc()

    def attested(self, group: str, engine: str) -> None:
        """The operator has declared an unkillable engine harmless."""
        self._attestations.labels(group, engine).inc()

    def engine_crashed(self, group: str, engine: str) -> None:
        """An engine ended by its own fault: a signal of its own, or an exit status."""
        self._crashes.labels(group, engine).inc()

    def restart(self, *, kind: str, group: str, name: str) -> None:
        """A process ended and will be replaced: kind engine, zygote, cache or gateway."""
        self._restarts.labels(kind, group, name).inc()
        if kind == "gateway":
            self._gateway.down(name)
        elif kind == "cache":
            self._cache.down(group)

    def start_refused(self, *, kind: str, group: str, name: str) -> None:
        """The machine refused a start: descriptors, processes or the disk."""
        self._start_refusals.labels(kind, group, name).inc()

    def set_gateway(self, worker: str, status: GatewayStatus | None) -> None:
        """What a gateway worker reports; None when its process is gone."""
        if status is None:
            self._gateway.down(worker)
        else:
            self._gateway.update(worker, status)

    # -------------------------------------------------------------------- own

    def set_degraded(self, causes: Collection[str]) -> None:
        """What is wrong with the supervisor's own resources now; see `DEGRADED_CAUSES`."""
        for cause in DEGRADED_CAUSES:
            self._degraded.labels(cause).set(cause in causes)

    def set_paused(self, is_paused: bool) -> None:
        """Whether automation is paused."""
        self._paused.set(is_paused)

    def watch(
        self,
        *,
        events: EventLog | None = None,
        journal: Journal | None = None,
        loop_lag: LoopLag | None = None,
        count_tasks: Callable[[], int] | None = None,
    ) -> None:
        """Look at these at every scrape: whether they reach the disk, how the event loop does."""
        self._events = events or self._events
        self._journal = journal or self._journal
        self._lag = loop_lag or self._lag
        self._count_tasks = count_tasks or self._count_tasks

    def admin_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One answered request of the admin API; `route` is a template, never a path."""
        self._admin_requests.labels(method, route, str(status)).inc()
        self._admin_duration.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The page for Prometheus. CPU work of some milliseconds; safe in a thread."""
        self._look()
        return generate_latest(self.registry)

    def _look(self) -> None:
        """Read what is watched. A second scrape at the same moment sees the same values."""
        with self._look_lock:
            if self._events is not None:
                self._journal_degraded.labels("events").set(bool(self._events.degraded))
                self._events_recorded.raise_to(self._events.last_seq)
                self._events_lost.raise_to(self._events.lost)
            if self._journal is not None:
                self._journal_degraded.labels("state").set(bool(self._journal.degraded))
            if self._lag is not None:
                self._loop_lag.set(self._lag.max_lag_s)
                self._loop_stalls.raise_to(self._lag.stalls)
            self._tasks.set(self._count_tasks())

    # --------------------------------------------------------------- families

    def _make_group_families(self) -> None:
        self._failovers = self._counter(
            "failovers", "Failovers, by cause and outcome.", "group", "cause", "outcome"
        )
        self._failover_duration = self._histogram(
            "failover_duration_seconds", "Length of a failover's phases.", "group", "phase"
        )
        self._switchovers = self._counter(
            "switchovers", "Planned switchovers, by outcome.", "group", "outcome"
        )
        self._switchover_duration = self._histogram(
            "switchover_duration_seconds", "Length of a switchover's phases.", "group", "phase"
        )
        self._evictions = self._counter(
            "evictions", "Evictions of a batch engine.", "group", "engine", "outcome"
        )
        self._eviction_duration = self._histogram(
            "eviction_duration_seconds", "From the order to the memory being back.", "group"
        )
        self._batch_actions = self._counter(
            "batch_actions", "Steps of the batch ladder.", "group", "action", "outcome"
        )
        self._batch_action_duration = self._histogram(
            "batch_action_duration_seconds", "Length of those steps.", "group", "action"
        )
        self._epoch = self._gauge("epoch", "Epoch in force; rises with each promotion.", "group")
        self._primary_ready = self._gauge("primary_ready", "1 while a primary serves.", "group")
        self._standby_ready = self._gauge(
            "standby_ready", "1 while a verified standby could take over.", "group"
        )
        self._standbys = self._gauge(
            "standbys_configured", "Standby engines that the topology names.", "group"
        )
        self._group_state = self._state_set(
            "group_state", "State of the group, one-hot.", ("group", "state")
        )
        self._blocked = self._gauge(
            "group_blocked", "1 while no failover by judgement is left in the period.", "group"
        )
        self._zygote_up = self._gauge("zygote_up", "1 while engines can be forked.", "group")
        self._mismatches = self._counter(
            "cache_fingerprint_mismatches", "Attaches refused for other weights.", "group"
        )
        self._scrubs = self._counter("cache_scrubs", "Complete checks of the weights.", "group")
        self._scrub_mismatches = self._counter(
            "cache_scrub_mismatches", "Tensors whose bytes differ from their checksum.", "group"
        )

    def _make_engine_families(self) -> None:
        labels = ("group", "engine")
        self._engine_state = self._state_set(
            "engine_state", "State of the engine, one-hot.", (*labels, "state"), ENGINE_STATES
        )
        self._engine_verdict = self._state_set(
            "engine_verdict",
            "Verdict on the engine, one-hot; all 0 before the first.",
            (*labels, "verdict"),
            VERDICTS,
        )
        self._engine_role = self._state_set(
            "engine_role", "Role the engine has now, one-hot.", (*labels, "role"), ROLES
        )
        self._engine_numbers = {
            "active": self._gauge("engine_active", "Rows that decode.", *labels),
            "parked": self._gauge("engine_parked", "Rows that wait for their gateway.", *labels),
            "queued": self._gauge("engine_queued", "Requests that wait for a slot.", *labels),
            "slots": self._gauge("engine_slots", "Rows that the engine has.", *labels),
        }
        self._engine_start = self._histogram(
            "engine_start_seconds", "From spawn to ready, by how.", "group", "how"
        )
        self._attach = self._histogram(
            "attach_seconds",
            "Time to receive, map and bind the weights; for the first engine the load is part "
            "of it.",
            "group",
        )
        self._canary = self._histogram("canary_seconds", "Time of known-answer checks.", "group")
        self._canary_failures = self._counter(
            "canary_failures", "Known-answer checks with a wrong answer.", *labels
        )
        self._restarts = self._counter(
            "restarts", "Processes that ended and were replaced.", "kind", "group", "name"
        )
        self._start_refusals = self._counter(
            "start_refusals",
            "Starts that the machine refused: descriptors, processes or disk.",
            "kind", "group", "name",
        )  # fmt: skip
        self._attestations = self._counter(
            "fence_attestations", "Unkillable engines that the operator declared harmless.", *labels
        )
        self._crashes = self._counter(
            "engine_crashes",
            "Engines that ended by their own fault, or were killed when they had announced it.",
            *labels,
        )

    def _make_own_families(self) -> None:
        self._build_info = self._gauge(
            "build_info", "Always 1; the labels say what runs.", "version", "python"
        )
        self._paused = Gauge(
            "understudy_paused", "1 while automation is paused.", registry=self.registry
        )
        self._degraded = self._gauge(
            "degraded", "1 while the supervisor lacks this; serving goes on.", "cause"
        )
        self._journal_degraded = self._gauge(
            "journal_degraded", "1 while this file does not reach the disk.", "file"
        )
        self._loop_lag = Gauge(
            "understudy_loop_lag_seconds",
            "Largest lag of the supervisor's event loop within the last minute.",
            registry=self.registry,
        )
        self._tasks = Gauge(
            "understudy_tasks",
            "Unfinished tasks of the supervisor's event loop; a rising floor is a leak.",
            registry=self.registry,
        )
        self._loop_stalls = _Total(
            self._counter("loop_stalls", "Stalls of the supervisor's event loop.")
        )
        self._events_recorded = _Total(
            self._counter("events", "Events recorded; the newest sequence number.")
        )
        self._events_lost = _Total(
            self._counter("events_lost", "Events of this run that never reached the disk.")
        )
        self._admin_requests = self._counter(
            "admin_requests", "Requests to the admin API.", "method", "route", "status"
        )
        self._admin_duration = self._histogram(
            "admin_request_duration_seconds", "Time to answer them.", "route"
        )

    def _zeros(self, topology: Topology, workers: Iterable[str]) -> None:
        """Make every series whose labels are known, so that the first event is an increase."""
        for group in topology.groups:
            self._group_zeros(group.name)
            standbys = sum(e.role is EngineRole.STANDBY for e in group.engines)
            self._standbys.labels(group.name).set(standbys)
            for engine in group.engines:
                key = (group.name, engine.name)
                self._engine_state.set(key, "absent")
                self._engine_verdict.set(key, "")
                self._engine_role.set(key, "none")
                self._restarts.labels("engine", *key)
                self._start_refusals.labels("engine", *key)
                self._crashes.labels(*key)
                self._attestations.labels(*key)
                self._canary_failures.labels(*key)
                for gauge in self._engine_numbers.values():
                    gauge.labels(*key)
                if engine.role is EngineRole.BATCH:
                    for outcome in OUTCOMES:
                        self._evictions.labels(*key, outcome)
            for kind in ("zygote", "cache"):
                self._restarts.labels(kind, group.name, f"{kind}-{group.name}")
                self._start_refusals.labels(kind, group.name, f"{kind}-{group.name}")
        for worker in workers:
            self._restarts.labels("gateway", "", worker)
            self._start_refusals.labels("gateway", "", worker)
        self.set_degraded(())
        for file in ("events", "state"):
            self._journal_degraded.labels(file)

    def _group_zeros(self, group: str) -> None:
        for family in (
            self._epoch, self._primary_ready, self._standby_ready, self._zygote_up, self._blocked,
            self._mismatches, self._scrubs, self._scrub_mismatches, self._eviction_duration,
            self._attach, self._canary,
        ):  # fmt: skip
            family.labels(group)
        for outcome in OUTCOMES:
            self._switchovers.labels(group, outcome)
            for cause in FAILOVER_CAUSES:
                self._failovers.labels(group, cause, outcome)
            for action in BATCH_ACTIONS:
                self._batch_actions.labels(group, action, outcome)
        for phase in FAILOVER_PHASES:
            self._failover_duration.labels(group, phase)
            self._switchover_duration.labels(group, phase)
        for action in BATCH_ACTIONS:
            self._batch_action_duration.labels(group, action)
        for how in ("zygote", "cold"):
            self._engine_start.labels(group, how)
        self._group_state.set((group,), "starting")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"understudy_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"understudy_{name}", text, labels, registry=self.registry)

    def _state_set(
        self, name: str, text: str, labels: Sequence[str], states: Iterable[str] = ()
    ) -> StateSet:
        found = StateSet(f"understudy_{name}", text, labels, states)
        self.registry.register(found)
        return found

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(
            f"understudy_{name}", text, labels, buckets=DURATION_BUCKETS_S, registry=self.registry
        )


class _Total:
    """A counter that follows a total kept elsewhere."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._value = 0

    def raise_to(self, value: int) -> None:
        """Count what was added since the last look; a lower value counts nothing."""
        self._counter.inc(max(0, value - self._value))
        self._value = max(self._value, value)


def _models(topology: Topology) -> list[str]:
    """Model ids as the gateway names them; "" counts requests that named none of them."""
    models = [""]
    for group in topology.groups:
        models.append(group.name)
        if any(engine.role is EngineRole.BATCH for engine in group.engines):
            models.append(f"{group.name}:batch")
    return models
