"""The adapter: a process that speaks the house's engine contract and has a server as its child.

It computes nothing and has one thread. Role and epoch are its own; the server knows of neither.

Exit status: that of the server where it ended by itself, by the same signal if it was one, so that
whoever reaps the adapter learns how the server died; 0 after an orderly shutdown; 1 when the
server could not be brought up. One line on stderr says why.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from cache.descriptors import reserve_descriptors
from cache.errors import UnderstudyError
from engines.command.api import HttpEngine
from engines.command.canary import Canary
from engines.command.collector import StatusCollector
from engines.command.control import ControlServer
from engines.command.errors import (
    ServerEndedError,
    ServerNotReadyError,
    ServerUnusableError,
    StrangerListensError,
)
from engines.command.generate import GenerateServer
from engines.command.process import (
    ServerProcess,
    become_subreaper,
    how_it_ended,
    use_all_descriptors,
)
from engines.command.progress import Progress
from engines.command.relay import Relay
from engines.contract import (
    DRAIN_LEASE_S,
    Assume,
    Assumed,
    CanaryResult,
    CommandSpec,
    Drained,
    EngineState,
    EngineStatus,
    Generate,
    GenerateError,
    Role,
)
from engines.errors import NotReadyError, RoleNotPossibleError, StaleEpochError
from engines.http import HEALTHY, HttpServer

__all__ = ["CommandEngine", "run"]

log = logging.getLogger(__name__)

_GRACE_S: Final = 2.0
_READY_S: Final = 0.2  # between two questions to a server that starts
_ASK_S: Final = 2.0
_HEALTH_S: Final = 0.4
_OWNER_S: Final = 1.0
_SHORTEST_LOOK_S: Final = 0.05
_LONGEST_LOOK_S: Final = 1.0

_STATE_OF_ROLE: Final[dict[str, EngineState]] = {
    "none": "ready", "standby": "standby", "primary": "serving",
}  # fmt: skip


class CommandEngine:
    """Servers, status, and the life of the process."""

    def __init__(
        self, spec: CommandSpec, *, began_s: float, descriptors: tuple[int, int] | None = None
    ) -> None:
        self._spec = spec
        self._began_s = began_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._state: EngineState = "starting"
        self._role: Role = "none"
        self._epoch = 0
        self._drains_until_s = 0.0
        self._start_ms: float | None = None
        self._error = ""
        self._progress = Progress()
        self._run_dir = Path(spec.run_dir)
        self._process = ServerProcess(
            spec.command,
            self._path("srv"),
            python_path=spec.python_path,
            descriptors=descriptors,
            on_delay=self._tell,
        )
        self._server: HttpEngine | None = None
        self._canary: Canary | None = None
        self._generate: GenerateServer | None = None
        self._control = ControlServer(self._path("sock"), self)
        self._http = HttpServer(
            self._path("http"), StatusCollector(spec.group, self.status), self._health
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _path(self, suffix: str) -> Path:
        return self._run_dir / f"{self._spec.instance}.{suffix}"

    async def serve(self) -> int:
        """Run until told to leave, or until the server ends; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.request_shutdown)
        self._loop.add_signal_handler(signal.SIGCHLD, self._process.reap)
        await self._control.start()
        await self._http.start()
        self._tasks.append(self._loop.create_task(self._live()))
        status = await self._ended
        await self._leave()
        return status

    # ---------------------------------------------------- what the control needs

    @property
    def progress_fd(self) -> int:
        """The progress page."""
        return self._progress.fd

    def status(self) -> EngineStatus:
        """The engine as it sees itself."""
        return EngineStatus(
            name=self._spec.name,
            instance=self._spec.instance,
            pid=os.getpid(),
            state=self._state,
            role=self._role,
            epoch=self._epoch,
            exact=False,
            active=self._progress.requests - self._progress.queued,
            queued=self._progress.queued,
            slots=self._spec.max_open,
            start_ms=self._start_ms,
            error=self._error,
            resumable=False,
        )

    def assume(self, order: Assume) -> Assumed:
        """See `EngineHost`."""
        if self._generate is None or self._state in ("starting", "stopping", "failed"):
            raise NotReadyError(f"the engine is {self._state}")
        if order.epoch < self._epoch:
            raise StaleEpochError(ours=self._epoch, theirs=order.epoch)
        if order.role == "batch":
            raise RoleNotPossibleError("a server cannot be the batch engine: it cannot be frozen")
        if order.role != "primary":
            self._generate.cut_all()
        self._role, self._epoch, self._drains_until_s = order.role, order.epoch, 0.0
        self._state = _STATE_OF_ROLE[order.role]
        self._progress.set_epoch(order.epoch)
        self._control.notify_state()
        return Assumed(order.role, order.epoch)

    async def canary(self) -> CanaryResult:
        """See `EngineHost`."""
        if self._canary is None or self._state == "starting":
            raise NotReadyError("the server is still starting")
        return await self._canary.ask()

    def drain(self) -> Drained:
        """See `EngineHost`."""
        # A lease: whoever ordered it may be gone before the role is, and requests must go on then.
        self._drains_until_s = time.monotonic() + DRAIN_LEASE_S
        return Drained(self._generate.unfinished if self._generate is not None else 0)

    def request_shutdown(self) -> None:
        """See `EngineHost`."""
        self._end(0)

    # ----------------------------------------------------------------- requests

    def _gate(self, frame: Generate) -> GenerateError | None:
        """Why a request is not for us now; None: it is."""
        is_draining = time.monotonic() < self._drains_until_s
        if self._role != "primary" or self._state != "serving" or is_draining:
            what = "draining" if is_draining else self._state
            text = f"{self._spec.name} takes no requests: it is {what}"
            return GenerateError("not_serving", text, status=503, resumable=True)
        if frame.epoch != self._epoch:
            text = f"epoch {frame.epoch} was asked, this engine is at epoch {self._epoch}"
            return GenerateError("stale_epoch", text, status=503, resumable=True)
        return None

    async def _health(self) -> tuple[bool, dict[str, object]]:
        """What the server says of itself; no answer is no statement: it may be busy."""
        status = self.status()
        answer: bool | None = status.state in HEALTHY
        if answer:
            server = self._server
            answer = await server.is_healthy(timeout_s=_HEALTH_S) if server is not None else None
        body: dict[str, object] = {
            "state": status.state, "role": status.role, "epoch": status.epoch, "server": answer,
        }  # fmt: skip
        return answer is not False, body

    # -------------------------------------------------------------------- life

    async def _live(self) -> None:
        """Start the server, watch it, and end with it."""
        try:
            await self._start()
            watches = asyncio.gather(self._look(), self._guard())
            try:
                either: list[asyncio.Future[Any]] = [self._process.ended, watches]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not self._process.ended.done():
                    watches.result()
            finally:
                watches.cancel()
                await asyncio.gather(watches, return_exceptions=True)
            self._server_ended(self._process.ended.result())
        except UnderstudyError as error:
            self._fail(f"error: {error.stable_code}: {error}", 1)
        except Exception as error:
            log.exception("the adapter failed")
            self._fail(f"error: command_engine: {error!r}", 1)

    async def _start(self) -> None:
        deadline_s = time.monotonic() + self._spec.start_timeout_s
        await self._process.start(deadline_s=deadline_s)
        address = self._process.address
        self._server = (
            HttpEngine("http://server", address.socket)
            if address.is_unix
            else HttpEngine(f"http://127.0.0.1:{address.port}")
        )
        learning = self._loop.create_task(self._learn(self._server, deadline_s))
        either: list[asyncio.Future[Any]] = [learning, self._process.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # told to leave: nothing may be opened behind that
            learning.cancel()
            raise
        if self._process.ended.done():
            learning.cancel()
            how = how_it_ended(self._process.ended.result())
            raise ServerEndedError(f"{how} while starting", command=self._process.text)
        learning.result()
        self._start_ms = (time.monotonic() - self._began_s) * 1e3
        self._state, self._error = "ready", ""
        log.info("the server is ready after %.0f ms at %s", self._start_ms, self._process.where)
        self._control.notify_state()

    def _tell(self, text: str) -> None:
        """Whoever waits for the start learns why, long before it is given up."""
        log.warning("%s", text)
        self._error = text
        self._control.notify_state()

    async def _learn(self, server: HttpEngine, deadline_s: float) -> None:
        """Wait until the server is well, and learn its model and its known answer."""
        while await server.is_healthy(timeout_s=_ASK_S) is not True:
            if time.monotonic() > deadline_s:
                raise ServerNotReadyError(
                    f"GET /health of the server is not 200 after {self._spec.start_timeout_s:g} s"
                )
            await asyncio.sleep(_READY_S)
        model = await server.model_id(timeout_s=_ASK_S) or self._spec.group
        self._canary = Canary(server, model, self._progress)
        await self._canary.learn()
        self._generate = GenerateServer(
            self._path("gen"), Relay(server, model, self._progress), self._gate,
            max_open=self._spec.max_open,
        )  # fmt: skip
        await self._generate.start()
        if await server.counters(timeout_s=_ASK_S) is None:
            log.warning("the server's /metrics has no counters that are known here: its progress "
                        "is judged by its answers alone")  # fmt: skip

    async def _look(self) -> None:
        """Keep the progress page up to date."""
        assert self._server is not None  # noqa: S101 - started
        pause_s = self._spec.hang_after_s / 8
        pause_s = min(max(pause_s, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)
        while True:
            counters = await self._server.counters(timeout_s=pause_s)
            try:
                self._progress.look(counters, self._process.tree.look())
            except OSError as error:  # no descriptor is left: no statement about the server
                log.warning("cannot look at the server's processes: %s", error)
            await asyncio.sleep(pause_s)

    async def _guard(self) -> None:
        """End when somebody else listens where the server did, or nobody does for a while."""
        patience_s = max(self._spec.hang_after_s, 2 * _OWNER_S)
        heard_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            try:
                is_ours = self._process.listens()
            except OSError as error:  # no descriptor is left: no statement about the server
                log.warning("cannot look who listens: %s", error)
                is_ours = True
            if is_ours is False:
                raise StrangerListensError(self._process.address.port)
            heard_s = now_s if is_ours else heard_s
            if now_s - heard_s > patience_s:
                raise ServerUnusableError(
                    f"the server has not listened on {self._process.where} for {patience_s:g} s"
                )
            await asyncio.sleep(_OWNER_S)

    def _server_ended(self, exit_status: int) -> None:
        self._fail(f"error: server_ended: the server {how_it_ended(exit_status)}", exit_status)

    def _fail(self, line: str, status: int) -> None:
        if self._ended.done():
            return
        os.write(2, (" ".join(line.split()) + "\n").encode())
        self._state, self._error = "failed", line
        self._control.notify_state()
        self._end(status)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    async def _leave(self) -> None:
        """Close the sockets, end the server and everything below it."""
        is_failure = self._state == "failed"
        if not is_failure:
            self._state = "stopping"
            self._control.notify_state()
        for task in self._tasks:
            task.cancel()
        if self._generate is not None:
            await self._generate.close()
        if self._canary is not None:
            self._canary.close()
        await self._process.end(grace_s=0.0 if is_failure else _GRACE_S)
        await self._http.close()
        self._control.close()


def run(spec: CommandSpec) -> NoReturn:
    """Be this engine until it ends. Log and error lines go to descriptors 1 and 2."""
    began_s = time.monotonic()
    descriptors = use_all_descriptors()
    reserve_descriptors()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s",
        force=True,
    )
    become_subreaper()
    status = 1
    try:
        status = asyncio.run(_serve(spec, began_s, descriptors))
    except UnderstudyError as error:
        os.write(2, f"error: {error.stable_code}: {error}\n".encode())
    except Exception:
        log.exception("the engine failed")
    finally:
        _leave_as_the_server_did(status)


async def _serve(spec: CommandSpec, began_s: float, descriptors: tuple[int, int]) -> int:
    return await CommandEngine(spec, began_s=began_s, descriptors=descriptors).serve()


def _leave_as_the_server_did(status: int) -> NoReturn:
    """End with its exit code, or by its signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        time.sleep(1.0)  # for a signal that does not end a process
    os._exit(status if status >= 0 else 1)
