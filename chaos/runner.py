"""Performs a scenario on a real system and writes the record. Judges nothing.

Order of a run: start the system, run every request once undisturbed (the reference), perform the
steps, let the load run out, take stock, stop, look for what is left. When a step fails the steps
end there, but stock is still taken and the system stopped: a record is always complete.

Longer than other modules: every step acts on the same system, load, record and list of things to
undo, so in pieces each piece would carry all four about.
"""

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cache.errors import DeadlineExceededError, UnderstudyError
from chaos.client import StatusView, wait_until
from chaos.disk import is_writable, small_disk
from chaos.expecting import Expecting
from chaos.faultmodel import Injury
from chaos.faultmodel import Role as TargetRole
from chaos.faults import is_gone
from chaos.history import (
    FILE_NAME,
    Command,
    End,
    Expectation,
    Fault,
    Leftover,
    Meta,
    Recorder,
    Reference,
    Target,
)
from chaos.load import LoadProfile, OpenLoad
from chaos.machine import this_machine
from chaos.near_ties import make_near_tie_model
from chaos.requests import make_pool, stretch
from chaos.scenario import CommandStep, Expect, FaultStep, Scenario, Step, Storm, Wait
from chaos.stock import EventTail, Stock
from chaos.streams import StreamFleet, StreamRequest
from chaos.system import DEMO_MODEL, RunningSystem, SystemOptions
from chaos.watching import ProcessWatcher, StatusWatcher, pids_of
from supervisor.process import ProcessId, own_boot_id, read_marker, read_process_id, signal_process

__all__ = ["Run", "hook_environment", "perform"]

_HOOKS: Final = Path(__file__).resolve().parent / "hooks"
_CALM_S: Final = 90.0
_STREAM_S: Final = 5.0
_REFERENCE_S: Final = 120.0


def hook_environment(orders: Path) -> dict[str, str]:
    """What a Python process needs so that it obeys the orders in this folder."""
    path = os.pathsep.join(filter(None, (str(_HOOKS), os.getenv("PYTHONPATH"))))
    return {"UNDERSTUDY_CHAOS_ORDERS": str(orders), "PYTHONPATH": path}


