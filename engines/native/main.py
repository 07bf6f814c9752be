"""An engine process: main thread for sockets, one thread for the model.

`run` is where a fork of the zygote and a cold start meet. It never returns: the process ends with
`os._exit`, because a model thread inside a computation cannot be joined.

Exit status: 0 after an orderly shutdown, 1 when start-up failed or the model thread died, of a bug
or of its device; one line on stderr says why. After a CUDA error nothing of the process is used
again: its context is lost, and only its own.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn, TypeVarTuple

from cache.descriptors import reserve_descriptors
from cache.errors import UnderstudyError
from engines.contract import (
    Assumed,
    Descriptors,
    EngineSpec,
    EngineState,
    EngineStatus,
    ProgressPage,
)
from engines.errors import NotReadyError
from engines.http import HEALTHY, HttpServer
from engines.native.collector import MeterCollector
from engines.native.commands import Stop
from engines.native.control import ControlServer
from engines.native.device import device_of
from engines.native.devicefaults import explained
from engines.native.faults import Faults
from engines.native.generate import GenerateServer
from engines.native.link import CacheLink
from engines.native.memory import progress_file
from engines.native.meter import Meter
from engines.native.skeleton import Skeleton
from engines.native.startup import StartedEngine, start_engine
from engines.native.streams import Outbox, Outgoing
from engines.native.threads import check_environment

__all__ = ["EngineProcess", "run"]

log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

_SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread may hold the interpreter while another waits: bounds the answer of a control
request while the model thread runs Python between two kernels."""

_STOP_TIMEOUT_S: Final = 2.0
_DRAIN_TIMEOUT_S: Final = 1.0
_SPARE_CONNECTIONS: Final = 64

_STATE_OF_ROLE: Final[dict[str, EngineState]] = {
    "none": "ready",
    "standby": "standby",
    "primary": "serving",
    "batch": "serving",
}


