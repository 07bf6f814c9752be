"""The process layer against real processes: threads, ballast, escapees, zombies, execs, dumps.

Every asynchronous test runs on the asyncio and on the uvloop row. Victims say "ready" over a
pipe, so nothing here sleeps and hopes.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from supervisor.process import (
    MARKER_VARIABLE,
    Child,
    EvidenceKind,
    ExitEvidence,
    ExitProbe,
    ExitWatcher,
    Marker,
    ProcessGoneError,
    ProcessHandle,
    ProcessId,
    ProcessTree,
    SpawnError,
    Watch,
    fence,
    find_marked,
    is_same,
    kill_tree,
    read_marker,
    read_process_id,
    read_stat,
    signal_process,
    spawn,
)
from supervisor.process.stat import is_dead

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
STATE_ID = f"{os.getpid():08x}"
DEADLINE_S = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}

THREADS = """
import threading
for _ in range(60):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
BALLAST = """
import mmap
ballast = mmap.mmap(-1, 1 << 30)
ballast.madvise(15)  # MADV_NOHUGEPAGE: 262144 small pages, as slow to free as an engine's
for offset in range(0, 1 << 30, 4096):
    ballast[offset] = 1
"""


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test once on each kind of event loop.

    In a thread of its own, because plugins keep a loop of their own in the main thread.
    """

    @functools.wraps(test)
    def run(*args: Any, loop_kind: str, **kwargs: Any) -> None:
        async def scenario() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        def play() -> None:
            with asyncio.Runner(loop_factory=LOOPS[loop_kind]) as runner:
                runner.run(scenario())

        with ThreadPoolExecutor(1) as stage_hand:
            stage_hand.submit(play).result()

    signature = inspect.signature(test)
    extra = inspect.Parameter("loop_kind", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*signature.parameters.values(), extra]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)  # what pytest reads
    rows: Callable[..., Callable[..., None]] = pytest.mark.parametrize("loop_kind", LOOPS)
    return rows(run)


class Stage:
    """Starts victims, and buries whatever a test left behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[Child] = []
        self._strays: list[ProcessId] = []
        self._lives = 0

    def start(
        self,
        program: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        core_dumps: bool = False,
    ) -> tuple[Child, list[int]]:
        """Start a Python victim; returns with the pids that it wrote once it is ready."""
        self._lives += 1
        reader, writer = os.pipe()
        prelude = f"import os, signal, sys, time\nREADY = {writer}\n"
        ready = "\nos.write(READY, b'ready\\n')\nos.close(READY)\nwhile True: time.sleep(60)\n"
        source = prelude + textwrap.dedent(program) + ready
        child = spawn(
            [sys.executable, "-I", "-S", "-c", source, *argv],
            env=env or {"PATH": os.environ["PATH"]},
            log_path=self.log_path,
            marker=Marker(STATE_ID, f"victim-{self._lives}"),
            cwd=self._directory,
            pass_fds=[writer],
            core_dumps=core_dumps,
        )
        self._children.append(child)
        os.close(writer)
        pids = [int(word) for word in self._read_until_ready(reader) if word != "ready"]
        self._strays += [read_process_id(pid) for pid in pids]
        return child, pids

    @property
    def log_path(self) -> Path:
        return self._directory / "victims.log"

    def _read_until_ready(self, reader: int) -> list[str]:
        text = ""
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while not text.endswith("ready\n"):
                readable, _, _ = select.select([pipe], [], [], DEADLINE_S)
                chunk = pipe.read(4096) if readable else b""
                assert chunk, f"the victim did not get ready: {self.log_path.read_text()}"
                text += chunk.decode()
        return text.split()

    def clean_up(self) -> None:
        for process in (*(child.process for child in self._children), *self._strays):
            signal_process(process, signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(OSError):  # its handle has closed it
                if "Pid:" in Path(f"/proc/self/fdinfo/{child.pidfd}").read_text():
                    os.close(child.pidfd)
            with contextlib.suppress(ChildProcessError):  # its handle has reaped it
                os.waitid(os.P_PID, child.process.pid, os.WEXITED)
        for core in self._directory.glob("core*"):
            core.unlink()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    theatre = Stage(tmp_path)
    yield theatre
    theatre.clean_up()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.002)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.002)


