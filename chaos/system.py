"""A whole Understudy as a real process with a topology of its own: started, hurt, stopped, checked.

For demo, tests and benchmarks: they run what an operator runs (`python -m supervisor run FILE`)
and see what an operator sees (admin API, OpenAI API, /proc).

Invariants
    1. Only processes that the system itself names are signalled, by pid *and* start time.
    2. `close` leaves nothing behind, however the test ended: what does not stop is killed by
       identity, and told.
    3. Every wait has a deadline, and its error says what was awaited.
"""

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cache.errors import DeadlineExceededError, UnderstudyError
from chaos.client import AdminClient, StatusView, wait_until
from chaos.leftovers import Inventory, find_leftovers, marked_processes, take_inventory
from supervisor.process.identity import ProcessId, read_process_id, signal_process

__all__ = [
    "DEMO_MODEL",
    "ROOT",
    "LeftBehindError",
    "RunningSystem",
    "StartError",
    "SystemOptions",
    "free_ports",
    "is_port_free",
    "topology_text",
]

ROOT: Final = Path(__file__).resolve().parent.parent
DEMO_MODEL: Final = ROOT / "configs" / "models" / "demo"
_START_TIMEOUT_S: Final = 150.0
_STOP_TIMEOUT_S: Final = 30.0
_SETTLE_TIMEOUT_S: Final = 10.0
_LOG_TAIL_BYTES: Final = 6000
_UNLIMITED: Final = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class StartError(UnderstudyError):
    """The system ended before it was ready; the text holds the end of its output."""

    code = "chaos_start"

    def __init__(self, exit_code: int, output: str) -> None:
        super().__init__(f"the supervisor ended with {exit_code} before it was ready:\n{output}")
        self.process_exit_code = exit_code
        self.output = output


class LeftBehindError(UnderstudyError):
    """Something of the system was still there after it had stopped."""

    code = "chaos_left_behind"

    def __init__(self, leftovers: Sequence[str]) -> None:
        super().__init__("left behind after the stop: " + "; ".join(leftovers))
        self.leftovers = tuple(leftovers)


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """The shape of a generated topology: one group `chat`."""

    device: str = "cpu"
    standby: bool = True
    batch: bool = False
    ballast: str = "0MiB"  # private memory of each engine, so that its death takes a real time
    slots: int = 16
    max_length: int = 2048
    workers: int = 1
    model: Path = DEMO_MODEL
    cache_mode: str = "daemon"
    hang_after: str = "400ms"
    stable_after: str = "1s"  # tests kill the same role again and again
    evict_after: str | None = None
    resume_after: str | None = None
    freeze_when: str | None = None
    intensity: int = 50  # failovers by judgement
    max_young_deaths: int | None = None
    core_dumps: bool = False
    extra_environment: Mapping[str, str] = field(default_factory=dict)


def free_ports(count: int) -> tuple[int, ...]:
    """Loopback ports that nobody listens on now (another process may be quicker: rare)."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return tuple(sock.getsockname()[1] for sock in sockets)


def is_port_free(port: int) -> bool:
    """Whether a loopback port can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def topology_text(
    options: SystemOptions, *, state_dir: Path, gateway_port: int, admin_port: int
) -> str:
    """A topology file like `configs/demo.yaml`, with its own paths and ports."""
    roles = [("chat-a", "primary", "")]
    if options.standby:
        roles.append(("chat-b", "standby", ""))
    if options.batch:
        roles.append(("chat-batch", "batch", ", kv: {slots: 8}"))
    engines = "\n".join(
        f"      - {{name: {name}, role: {role}, ballast: {options.ballast}{more}}}"
        for name, role, more in roles
    )
    batch = ", ".join(
        f"{key}: {value}"
        for key, value in (
            ("freeze_when", f'"{options.freeze_when}"' if options.freeze_when else None),
            ("evict_after", options.evict_after),
            ("resume_after", options.resume_after),
        )
        if value is not None
    )
    failover = f"intensity: {options.intensity}, period: 10m, stable_after: {options.stable_after}"
    if options.max_young_deaths is not None:
        failover += f", max_young_deaths: {options.max_young_deaths}"
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    return f"""\
version: 1
name: chaos
state_dir: {state_dir}
core_dumps: {str(options.core_dumps).lower()}
admin: {{listen: "127.0.0.1:{admin_port}"}}
gateway: {{listen: "127.0.0.1:{gateway_port}", workers: {options.workers}}}
groups:
  - name: chat
    model: {{path: {options.model}, dtype: {dtype}, quantization: none}}
    devices: ["{options.device}"]
    cache: {{mode: {options.cache_mode}, on_mismatch: reload}}
    kv: {{slots: {options.slots}, max_length: {options.max_length}}}
    engines:
{engines}
    health: {{interval: 100ms, hang_after: {options.hang_after}, canary: 2s}}
    failover: {{{failover}}}
    batch: {{{batch}}}
"""