class EngineProcess:
    """The main thread's side: servers, status, and the life of the process."""

    def __init__(self, spec: EngineSpec, skeleton: Skeleton | None, *, began_s: float) -> None:
        self._spec = spec
        self._skeleton = skeleton
        self._began_s = began_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._model_ended: asyncio.Future[None] = self._loop.create_future()
        self._state: EngineState = "starting"
        self._error = ""
        self._start_ms: float | None = None
        self._generate: GenerateServer | None = None
        self._link: CacheLink | None = None
        self.progress_fd, self._progress_memory = progress_file()
        self._page = ProgressPage(memoryview(self._progress_memory))
        self._page.format()
        self._no_meter = Meter(self._page)
        self.started: StartedEngine | None = None
        self.faults = Faults()
        run_dir = Path(spec.run_dir)
        self._control = ControlServer(run_dir / f"{spec.instance}.sock", self)
        self._http = HttpServer(
            run_dir / f"{spec.instance}.http",
            MeterCollector(spec.group, self.status, self._meter),
            self._health,
        )

    async def serve(self) -> int:
        """Run until told to leave, or until something ends us; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.request_shutdown)
        await self._control.start()
        await self._http.start()
        thread = threading.Thread(target=self._model_thread, name="model", daemon=True)
        thread.start()
        status = await self._ended
        await self._leave()
        return status

    # ---------------------------------------------------- what the control needs

    def status(self) -> EngineStatus:
        """The engine as it sees itself."""
        meter, started = self._meter(), self.started
        return EngineStatus(
            name=self._spec.name,
            instance=self._spec.instance,
            pid=os.getpid(),
            state=self._state,
            role=started.scheduler.role if started else "none",
            epoch=started.scheduler.epoch if started else 0,
            exact=started.check.exact if started else False,
            active=meter.active,
            parked=meter.parked,
            queued=meter.queued,
            slots=self._spec.slots,
            attach_ms=started.attach_ms if started else None,
            start_ms=self._start_ms,
            cache_registered=self._link.is_registered if self._link else False,
            error=self._error,
            device_memory=meter.device_memory,
        )

    def role_taken(self, assumed: Assumed) -> None:
        """A role change is in force: tell supervisor and, later, the cache daemon."""
        if self._state not in ("stopping", "failed"):
            self._state = _STATE_OF_ROLE[assumed.role]
        self._control.notify_state()
        if self._link is not None:
            self._link.announce(assumed.role, assumed.epoch)

    def rejoin_cache(self) -> None:
        """The cache daemon was restarted."""
        if self._link is not None:
            self._link.rejoin_now()

    def descriptors(self) -> tuple[Descriptors, list[int]]:
        """Manifest and descriptors, in the order of a donation."""
        started = self.started
        if started is None:
            raise NotReadyError("the engine is still starting")
        fds, kv = list(started.weights.fds), None
        if started.kv is not None:
            kv = started.kv.opened
            fds += [*started.kv.fds, started.kv.table_fd]
        return Descriptors(started.weights.manifest, self._spec.load, kv), fds

    def tear_streams(self) -> None:
        """Only for chaos tests: see `engines.native.faults`."""
        if self._generate is not None:
            self._generate.tear()

    def request_shutdown(self) -> None:
        """Leave in order, as soon as the loop turns."""
        self._end(0)

    # ------------------------------------------------------------- model thread

    def _model_thread(self) -> None:
        outbox = Outbox(self._hand_over)
        device = device_of(self._spec.load.device)
        try:
            started = start_engine(self._spec, self._skeleton, self._page, outbox)
        except BaseException as error:
            if not isinstance(error, UnderstudyError):
                log.exception("the engine could not start")
            self._tell(self._start_failed, explained(error, device, may_ask=True))
            return
        self._tell(self._is_ready, started)
        try:
            started.scheduler.run()
        except BaseException as error:
            log.critical("the model thread died", exc_info=True)
            self._tell(self._model_died, explained(error, device, may_ask=False))
            return
        self._tell(self._model_stopped)

    def _tell(self, call: Callable[[*Ts], None], *arguments: *Ts) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def _hand_over(self, batch: list[Outgoing]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, batch)

    # ------------------------------------------------------- events, in the loop

    def _deliver(self, batch: list[Outgoing]) -> None:
        if self._generate is not None:
            self._generate.deliver(batch)

    def _is_ready(self, started: StartedEngine) -> None:
        if self._ended.done():
            started.scheduler.post(Stop())
            return
        spec = self._spec
        self.started = started
        self._link = CacheLink(started.weights, self._control.notify_state)
        self._generate = GenerateServer(
            Path(spec.run_dir) / f"{spec.instance}.gen",
            started.scheduler,
            started.preparer,
            max_connections=spec.max_queue + 2 * spec.slots + _SPARE_CONNECTIONS,
            wake_below_tokens=spec.max_unsent_tokens // 2,
            on_request=self.faults.on_request,
        )
        self._generate.start()
        # All that start-up built lives as long as the process: never look at it again.
        gc.collect()
        gc.freeze()
        self._start_ms = (time.monotonic() - self._began_s) * 1e3
        self._state = "ready"
        log.info("ready after %.0f ms, attached in %.1f ms", self._start_ms, started.attach_ms)
        self._control.notify_state()

    def _start_failed(self, error: BaseException) -> None:
        code = error.stable_code if isinstance(error, UnderstudyError) else type(error).__name__
        self._fail(f"error: {code}: {error}")

    def _model_died(self, error: BaseException) -> None:
        if isinstance(error, UnderstudyError):
            self._fail(f"error: {error.stable_code}: the model thread died: {error}")
        else:
            self._fail(f"error: engine_failed: the model thread died: {error!r}")

    def _fail(self, line: str) -> None:
        os.write(2, (" ".join(line.split()) + "\n").encode())
        self._state, self._error = "failed", line
        self._control.notify_state()
        self._end(1)

    def _model_stopped(self) -> None:
        if not self._model_ended.done():
            self._model_ended.set_result(None)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    async def _health(self) -> tuple[bool, dict[str, object]]:
        """That the process lives and what it thinks of itself, from the event loop.

        Whether the model still moves is the progress page's and the canary's business.
        """
        is_true = await self.faults.health()
        status = self.status()
        body: dict[str, object] = {
            "state": status.state, "role": status.role, "epoch": status.epoch,
        }  # fmt: skip
        return is_true and status.state in HEALTHY, body

    def _meter(self) -> Meter:
        return self.started.meter if self.started else self._no_meter

    async def _leave(self) -> None:
        """Stop at a step boundary, let last frames leave, close the sockets."""
        if self._state != "failed":
            self._state = "stopping"
            self._control.notify_state()
        if self._generate is not None:
            self._generate.stop_accepting()
        if self.started is not None and self._state == "stopping":
            self.started.scheduler.post(Stop())
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._model_ended
            except TimeoutError:
                log.warning("the model thread did not stop in %s s", _STOP_TIMEOUT_S)
        if self._generate is not None:
            await self._generate.drain(timeout_s=_DRAIN_TIMEOUT_S)
        if self._link is not None:
            self._link.close()
        await self._http.close()
        self._control.close()


def run(spec: EngineSpec, skeleton: Skeleton | None = None) -> NoReturn:
    """Be this engine until it ends. Log and error lines go to descriptors 1 and 2."""
    began_s = time.monotonic()
    reserve_descriptors()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s",
        force=True,
    )
    status = 1
    try:
        check_environment()
        if spec.niceness:
            os.setpriority(os.PRIO_PROCESS, 0, spec.niceness)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        status = asyncio.run(_serve(spec, skeleton, began_s))
    except UnderstudyError as error:
        os.write(2, f"error: {error.stable_code}: {error}\n".encode())
    except Exception:
        log.exception("the engine failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def _serve(spec: EngineSpec, skeleton: Skeleton | None, began_s: float) -> int:
    return await EngineProcess(spec, skeleton, began_s=began_s).serve()