def is_running(pid: int) -> bool:
    found = read_stat(pid)
    return found is not None and not is_dead(found.flags)


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def descriptors_of(pid: int) -> set[int]:
    return {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}


def open_descriptors() -> set[int]:
    """Ours, without the one that lists them."""
    return {fd for fd in descriptors_of(os.getpid()) if Path(f"/proc/self/fd/{fd}").exists()}


# --- spawn ------------------------------------------------------------------------------------


def test_a_child_gets_a_log_a_session_a_marker_no_core_and_no_foreign_descriptor(
    stage: Stage,
) -> None:
    foreign, other_end = os.pipe()
    os.set_inheritable(foreign, True)
    try:
        child, _ = stage.start("print('to the log', flush=True)")
        pid = child.process.pid

        wait_until(lambda: descriptors_of(pid) == {0, 1, 2}, "three descriptors, the pipe closed")
        assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
        assert Path(f"/proc/{pid}/fd/1").readlink() == stage.log_path
    finally:
        os.close(foreign)
        os.close(other_end)
    assert stage.log_path.read_text() == "to the log\n"
    assert stat.S_IMODE(stage.log_path.stat().st_mode) == 0o600
    assert os.getsid(pid) == pid
    assert read_marker(pid) == child.marker
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    assert int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16) == 0


def test_the_log_is_appended_to_and_the_environment_is_exactly_what_was_given(
    stage: Stage,
) -> None:
    stage.log_path.write_text("before\n")
    inherited = {"ONLY": "this", MARKER_VARIABLE: "stale:marker"}

    child, _ = stage.start("print(sorted(os.environ), flush=True)", env=inherited)

    assert stage.log_path.read_text().startswith("before\n['")
    assert read_marker(child.process.pid) == child.marker
    names = {"ONLY", "SPT_NOENV", MARKER_VARIABLE}
    environ = Path(f"/proc/{child.process.pid}/environ").read_bytes()
    assert {entry.split(b"=")[0].decode() for entry in environ.split(b"\0") if entry} == names


def test_a_program_that_does_not_exist_is_a_typed_error_and_leaks_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(SpawnError, match="no-such-program") as caught:
        spawn(
            ["/no-such-program"],
            env={},
            log_path=tmp_path / "log",
            marker=Marker(STATE_ID, "nobody"),
            cwd=tmp_path,
        )
    assert caught.value.hint
    assert open_descriptors() == before