def perform(
    name: str,
    scenario: Scenario,
    *,
    seed: int,
    device: str = "cpu",
    directory: Path,
    tell: Callable[[str], None],
) -> None:
    """Run a scenario and leave its record (and the system's logs) in `directory`.

    Raises:
        SkippedError: it cannot be run here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        state_dir = directory / "state"
        shutil.rmtree(state_dir, ignore_errors=True)
        if scenario.system.state_disk is not None:
            disk = small_disk(
                directory / "disk", scenario.system.state_disk, scenario.system.state_disk_kind
            )
            state_dir = stack.enter_context(disk) / "state"
        recorder = stack.enter_context(Recorder(directory / FILE_NAME))
        run = Run(
            name, scenario, seed=seed, device=device, directory=directory, state_dir=state_dir,
            recorder=recorder, tell=tell,
        )  # fmt: skip
        run.perform()


class Run:
    """One scenario under way; `chaos.faultmodel.World` for its faults."""

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        *,
        seed: int,
        device: str,
        directory: Path,
        state_dir: Path,
        recorder: Recorder,
        tell: Callable[[str], None],
    ) -> None:
        self.seed = seed
        self.fault_dir = directory / "orders"
        shutil.rmtree(self.fault_dir, ignore_errors=True)
        self.fault_dir.mkdir()
        if "jump_clock" in scenario.kinds_of_faults():
            (self.fault_dir / "wall-clock").write_bytes(struct.pack("d", 0.0))
        self._name = name
        self._scenario = scenario
        self._recorder = recorder
        self._tell = tell
        shutil.rmtree(directory / "model", ignore_errors=True)
        model = make_near_tie_model(DEMO_MODEL, directory / "model", seed=seed)
        self._options = _options(scenario, self.fault_dir, model, device)
        self.system = RunningSystem(directory, self._options, state_dir=state_dir)
        pool = make_pool(scenario.pool, tokens=scenario.tokens, seed=seed)
        self._pool = pool
        self.load = OpenLoad(self.system.base_url, pool, on_done=recorder.add)
        self._status = StatusWatcher(self.system, recorder)
        self._processes = ProcessWatcher(self.system, recorder)
        events = EventTail(state_dir / "events.jsonl")
        self._stock = Stock(self.system, recorder, self._status, events)
        self._expecting = Expecting(self.system, self.load, recorder, events)
        self.strangers = contextlib.ExitStack()
        self._undo: list[Callable[[], None]] = []
        self._steps = 0
        self._deadline_s = time.monotonic() + scenario.max_duration
        self._is_stopped = False
        self._remembered_ns = 0

    # ---------------------------------------------------------------- the whole

    def perform(self) -> None:
        """Run it; what goes wrong is in the record."""
        error = ""
        self._recorder.add(self._meta())
        try:
            self._begin()
            self._perform_all(self._scenario.steps)
        except (UnderstudyError, OSError, subprocess.SubprocessError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            self._tell(f"  the steps ended: {error}")
        finally:
            error = self._finish() or error
            self._recorder.add(End(time.monotonic_ns(), error))

    def _meta(self) -> Meta:
        scenario = self._scenario
        return Meta(
            scenario=self._name,
            title=scenario.title,
            seed=self.seed,
            started_ns=time.monotonic_ns(),
            started_unix_s=time.time(),
            machine=this_machine(),
            system={"device": self._options.device, **scenario.system.model_dump()},
            gaps_are_judged=scenario.gaps_are_judged,
        )

    def _begin(self) -> None:
        self._tell("starting the system")
        self._status.start()
        self._processes.start()
        self.system.start()
        self._expecting.wait_whole(_CALM_S)
        self.load.open()
        self._stretch()
        self._tell(f"reference: {len(self._pool)} requests, undisturbed")
        self._reference()

    def _stretch(self) -> None:
        """Where one stream alone would be over at once, answers are longer than usual."""
        with StreamFleet(self.system.base_url, self._pool[:1]) as fleet:
            (first,) = fleet.wait_done(timeout_s=_REFERENCE_S)
        if len(first.arrivals_ns) > 1:
            took_s = (first.arrivals_ns[-1] - first.arrivals_ns[0]) / 1e9
            self._pool = stretch(self._pool, first.request.max_tokens / max(took_s, 1e-3))
            self.load.pool = self._pool

    def _reference(self) -> None:
        """Every text without a fault, in another order and beside streams that take slots first."""
        chance = random.Random(self.seed)
        shuffled = list(self._pool)
        chance.shuffle(shuffled)
        fillers = [
            StreamRequest(f"filler-{i}", r.prompt, r.max_tokens, r.temperature, r.seed + 7)
            for i, r in enumerate(shuffled[:3])
        ]
        with StreamFleet(self.system.base_url, [*fillers, *shuffled], spacing_s=0.02) as fleet:
            records = fleet.wait_done(timeout_s=_REFERENCE_S)
        for record in records[len(fillers) :]:
            request = record.request
            if record.error is not None or not record.has_end_mark:
                raise UnderstudyError(f"the reference run failed: {request.name}: {record.error}")
            self._recorder.add(
                Reference(
                    request.name, request.prompt, request.temperature, request.max_tokens,
                    record.text,
                )
            )  # fmt: skip

    def _finish(self) -> str:
        """Undo what lasts, take stock, stop, look around. Returns what went wrong first."""
        problems: list[str] = []

        def attempt(what: str, work: Callable[[], object]) -> None:
            try:
                work()
            except (UnderstudyError, OSError, subprocess.SubprocessError, ValueError) as error:
                problems.append(f"{what}: {error}")

        for undo in reversed(self._undo):
            attempt("undoing a fault", undo)
        attempt("stopping the load", self.load.close)
        if not self._is_stopped:
            attempt("stopping the system", self._stop)
        failures = (self._status.stop(), self._processes.stop())
        problems += [f"a watcher ended: {failure!r}" for failure in failures if failure is not None]
        attempt("reading the events", self._stock.record_events)
        attempt("reading the engines' logs", self._stock.record_roles)
        attempt("killing what is left", lambda: self.system.close(check=False))
        return "; ".join(problems)

    def _stop(self) -> None:
        self._is_stopped = True
        self.system.take_inventory()
        try:
            self.system.stop()
        except (UnderstudyError, OSError, subprocess.SubprocessError) as error:
            self._recorder.add(Leftover(f"it did not stop: {error}"))
            return
        has_disk = is_writable(self.system.state_dir)
        for text in self.system.leftovers():
            if has_disk or not text.startswith("socket "):  # nobody could remove it there
                self._recorder.add(Leftover(text))

    # -------------------------------------------------------------------- steps

    def _perform_all(self, steps: list[Step]) -> None:
        for step in steps:
            if step.repeat is not None:
                for _ in range(step.repeat.times):
                    self._perform_all(step.repeat.steps)
                continue
            self._steps += 1
            if time.monotonic() > self._deadline_s:
                raise DeadlineExceededError(self._name, timeout_s=self._scenario.max_duration)
            self._perform_one(step)

    def _perform_one(self, step: Step) -> None:
        if step.load is not None:
            self._set_load(step.load.streams_per_s)
        elif step.wait is not None:
            self._wait(step.wait)
        elif step.fault is not None:
            self._fault(step.fault)
        elif step.command is not None:
            self._command(step.command)
        elif step.expect is not None:
            self._expect(step.expect)
        elif step.storm is not None:
            self._storm(step.storm)
        elif step.submit is not None:
            self._submit(step.submit.tokens)
        elif step.calm is not None:
            self._calm(step.calm)

    def _submit(self, tokens: int) -> None:
        request = StreamRequest(f"long-{self._steps}", "A long story", tokens, 1.0, self._steps)
        name = self._expecting.submitted = self.load.submit(request)
        wait_until(lambda: (self.load.chunks_of(name) or 0) > 3, "text of the long request",
                   timeout_s=30)  # fmt: skip

    def _set_load(self, streams_per_s: float) -> None:
        if streams_per_s:
            self.load.start(LoadProfile(streams_per_s, seed=self.seed + self._steps))
        else:
            self.load.pause()

    def _wait(self, wait: Wait) -> None:
        if wait.seconds is not None:
            time.sleep(wait.seconds)
        if wait.flowing is not None:
            count = wait.flowing
            wait_until(lambda: self.load.flowing_streams >= count, f"{count} streams that flow",
                       timeout_s=wait.within)  # fmt: skip

    def _storm(self, storm: Storm) -> None:
        chance = random.Random(self.seed)
        for _ in range(storm.times):
            time.sleep(chance.uniform(*storm.pause))
            fault = chance.choice(storm.faults)
            try:
                injury = self._fault(FaultStep(do=fault))
            except (UnderstudyError, OSError) as error:
                self._tell(f"  nobody to hit: {error}")
            else:
                self._await_end_of_supervisor(injury)
            if self.system.supervisor.poll() is not None:
                time.sleep(chance.uniform(0.0, 1.0))
                self._command(CommandStep(do="start_supervisor"))

    def _await_end_of_supervisor(self, injury: Injury) -> None:
        """Without a free CPU a process that was killed is there for a while."""
        if injury.is_deadly and any(target.role == "supervisor" for target in injury.targets):
            wait_until(lambda: self.system.supervisor.poll() is not None,
                       "the end of the supervisor", timeout_s=_STREAM_S)  # fmt: skip

    def _fault(self, step: FaultStep) -> Injury:
        self._remember()
        if step.bounds.next_token is not None:
            self._await_streams()
        fault = step.do
        injury = fault.inject(self)
        params = fault.model_dump(exclude_defaults=True)
        label = step.label or _label(fault.kind, params, injury.note)
        bounds = {k: v for k, v in step.bounds.model_dump().items() if v is not None}
        self._recorder.add(
            Fault(
                label=label,
                kind=fault.kind,
                at_ns=injury.at_ns,
                done_ns=time.monotonic_ns(),
                targets=list(injury.targets),
                params=params,
                bounds_s=bounds,
                breaks_streams=injury.breaks_streams,
                is_deadly=injury.is_deadly,
                note=injury.note,
                spared=list(injury.spared),
                problem=injury.problem,
            )
        )
        self._tell(f"fault: {label}{': ' + injury.problem if injury.problem else ''}")
        return injury

    def _await_streams(self) -> None:
        """A bound on the next token says nothing while nobody waits for one."""
        with contextlib.suppress(DeadlineExceededError):  # the run is not judged then
            wait_until(lambda: self.load.flowing_streams > 0, "a stream", timeout_s=_STREAM_S)

    def _command(self, step: CommandStep) -> None:
        if step.do != "start_supervisor":  # it follows a fault, with which the next step compares
            self._remember()
        at_ns = time.monotonic_ns()
        if step.do == "start_supervisor":
            status, text = self._start_supervisor()
        elif step.do == "stop":
            self._stop()
            status, text = 200, "stopped"
        else:
            target = f"/v1/{step.do}/{step.engine}" if step.engine else f"/v1/{step.do}"
            body = step.body or {}
            try:
                reply = self.system.admin.request("POST", target, body, timeout_s=step.within)
                status, text = reply.status, _answer_text(reply.body)
            except OSError as error:
                status, text = 0, repr(error)
        label = f"{step.do} {step.engine}".strip()
        is_as_wanted = status == step.status
        self._recorder.add(Command(label, at_ns, time.monotonic_ns(), status, text, is_as_wanted))
        self._tell(f"command: {label}: {status} {text}")
        if not is_as_wanted:
            raise UnderstudyError(f"{label} was answered {status} instead of {step.status}: {text}")

    def _start_supervisor(self) -> tuple[int, str]:
        self.system.wait_supervisor(timeout_s=10)
        process = self.system.spawn_supervisor()
        return 200, f"pid {process.pid}"

    def _expect(self, expect: Expect) -> None:
        began_ns = time.monotonic_ns()
        wanted = expect.model_dump(exclude_defaults=True, exclude={"within", "hold"})
        label = ", ".join(f"{key} {_plain(value)}" for key, value in wanted.items())
        seen = self._expecting.wait(expect)
        met_ns = 0 if seen else time.monotonic_ns()
        self._recorder.add(Expectation(label, began_ns, met_ns, expect.within, seen))
        took_s = (time.monotonic_ns() - began_ns) / 1e9
        self._tell(f"  {'missed' if seen else 'met'} in {took_s:.1f} s: {label}")
        if seen:
            raise UnderstudyError(f"expected {label} within {expect.within:g} s: {seen}")

    def _calm(self, label: str) -> None:
        """No streams, nothing missing: the moment to compare descriptors and counters."""
        self.load.drain(timeout_s=_CALM_S)
        self._expecting.wait_whole(_CALM_S)
        time.sleep(1.0)  # burials, stats events and canaries of the last step end meanwhile
        self._stock.take(label)
        self.system.take_inventory()
        self._tell(f"calm: {label}")

    # -------------------------------------------------------------------- world

    def locate(self, role: TargetRole) -> Target:
        """Who has the role now, or had it when the supervisor last answered."""
        if role == "supervisor":
            pid: int | None = self.system.supervisor.pid
        else:
            pid = pids_of(self._newest_status())[role]
        if pid is None:
            raise UnderstudyError(f"no process has the role {role} now")
        process = read_process_id(pid)
        marker = read_marker(pid)
        if role == "supervisor":
            return Target(role, pid, process.start_ticks, f"supervisor-{pid}")
        if marker is None:
            raise UnderstudyError(f"pid {pid} does not carry this system's marker")
        return Target(role, pid, process.start_ticks, marker.instance)

    def send(self, target: Target, sig: signal.Signals) -> bool:
        """Signal a process of this system; a stop is undone at the end."""
        process = ProcessId(target.pid, target.start_ticks, own_boot_id())
        if sig is signal.SIGSTOP:
            self.on_end(lambda: None if is_gone(target) else _continue(process))
        return signal_process(process, sig)

    def jump_clock(self, offset_s: float) -> int:
        """Shift the system's wall clock; the hook in its processes has mapped the file."""
        path = self.fault_dir / "wall-clock"

        def shift() -> None:
            with path.open("r+b") as file:
                file.write(struct.pack("d", offset_s))

        return self._status.shift_clock(offset_s, shift)

    def on_end(self, undo: Callable[[], None]) -> None:
        """Do this when the run ends."""
        self._undo.append(undo)

    # ------------------------------------------------------------------ records

    def _remember(self) -> None:
        """What later steps compare with; nothing new where nobody says anything newer."""
        status = self._newest_status()
        is_stale = status is self._status.last and self._status.last_ns < self._remembered_ns
        self._expecting.remember(self._expecting.before if is_stale else status)
        self._remembered_ns = time.monotonic_ns()

    def _newest_status(self) -> StatusView | None:
        """The status now, or what a supervisor that is dead or stopped said last."""
        try:
            return self.system.admin.status(timeout_s=1.0)
        except (OSError, UnderstudyError):
            return self._status.last


