"""Start of an engine, in the model thread: attach, map, bind, prove, and be ready.

Everything here blocks, with deadlines from the spec; meanwhile the main thread answers `starting`
on the control socket. What fails is raised as a typed error and ends the process.
"""

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from cache.arena import ArenaMapping
from cache.client import AttachedWeights, KvMemory, attach, load_private
from cache.protocol import KvGeometry
from engines.contract import EngineSpec, ProgressPage
from engines.native.binding import tensors_of
from engines.native.device import Device, device_of
from engines.native.firstuse import FirstUses
from engines.native.memory import Ballast, PrivateMemory, ServingMemory, SharedMemory
from engines.native.meter import Meter
from engines.native.model import SlotModel
from engines.native.proofs import prove_once
from engines.native.request import RequestPreparer
from engines.native.scheduler import Scheduler, SchedulerLimits
from engines.native.selfcheck import SelfCheck
from engines.native.skeleton import Skeleton, build_skeleton
from engines.native.streams import Outbox

__all__ = ["StartedEngine", "start_engine"]

log = logging.getLogger(__name__)


class Phases:
    """How long each part of the start took, for the log."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()
        self._ms: dict[str, float] = {}

    def done(self, name: str) -> None:
        """The part that ran since the last call has ended."""
        now_s = time.perf_counter()
        self._ms[name] = (now_s - self._last_s) * 1e3
        self._last_s = now_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {ms:.0f} ms" for name, ms in self._ms.items())


@dataclass(slots=True)
class StartedEngine:
    """An engine that is ready for a role, and all that must stay alive with it."""

    scheduler: Scheduler
    preparer: RequestPreparer
    meter: Meter
    weights: AttachedWeights
    weights_mapping: ArenaMapping
    kv: KvMemory | None  # None: private memory, nothing to donate
    check: SelfCheck
    attach_ms: float
    ballast: Ballast


def start_engine(
    spec: EngineSpec, skeleton: Skeleton | None, page: ProgressPage, outbox: Outbox
) -> StartedEngine:
    """Do everything up to `ready`. Takes as long as loading takes when this is the first engine.

    Raises:
        UnderstudyError: one of the typed errors of cache and engine; the process cannot serve.
    """
    phases = Phases()
    device = device_of(spec.load.device)
    device.set_up_process()
    asked = _ask(spec)  # the daemon answers while the driver makes a context
    device.prepare(spec.load.dtype)
    phases.done("device")
    skeleton = skeleton or build_skeleton(spec.load)
    geometry = skeleton.kv_geometry(slots=spec.slots, max_length=spec.max_length)
    ballast = Ballast(spec.ballast_bytes)
    phases.done("skeleton")
    attached = _attach(asked, spec, device)
    phases.done("weights")
    model = SlotModel(skeleton, attached.tensors, geometry, device)
    phases.done("model")
    first_uses = FirstUses(device, spec.load.dtype)  # not sooner: they would hold up attaching
    kv, memory = _open_memory(spec, attached.weights, geometry, device)
    phases.done("kv")
    check = _prove(spec, model, attached.weights)
    phases.done("proof")
    meter = Meter(page)
    scheduler = Scheduler(
        model=model,
        memory=memory,
        decoding=skeleton.decoding,
        eos_ids=skeleton.eos_ids,
        limits=SchedulerLimits(spec.max_queue, spec.adopt_grace_s, spec.max_unsent_tokens),
        meter=meter,
        outbox=outbox,
        exact=check.exact,
    )
    _prepare(scheduler, model, memory, first_uses, phases)
    log.info("start: %s", phases)
    return StartedEngine(
        scheduler=scheduler,
        preparer=RequestPreparer(skeleton, max_length=spec.max_length),
        meter=meter,
        weights=attached.weights,
        weights_mapping=attached.mapping,
        kv=kv,
        check=check,
        attach_ms=attached.took_ms + model.bind_ms,
        ballast=ballast,
    )


@dataclass(frozen=True, slots=True)
class _Attached:
    weights: AttachedWeights
    mapping: ArenaMapping
    tensors: dict[str, torch.Tensor]
    took_ms: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of asking for the weights."""

    weights: AttachedWeights
    took_ms: float


def _receive(spec: EngineSpec) -> _Answer:
    """The weights, from the daemon or, without one, by the loader's own code."""
    began_s = time.perf_counter()
    if spec.cache_socket is None:
        weights = load_private(spec.load)
    else:
        weights = attach(
            Path(spec.cache_socket),
            spec.load,
            instance=spec.instance,
            timeout_s=spec.attach_timeout_s,
            on_mismatch=spec.on_mismatch,
        )
    return _Answer(weights, (time.perf_counter() - began_s) * 1e3)


def _ask(spec: EngineSpec) -> Future[_Answer] | None:
    """Ask the daemon, in a thread; None without one: loading needs the device to be ready.

    A start that fails meanwhile ends the process (`os._exit`), and the thread with it.
    """
    if spec.cache_socket is None:
        return None
    answer: Future[_Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(_receive(spec))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=ask, name="ask-for-weights", daemon=True).start()
    return answer


def _attach(asked: Future[_Answer] | None, spec: EngineSpec, device: Device) -> _Attached:
    """Receive the weights, map them, and make tensors over the mapping."""
    answer = asked.result() if asked is not None else _receive(spec)
    began_s = time.perf_counter()
    mapping = answer.weights.map()
    mapped_s = time.perf_counter()
    arena = device.tensor_at(mapping.address, mapping.size_bytes, torch.uint8)
    tensors = tensors_of(answer.weights.manifest, arena)
    ended_s = time.perf_counter()
    log.info(
        "weights: received in %.1f ms, mapped in %.1f ms, %d tensors in %.1f ms",
        answer.took_ms,
        (mapped_s - began_s) * 1e3,
        len(tensors),
        (ended_s - mapped_s) * 1e3,
    )
    took_ms = answer.took_ms + (ended_s - began_s) * 1e3
    return _Attached(answer.weights, mapping, tensors, took_ms)


def _open_memory(
    spec: EngineSpec, weights: AttachedWeights, geometry: KvGeometry, device: Device
) -> tuple[KvMemory | None, ServingMemory]:
    """The pair's KV and slot table, or those of this engine alone: nothing to donate then."""
    if weights.connection is None or spec.private_kv:
        return None, PrivateMemory(geometry, device=device)
    kv = weights.open_kv(geometry, timeout_s=spec.attach_timeout_s)
    return kv, SharedMemory(kv.opened, kv.fds, kv.table_fd, device=device)


def _prove(spec: EngineSpec, model: SlotModel, weights: AttachedWeights) -> SelfCheck:
    """Find out whether a stream depends on itself alone, and at which attended lengths."""
    with torch.inference_mode():
        check = prove_once(model, weights.manifest.fingerprint, Path(spec.run_dir))
    model.lengths = check.lengths
    log.info(
        "self-check in %.0f ms: exact=%s, attended lengths %s",
        check.duration_ms,
        check.exact,
        check.lengths,
    )
    return check


def _prepare(
    scheduler: Scheduler,
    model: SlotModel,
    memory: ServingMemory,
    first_uses: FirstUses,
    phases: Phases,
) -> None:
    """Everything that the first step after a promotion would else have to wait for."""
    with torch.inference_mode():
        model.try_layer(memory.kv)
        phases.done("first layer")
        is_loaded = first_uses.wait()
        phases.done("first uses")
        if is_loaded:  # else steps run without graphs until there is time to capture them
            scheduler.prepare()
    phases.done("graphs")