@on_both_loops
async def test_children_survive_a_killed_supervisor_and_are_adopted(tmp_path: Path) -> None:
    marker = Marker(STATE_ID, "survivor-1")
    program = f"""
        import os, sys, signal
        from pathlib import Path
        from supervisor.process import Marker, spawn
        spawn(["sleep", "600"], env=os.environ, log_path=Path("log"), cwd=Path.cwd(),
              marker=Marker({marker.state_id!r}, {marker.instance!r}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = await asyncio.to_thread(
        subprocess.run, command, env=env, cwd=tmp_path, check=False, timeout=30
    )
    assert done.returncode == -signal.SIGKILL

    found = [process for process, name in find_marked(STATE_ID) if name == marker.instance]
    assert len(found) == 1
    assert is_running(found[0].pid)
    handle = ProcessHandle.adopt(found[0], marker)
    await fence(handle, timeout_s=DEADLINE_S)
    assert not is_running(found[0].pid)
    handle.close()


# --- exit evidence ----------------------------------------------------------------------------


@on_both_loops
async def test_the_watcher_sees_ballast_die_long_before_the_pidfd_does(stage: Stage) -> None:
    child, _ = stage.start(THREADS + BALLAST)
    handle = ProcessHandle.of_child(child)
    watcher = ExitWatcher()
    seen: list[tuple[ExitEvidence, bool]] = []
    watcher.watch(child.process, lambda proof: seen.append((proof, is_readable(child.pidfd))))

    killed_ns = time.monotonic_ns()
    handle.send_signal(signal.SIGKILL)
    await eventually(lambda: bool(seen), "exit evidence")
    status = await handle.wait_reaped(timeout_s=DEADLINE_S)
    ended_ns = time.monotonic_ns()

    proof, pidfd_was_readable = seen[0]
    assert proof.kind is EvidenceKind.FLAGS
    assert not pidfd_was_readable
    assert proof.detected_ns - killed_ns < (ended_ns - killed_ns) / 2
    assert status == -signal.SIGKILL
    watcher.close()
    handle.close()


@on_both_loops
async def test_the_watcher_tells_stopped_from_running_and_dead(stage: Stage) -> None:
    child, _ = stage.start(THREADS)
    watcher = ExitWatcher()
    changes: list[bool] = []
    dead: list[ExitEvidence] = []

    def note(watch: Watch) -> None:
        changes.append(watch.is_stopped)

    watch = watcher.watch(child.process, dead.append, on_stopped=note)
    signal_process(child.process, signal.SIGSTOP)
    await eventually(lambda: changes == [True], "stopped")
    assert watch.stopped_since_ns is not None
    signal_process(child.process, signal.SIGCONT)
    await eventually(lambda: changes == [True, False], "continued")
    assert not dead

    signal_process(child.process, signal.SIGSTOP)
    signal_process(child.process, signal.SIGKILL)
    await eventually(lambda: bool(dead), "dead")
    assert watch.evidence == dead[0]
    watcher.close()


@on_both_loops
async def test_one_failing_callback_does_not_blind_the_watcher(stage: Stage) -> None:
    first, second = stage.start("")[0], stage.start("")[0]
    watcher = ExitWatcher()
    reported: list[str] = []
    dead: list[ExitEvidence] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["message"])
    )

    def fail(_: ExitEvidence) -> None:
        raise RuntimeError("a bug of the caller")

    watcher.watch(first.process, fail)
    watcher.watch(second.process, dead.append)
    signal_process(first.process, signal.SIGKILL)
    signal_process(second.process, signal.SIGKILL)

    await eventually(lambda: bool(dead and reported), "the other one is still reported")
    watcher.close()


@on_both_loops
async def test_a_cancelled_watch_is_silent_and_a_dead_process_is_reported_by_a_tick(
    stage: Stage,
) -> None:
    child, _ = stage.start("")
    watcher = ExitWatcher()
    silent: list[ExitEvidence] = []
    dead: list[ExitEvidence] = []
    watcher.watch(child.process, silent.append).cancel()
    signal_process(child.process, signal.SIGKILL)
    await eventually(lambda: not is_running(child.process.pid), "dead")

    watcher.watch(replace(child.process, start_ticks=1), dead.append)
    assert not dead
    await eventually(lambda: bool(dead), "reported")

    assert dead[0].kind is EvidenceKind.GONE
    assert not silent
    watcher.close()


EXEC_CHAIN = """
import threading
left = int(sys.argv[1])
if left == 60:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.write(READY, b'ready\\n')
    signal.sigwait({signal.SIGUSR1})
if left:
    again = [*sys.orig_argv[:-1], str(left - 1)]
    threading.Thread(target=os.execv, args=(again[0], again)).start()
else:
    print('finished', flush=True)