class RunningSystem:
    """One supervisor and everything that it started. A context manager; not thread-safe."""

    def __init__(
        self,
        directory: Path,
        options: SystemOptions | None = None,
        *,
        topology: Path | None = None,
        state_dir: Path | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """Prepare a system below `directory`; nothing runs before `start`.

        A ready-made `topology` needs its own `state_dir` and ports (gateway, admin) told.
        """
        self.options = options or SystemOptions()
        self.gateway_port, self.admin_port = ports or free_ports(2)
        self.state_dir = state_dir or directory / "state"
        self.output_path = directory / "supervisor.out"
        self.topology = topology or directory / "topology.yaml"
        if topology is None:
            text = topology_text(
                self.options,
                state_dir=self.state_dir,
                gateway_port=self.gateway_port,
                admin_port=self.admin_port,
            )
            self.topology.write_text(text, "utf-8")
        self.admin = AdminClient(self.state_dir)
        self.inventory: Inventory | None = None
        # Its own list of running supervisors: an operator's is none of its business.
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "UNDERSTUDY_REGISTRY": str(directory / "registry"),
            **self.options.extra_environment,
        }
        self._supervisors: list[subprocess.Popen[bytes]] = []

    @property
    def base_url(self) -> str:
        """Where clients reach the OpenAI API."""
        return f"http://127.0.0.1:{self.gateway_port}/v1"

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        """The supervisor process that was started last."""
        return self._supervisors[-1]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close(check=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After a failure the first error matters; what was left behind would hide it.
        self.close(check=error is None)

    def spawn_supervisor(self) -> subprocess.Popen[bytes]:
        """Start `supervisor run`; also beside the children of one that died, which it adopts.

        Raises:
            UnderstudyError: the state directory belongs to a system that somebody else runs.
        """
        if not self._supervisors and (others := self.own_processes()):
            # `close` kills what carries this marker: it must never be another's.
            raise UnderstudyError(
                f"processes of {self.state_dir} run already: {', '.join(map(str, others))}",
                hint=f"stop them with 'supervisor stop {self.topology}'",
            )
        with self.output_path.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "supervisor", "run", str(self.topology)],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._supervisors.append(process)
        if self.options.core_dumps:
            resource.prlimit(process.pid, resource.RLIMIT_CORE, _UNLIMITED)
        return process

    def start(self, *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start and wait until the group serves and, with a standby, is redundant.

        Raises:
            StartError: the supervisor ended.
            DeadlineExceededError: it is not ready in time.
        """
        self.spawn_supervisor()
        self.wait_ready(timeout_s=timeout_s)

    def wait_ready(self, *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait for `/readyz`, then for `wait_whole`."""
        deadline = time.monotonic() + timeout_s
        wait_until(self._is_ready, "readyz of the new system", timeout_s=timeout_s)
        self.wait_whole(timeout_s=max(1.0, deadline - time.monotonic()))
        self.take_inventory()

    def wait_whole(
        self, *, timeout_s: float = 60.0, not_led_by: ProcessId | None = None
    ) -> StatusView:
        """Wait until a primary serves and, where the topology has one, a standby is verified.

        `not_led_by` names a primary that was just killed: for some milliseconds the status may
        still speak of it, as if nothing had happened.
        """

        def probe() -> StatusView | None:
            status = self.status()
            primary = status.group.engine("primary") if status is not None else None
            if status is None or primary is None or primary.state != "primary":
                return None
            if not_led_by is not None and primary.pid == not_led_by.pid:
                return None
            return status if status.group.is_redundant or not self.options.standby else None

        what = "redundancy of the group" if self.options.standby else "a primary that serves"
        return wait_until(probe, what, timeout_s=timeout_s)

    def status(self) -> StatusView | None:
        """The status, or None while no supervisor answers."""
        try:
            return self.admin.status()
        except OSError:
            return None

    def process(self, role: str) -> ProcessId:
        """Identity of the process behind a role now.

        Roles: primary, standby, batch, zygote, cache, gateway, supervisor.
        """
        status = self.admin.status()
        group = status.group
        if role == "zygote":
            pid = group.zygote.pid if group.zygote else None
        elif role == "cache":
            pid = group.cache[0].pid if group.cache else None
        elif role == "gateway":
            pid = status.gateway[0].pid if status.gateway else None
        elif role == "supervisor":
            pid = status.supervisor.pid
        else:
            engine = group.engine(role)
            pid = engine.pid if engine else None
        if pid is None:
            raise UnderstudyError(f"no process has the role {role} now")
        return read_process_id(pid)

    def kill(self, role: str, sig: signal.Signals = signal.SIGKILL) -> tuple[ProcessId, int]:
        """Signal the process of a role; its identity, and the moment in monotonic nanoseconds."""
        victim = self.process(role)
        if victim.pid != self.supervisor.pid and victim not in self.own_processes():
            raise UnderstudyError(f"{victim} does not carry this system's marker; not signalled")
        return victim, self.kill_process(victim, sig)

    def kill_process(self, victim: ProcessId, sig: signal.Signals = signal.SIGKILL) -> int:
        """Signal a process that `process` named earlier; the moment in monotonic nanoseconds.

        Raises:
            UnderstudyError: it was gone already.
        """
        moment_ns = time.monotonic_ns()
        if not signal_process(victim, sig):
            raise UnderstudyError(f"{victim} was gone before the signal")
        return moment_ns

    def take_inventory(self) -> Inventory:
        """Remember what the system owns, for the check at the end; grows with each call."""
        taken = take_inventory(
            self.state_dir,
            supervisor_pid=self.supervisor.pid if self.supervisor.poll() is None else None,
            ports=(self.gateway_port, self.admin_port),
        )
        if self.inventory is not None:
            taken = Inventory(
                self.state_dir,
                taken.processes,
                taken.memory | self.inventory.memory,
                taken.shm_paths | self.inventory.shm_paths,
                taken.ports,
            )
        self.inventory = taken
        return taken

    def stop(self, *, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Stop as an operator does (`supervisor stop FILE`); the supervisor's exit code.

        Raises:
            DeadlineExceededError: it did not end in time.
        """
        command = [sys.executable, "-m", "supervisor", "stop", str(self.topology)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            text = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise UnderstudyError(f"supervisor stop ended with {done.returncode}: {text}")
        return self.wait_supervisor(timeout_s=timeout_s)

    def wait_supervisor(self, *, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Wait until the supervisor that was started last has ended; its exit code."""
        try:
            return self.supervisor.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceededError("the end of the supervisor", timeout_s=timeout_s) from None

    def leftovers(self, *, timeout_s: float = _SETTLE_TIMEOUT_S) -> list[str]:
        """What is still there once the kernel has had time to take memory back."""
        before = self.inventory or Inventory(
            self.state_dir, (), frozenset(), frozenset(), (self.gateway_port, self.admin_port)
        )
        deadline = time.monotonic() + timeout_s
        while (found := find_leftovers(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def close(self, *, check: bool = True) -> None:
        """Stop whatever still runs. With `check`, nothing may be left behind.

        Raises:
            LeftBehindError: something was; it has been killed by now.
        """
        problems: list[str] = []
        if self._supervisors and self.supervisor.poll() is None:
            try:
                if check:
                    self.take_inventory()
                self.stop()
            except (UnderstudyError, OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"it did not stop: {error}")
        if not problems and check:
            problems += self.leftovers()
        self._kill_rest()
        if problems and check:
            raise LeftBehindError(problems)

    def logs(self) -> dict[str, str]:
        """The end of every log, for the report of a failed test."""
        paths = [self.output_path, *sorted(self.state_dir.rglob("*.log"))]
        paths.append(self.state_dir / "events.jsonl")
        return {path.name: _tail(path) for path in paths if path.is_file()}

    def require_alive(self) -> None:
        """Fail at once when the supervisor has ended.

        Raises:
            StartError: with the end of its output.
        """
        code = self.supervisor.poll()
        if code is not None:
            raise StartError(code, _tail(self.output_path))

    def _is_ready(self) -> bool:
        self.require_alive()
        return self.admin.is_ready()

    def own_processes(self) -> list[ProcessId]:
        """Every live process that carries this system's marker."""
        return [process for process, _instance in marked_processes(self.state_dir)]

    def marked(self) -> list[tuple[ProcessId, str]]:
        """Every live process of this system with its instance name, supervisors included."""
        found = marked_processes(self.state_dir)
        for popen in self._supervisors:
            if popen.poll() is None:
                with contextlib.suppress(UnderstudyError):  # gone between the two looks
                    found.append((read_process_id(popen.pid), f"supervisor-{popen.pid}"))
        return found

    def _kill_rest(self) -> None:
        """Kill by identity what is still alive: first the supervisor, which would start anew."""
        for popen in self._supervisors:
            if popen.poll() is None:
                popen.kill()
            popen.wait(timeout=_STOP_TIMEOUT_S)
        if not self._supervisors:
            return  # nothing was started, so nothing here is ours
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (alive := self.own_processes()) and time.monotonic() < deadline:
            for process in alive:
                signal_process(process, signal.SIGKILL)
            time.sleep(0.05)

    def remove_state(self) -> None:
        """Delete the state directory, so that the next start is a first one."""
        shutil.rmtree(self.state_dir, ignore_errors=True)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _LOG_TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no such file)"