def _continue(process: ProcessId) -> None:
    signal_process(process, signal.SIGCONT)


def _options(scenario: Scenario, orders: Path, model: Path, device: str) -> SystemOptions:
    shape = scenario.system
    return SystemOptions(
        device=device,
        model=model,
        standby=shape.standby,
        batch=shape.batch,
        ballast=shape.ballast,
        slots=shape.slots,
        workers=shape.workers,
        hang_after=shape.hang_after,
        stable_after=shape.stable_after,
        freeze_when=shape.freeze_when,
        resume_after=shape.resume_after,
        intensity=shape.intensity,
        max_young_deaths=shape.max_young_deaths,
        core_dumps=shape.core_dumps,
        extra_environment={"UNDERSTUDY_FAULTS": "1", **hook_environment(orders)},
    )


def _label(kind: str, params: dict[str, object], note: str) -> str:
    target = _plain(params.get("target", ""))
    if kind == "signal":
        return f"SIG{params.get('signal', 'KILL')} {target}"
    return " ".join(part for part in (kind.replace("_", " "), target, note) if part)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return "yes" if value is True else str(value)


def _answer_text(body: object) -> str:
    if isinstance(body, dict):
        return str(body.get("text") or body.get("detail") or body.get("title") or "")[:300]
    return str(body)[:300]