while True: time.sleep(60)
"""


def test_a_process_that_execs_from_another_thread_never_looks_dead(stage: Stage) -> None:
    """`exec` by a non-leader kills the leader and moves into its place, here 60 times."""
    child, _ = stage.start(EXEC_CHAIN, "60")
    probe = ExitProbe(child.process)
    signal_process(child.process, signal.SIGUSR1)

    deadline = time.monotonic() + DEADLINE_S
    while "finished" not in stage.log_path.read_text():
        for _ in range(500):
            assert probe.poll() is None, "a living process was called dead"
        assert time.monotonic() < deadline, "the execs did not finish"

    assert is_same(child.process), "an exec from a thread keeps the identity"
    signal_process(child.process, signal.SIGKILL)
    wait_until(lambda: probe.poll() is not None, "evidence of the real death")


def test_a_process_whose_leader_alone_has_ended_is_alive(stage: Stage) -> None:
    child, _ = stage.start(
        """
        import ctypes, threading
        threading.Thread(target=lambda: (os.write(READY, b'ready\\n'), time.sleep(600))).start()
        ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)
        """
    )
    probe = ExitProbe(child.process)
    wait_until(
        lambda: (found := read_stat(child.process.pid)) is not None and found.state == "Z",
        "the leader is a zombie",
    )

    for _ in range(100):
        assert probe.poll() is None
    assert probe.live_threads() == 1
    signal_process(child.process, signal.SIGKILL)
    wait_until(lambda: probe.poll() is not None, "evidence")


def test_a_zombie_is_dead_by_flags_and_a_reaped_process_is_gone(stage: Stage) -> None:
    child, _ = stage.start(THREADS)
    as_zombie, as_gone = ExitProbe(child.process), ExitProbe(child.process)
    signal_process(child.process, signal.SIGKILL)
    wait_until(lambda: is_readable(child.pidfd), "a zombie")

    assert is_same(child.process), "a zombie still owns its pid"
    proof = as_zombie.poll()
    assert proof is not None
    assert proof.kind is EvidenceKind.FLAGS

    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
    assert not is_same(child.process)
    for probe in (as_gone, ExitProbe(child.process)):
        gone = probe.poll()
        assert gone is not None
        assert gone.kind is EvidenceKind.GONE


def can_dump_core_here() -> bool:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    return not pattern.startswith(("|", "/")) and (hard < 0 or hard > 2 << 30)


@pytest.mark.skipif(not can_dump_core_here(), reason="core dumps go elsewhere on this system")
@on_both_loops
async def test_a_crash_that_dumps_a_large_core_is_seen_at_once(
    stage: Stage,
) -> None:
    child, _ = stage.start(THREADS + BALLAST.replace("1 << 30", "1 << 28"), core_dumps=True)
    resource.prlimit(child.process.pid, resource.RLIMIT_CORE, (2 << 30, 2 << 30))
    handle = ProcessHandle.of_child(child)
    watcher = ExitWatcher()
    seen: list[bool] = []
    watcher.watch(child.process, lambda _: seen.append(is_readable(child.pidfd)))

    handle.send_signal(signal.SIGSEGV)
    await eventually(lambda: bool(seen), "exit evidence")
    assert seen == [False], "the evidence came only after the dump"
    assert await handle.wait_reaped(timeout_s=DEADLINE_S) == -signal.SIGSEGV

    watcher.close()
    handle.close()


# --- handle -----------------------------------------------------------------------------------


@on_both_loops
async def test_a_hundred_lives_leak_no_descriptor(tmp_path: Path) -> None:
    watcher = ExitWatcher()

    async def one_life(number: int) -> None:
        child = spawn(
            ["sleep", "600"],
            env={"PATH": os.environ["PATH"]},
            log_path=tmp_path / "log",
            marker=Marker(STATE_ID, f"short-{number}"),
            cwd=tmp_path,
        )
        handle = ProcessHandle.of_child(child)
        watch = watcher.watch(child.process, lambda _: None)
        await fence(handle, timeout_s=DEADLINE_S)
        assert await handle.wait_reaped(timeout_s=DEADLINE_S) == -signal.SIGKILL
        watch.cancel()
        handle.close()
        handle.close()

    await one_life(0)
    before = open_descriptors()
    for number in range(1, 101):
        await one_life(number)
    assert open_descriptors() == before
    watcher.close()


@on_both_loops
async def test_an_exit_code_is_reported_once_the_child_is_reaped(stage: Stage) -> None:
    child, _ = stage.start("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))")
    handle = ProcessHandle.of_child(child)
    assert not await handle.wait_user_code_dead(timeout_s=0.01)
    assert await handle.wait_reaped(timeout_s=0.01) is None
    assert not handle.has_ended

    assert await handle.terminate(grace_s=DEADLINE_S)
    assert await handle.wait_reaped(timeout_s=DEADLINE_S) == 7
    assert handle.evidence is not None
    assert not handle.send_signal(signal.SIGTERM)
    assert read_stat(child.process.pid) is None, "no zombie is left"
    handle.close()


@on_both_loops
async def test_terminate_wakes_a_stopped_process_and_kills_a_deaf_one(stage: Stage) -> None:
    polite, _ = stage.start("signal.signal(signal.SIGTERM, lambda *_: os._exit(0))")
    deaf, _ = stage.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    signal_process(polite.process, signal.SIGSTOP)
    for child, goes, status in ((polite, True, 0), (deaf, False, -signal.SIGKILL)):
        handle = ProcessHandle.of_child(child)
        grace_s = DEADLINE_S if goes else 0.05
        assert await handle.terminate(grace_s=grace_s) is goes
        assert await handle.wait_reaped(timeout_s=DEADLINE_S) == status
        handle.close()


@on_both_loops
async def test_an_adopted_process_ends_without_a_status_unless_its_parent_reports(
    stage: Stage,
) -> None:
    _, pids = stage.start(
        """
        pid = os.fork()
        if not pid:
            os.setsid()
            while True: time.sleep(60)
        os.write(READY, b'%d\\n' % pid)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        """
    )
    handle = ProcessHandle.adopt(read_process_id(pids[0]), None)

    evidence = await fence(handle, timeout_s=DEADLINE_S)
    assert [proof.process.pid for proof in evidence.members] == pids
    assert await handle.wait_reaped(timeout_s=DEADLINE_S) is None
    assert handle.has_ended
    handle.report_exit(-9)
    assert handle.exit_status == -9
    handle.close()


@on_both_loops
async def test_adopting_a_pid_with_a_new_owner_is_refused(stage: Stage) -> None:
    child, _ = stage.start("")
    stale = replace(child.process, start_ticks=child.process.start_ticks - 100)

    with pytest.raises(ProcessGoneError):
        ProcessHandle.adopt(stale, child.marker)


# --- trees and fences -------------------------------------------------------------------------

SETTLED, SETTLING = "reader, writer = os.pipe()\n", "os.close(writer)\nos.read(reader, 1)\n"
"""Around forks: the second waits until every fork has closed the pipe, or lost it by an exec."""

ESCAPEES = f"""
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
{SETTLED}
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.write(READY, b'%d ' % os.getpid())
    if not os.fork():
        os.write(READY, b'%d ' % os.getpid())
    os.close(writer)
    while True: time.sleep(60)
if not os.fork():
    os.setsid()
    os.write(READY, b'%d ' % os.getpid())
    os.execve('/bin/sleep', ['sleep', '600'], {{}})
{SETTLING}
"""


@on_both_loops
async def test_a_fence_takes_workers_and_setsid_escapees_and_their_children(stage: Stage) -> None:
    child, pids = stage.start(ESCAPEES)
    handle = ProcessHandle.of_child(child)
    assert len(pids) == 3
    marked = {
        process.pid for process, name in find_marked(STATE_ID) if name == child.marker.instance
    }
    assert len(marked) == 3, "the leader, the escapee and its child; the worker dropped it all"

    evidence = await fence(handle, timeout_s=DEADLINE_S)

    assert {proof.process.pid for proof in evidence.members} >= {child.process.pid, *pids}
    assert not any(is_running(pid) for pid in pids)
    assert evidence.proven_ns >= max(proof.detected_ns for proof in evidence.members)
    assert evidence.took_ms > 0
    handle.close()


def test_kill_tree_without_any_event_loop_kills_the_same_processes(stage: Stage) -> None:
    child, pids = stage.start(ESCAPEES)

    report = kill_tree(ProcessTree(child.process, child.marker))

    assert report.is_complete
    assert not report.refused
    assert {process.pid for process in report.killed} >= {child.process.pid, *pids}
    wait_until(lambda: not any(is_running(pid) for pid in pids), "all dead")


@on_both_loops
async def test_fencing_a_zygote_leaves_its_engines_alone(stage: Stage) -> None:
    zygote, pids = stage.start(
        f"""
        {SETTLED}
        if not os.fork():
            os.setsid()
            os.write(READY, b'%d ' % os.getpid())
            mark = {{'UNDERSTUDY_INSTANCE': '{STATE_ID}:engine-of-zygote'}}
            os.execve('/bin/sleep', ['sleep', '600'], mark)
        os.close(writer)
        os.read(reader, 1)
        """
    )
    engine = read_process_id(pids[0])

    await fence(ProcessTree(zygote.process, zygote.marker), timeout_s=DEADLINE_S)

    assert not is_running(zygote.process.pid)
    assert is_running(engine.pid)
    await fence(ProcessTree(engine, Marker(STATE_ID, "engine-of-zygote")), timeout_s=DEADLINE_S)
    assert not is_running(engine.pid)


@on_both_loops
async def test_a_fence_proves_a_stopped_tree_dead(stage: Stage) -> None:
    child, _ = stage.start(THREADS)
    signal_process(child.process, signal.SIGSTOP)

    evidence = await fence(ProcessTree(child.process, child.marker), timeout_s=DEADLINE_S)

    assert [proof.process for proof in evidence.members] == [child.process]


@on_both_loops
async def test_a_fence_does_not_wait_for_the_memory(stage: Stage) -> None:
    child, _ = stage.start(THREADS + BALLAST)

    await fence(ProcessTree(child.process, child.marker), timeout_s=DEADLINE_S)

    assert not is_readable(child.pidfd), "the proof came as late as the pidfd"


@on_both_loops
async def test_a_fence_can_be_repeated(stage: Stage) -> None:
    child, _ = stage.start(THREADS)
    tree = ProcessTree(child.process, child.marker)
    before = open_descriptors()

    first = await fence(tree, timeout_s=DEADLINE_S)
    again = await fence(tree, timeout_s=DEADLINE_S)

    assert first.root == again.root == child.process
    assert open_descriptors() == before


def run_script(script: str, *argv: str) -> None:
    """Run a script that may change this kind of process for life, and wants a clean exit."""
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


FENCE_AS_NOBODY = """
import asyncio, os, sys
from supervisor.process import FenceNotProvenError, ProcessTree, fence, read_process_id

victim = read_process_id(int(sys.argv[1]))
os.setresuid(65534, 65534, 65534)
before = os.listdir("/proc/self/fd")
try:
    asyncio.run(fence(ProcessTree(victim, None), timeout_s=0.05))
except FenceNotProvenError as error:
    assert error.victim == victim
    assert error.alive == (victim,)
    assert "61 live threads" in str(error), error
else:
    raise AssertionError("proven, though nobody may kill it")
assert os.listdir("/proc/self/fd") == before
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without the right")
def test_a_fence_without_proof_is_an_error(stage: Stage) -> None:
    child, _ = stage.start(THREADS)

    run_script(FENCE_AS_NOBODY, str(child.process.pid))

    assert is_running(child.process.pid)


@on_both_loops
async def test_a_fence_of_a_reused_pid_touches_nobody(stage: Stage) -> None:
    bystander, _ = stage.start("")
    stale = replace(bystander.process, start_ticks=bystander.process.start_ticks - 100)

    evidence = await fence(
        ProcessTree(stale, Marker(STATE_ID, "another-life")), timeout_s=DEADLINE_S
    )

    assert [proof.kind for proof in evidence.members] == [EvidenceKind.GONE]
    assert is_running(bystander.process.pid)


@on_both_loops
async def test_a_fence_of_ourselves_is_refused() -> None:
    with pytest.raises(ValueError, match="refusing"):
        await fence(ProcessTree(read_process_id(os.getpid()), None), timeout_s=1.0)


ORPHANS = """
import os, subprocess, sys, tempfile, time
from pathlib import Path
from supervisor.process import Marker, become_subreaper, read_stat, reap_orphans, spawn

become_subreaper()
assert reap_orphans(()) == []
folder = Path(tempfile.mkdtemp())

def start(name, script):
    return spawn(["sh", "-c", script], env=os.environ, log_path=folder / name, cwd=folder,
                 marker=Marker("0badcafe", name))

def becomes_zombie(pid):
    deadline = time.monotonic() + 20
    while (found := read_stat(pid)) is None or found.state != "Z":
        assert time.monotonic() < deadline, pid
        time.sleep(0.002)

parent = start("parent", "sh -c 'read x < gate; exit 5' & echo $! > orphan; exit 3")
helper = subprocess.Popen(["sh", "-c", "exit 4"])
becomes_zombie(parent.process.pid)
becomes_zombie(helper.pid)
orphan = int((folder / "orphan").read_text())
becomes_zombie(orphan)  # there is no gate, so it ends with an error

buried = reap_orphans({parent.process.pid})
assert [(dead.pid, dead.exit_status) for dead in buried] == [(orphan, 5)], buried
assert helper.wait() == 4
assert os.waitid(os.P_PIDFD, parent.pidfd, os.WEXITED).si_status == 3
"""


def test_orphans_are_reaped_and_owned_children_are_not() -> None:
    run_script(ORPHANS)
