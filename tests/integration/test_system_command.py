"""Servers of another maker as engines: two real ones, a real supervisor, the official client."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from chaos.client import AdminRequestError, wait_until
from chaos.system import ROOT, RunningSystem, free_ports
from supervisor.process import ProcessId, read_stat
from tests.harness.command_system import CommandOptions, CommandSystem

HANG_AFTER_S = 1.0
A_SWEEP_S = 6.5
"""Strays are looked for every five seconds."""

QUICK_S = 8.0
"""From a fault to the answer of the new primary: detection, fence and promotion on busy cores."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandSystem]:
    made = CommandSystem(tmp_path_factory.mktemp("servers"))
    with made.system:
        yield made


@pytest.fixture
def client(servers: CommandSystem) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=servers.system.base_url, api_key="none", max_retries=0, timeout=60.0
    )


def complete(client: openai.OpenAI, tokens: int = 4) -> str:
    answer = client.completions.create(model="chat", prompt="p", max_tokens=tokens)
    return answer.choices[0].text


def refused(client: openai.OpenAI) -> int | None:
    """The status of a refusal; None when the answer came."""
    try:
        complete(client)
    except openai.APIStatusError as error:
        return error.status_code
    return None


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


class Stream:
    """A streamed answer, read in a thread."""

    def __init__(self, client: openai.OpenAI, tokens: int) -> None:
        self.text = ""
        self.error: openai.APIError | None = None
        self.has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, tokens), daemon=True)
        self._thread.start()

    def _read(self, client: openai.OpenAI, tokens: int) -> None:
        try:
            chunks = client.chat.completions.create(
                model="chat",
                messages=[{"role": "user", "content": "p"}],
                max_tokens=tokens,
                stream=True,
            )
            for chunk in chunks:
                self.text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if self.text:
                    self.has_begun.set()
        except openai.APIError as error:
            self.error = error

    def end(self, timeout_s: float = 30.0) -> "Stream":
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still open after {self.text[-50:]!r}"
        return self


def beside(work: Callable[[], str]) -> "Future[str]":
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def is_gone(process: ProcessId) -> bool:
    stat = read_stat(process.pid)
    return stat is None or stat.start_ticks != process.start_ticks or stat.state == "Z"


def test_the_official_client_is_served_and_the_status_is_honest(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    assert servers.primary() in {"chat-a", "chat-b"}
    assert complete(client, 6) == words(6)
    answer = client.completions.create(model="chat", prompt="p", max_tokens=3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert Stream(client, 5).end().text == words(5)
    body = servers.system.admin.get("/v1/status")
    assert isinstance(body, dict)
    (group,) = body["groups"]
    assert group["cache"] == []
    assert group["zygote"]["pid"] is None
    for engine in group["engines"]:
        assert engine["kind"] == "command"
        assert (engine["resumable"], engine["exact"]) == (False, False)


@pytest.mark.parametrize("victim", ["server", "adapter"])
def test_a_killed_primary_is_replaced_and_its_whole_tree_is_gone(
    servers: CommandSystem, client: openai.OpenAI, victim: str
) -> None:
    name = servers.primary()
    epoch, server = servers.system.admin.status().group.epoch, servers.server(name)
    if victim == "server":
        servers.signal_server(name, signal.SIGKILL)
    else:
        servers.system.kill("primary")
    began_s = time.monotonic()
    assert complete(client) == words(4), "a request that finds nobody waits for the new primary"
    assert time.monotonic() - began_s < QUICK_S
    after = servers.wait_epoch(epoch)
    assert after.group.primary != name
    wait_until(lambda: is_gone(server), "the end of the old server", timeout_s=5.0)


def test_one_that_leaves_by_itself_is_a_crash_and_is_replaced(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    crashes = servers.events("engine_crashed")
    servers.order(name, "leave")
    servers.wait_epoch(epoch)
    assert complete(client) == words(4)
    wait_until(lambda: servers.events("engine_crashed") > crashes, "its exit status",
               timeout_s=5.0)  # fmt: skip


def test_a_stopped_server_is_found_hung_though_the_adapter_answers(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    server = servers.signal_server(name, signal.SIGSTOP)
    servers.wait_epoch(epoch)
    assert is_gone(server)
    assert complete(client) == words(4)


def test_a_stopped_standby_is_replaced(servers: CommandSystem, client: openai.OpenAI) -> None:
    primary = servers.primary()
    epoch = servers.system.admin.status().group.epoch
    (standby,) = servers.system.admin.status().group.standby
    old = servers.engine(standby).instance
    servers.signal_server(standby, signal.SIGSTOP)
    wait_until(lambda: servers.engine(standby).instance != old, "a new standby", timeout_s=20.0)
    after = servers.system.wait_whole()
    assert (after.group.primary, after.group.epoch) == (primary, epoch)


@pytest.mark.parametrize("how", ["stall", "jam"])
def test_decode_that_stands_still_behind_a_well_health_is_hung(
    servers: CommandSystem, client: openai.OpenAI, how: str
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    whole = beside(lambda: complete(client, 300))
    time.sleep(0.5)
    servers.order(name, how)
    assert whole.result(30.0) == words(300), "asked again at the new one"
    assert servers.wait_epoch(epoch).group.primary != name


def test_a_standby_that_stands_still_is_replaced_too(servers: CommandSystem) -> None:
    primary = servers.primary()
    (standby,) = servers.system.admin.status().group.standby
    old = servers.engine(standby).instance
    servers.order(standby, "stall")
    wait_until(lambda: servers.engine(standby).instance != old, "a new standby", timeout_s=20.0)
    assert servers.primary() == primary


@pytest.mark.parametrize("how", ["wrong", "broken"])
def test_a_primary_that_answers_wrongly_is_replaced(
    servers: CommandSystem, client: openai.OpenAI, how: str
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    servers.order(name, how)
    assert servers.wait_epoch(epoch).group.primary != name
    assert complete(client) == words(4)


@pytest.mark.parametrize(("mode", "status"), [("full", 429), ("sick", 503), ("refuse", 400)])
def test_refusals_reach_the_client_and_nobody_is_restarted_for_them(
    servers: CommandSystem, client: openai.OpenAI, mode: str, status: int
) -> None:
    name = servers.primary()
    before = servers.system.admin.status().group
    servers.order(name, mode)
    try:
        wait_until(lambda: refused(client) == status, "the first refusal", timeout_s=5.0)
        end_s = time.monotonic() + 4.0
        while time.monotonic() < end_s:
            assert refused(client) == status
            time.sleep(0.2)
    finally:
        servers.order(name, "well")
    wait_until(lambda: refused(client) is None, "an answer again", timeout_s=5.0)
    after = servers.system.admin.status().group
    assert after.epoch == before.epoch
    assert [e.instance for e in after.engines] == [e.instance for e in before.engines]
    assert complete(client) == words(4)


def test_one_that_works_at_its_limit_is_busy_and_is_left_alone(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    servers.primary()
    before = servers.system.admin.status().group
    streams = [Stream(client, 600) for _ in range(12)]
    for stream in streams:
        assert stream.end(60.0).text == words(600)
    after = servers.system.admin.status().group
    assert (after.epoch, after.primary) == (before.epoch, before.primary)


def weigh_session(pid: int, niceness: int) -> None:
    """Sessions share a CPU evenly, whatever their processes' priorities, where there are groups."""
    file = Path(f"/proc/{pid}/autogroup")
    if file.exists():
        file.write_text(str(niceness), "ascii")


def test_a_server_that_waits_for_a_cpu_is_busy_and_is_left_alone(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    """Nothing moves for seconds, and the reason is that the server has no CPU."""
    name = servers.primary()
    before = servers.system.admin.status().group
    server, everywhere = servers.server(name).pid, os.sched_getaffinity(0)
    computed_s = servers.cpu_s(name) + 1.0
    servers.order(name, "churn")
    wait_until(lambda: servers.cpu_s(name) > computed_s, "a canary that computes", timeout_s=20.0)
    os.sched_setaffinity(server, {min(everywhere)})
    os.sched_setscheduler(server, os.SCHED_IDLE, os.sched_param(0))
    weigh_session(server, 19)
    code = f"import os; os.sched_setaffinity(0, {{{min(everywhere)}}})\nwhile True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(6)]
    try:
        waiting = beside(lambda: complete(client, 8))
        time.sleep(5 * HANG_AFTER_S)
        assert not waiting.done()
        assert servers.system.admin.status().group.epoch == before.epoch
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
        weigh_session(server, 0)
    os.sched_setscheduler(server, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(server, everywhere)
    assert waiting.result(60.0) == words(8)
    servers.order(name, "well")
    after = servers.system.admin.status().group
    assert (after.epoch, after.primary) == (before.epoch, before.primary)


def test_a_stream_that_is_cut_ends_with_a_typed_error_and_never_silently(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    stream = Stream(client, 2000)
    assert stream.has_begun.wait(10.0)
    servers.signal_server(name, signal.SIGKILL)
    stream.end()
    assert stream.error is not None
    assert stream.error.code == "stream_lost"
    assert stream.text == words(2000)[: len(stream.text)]
    servers.wait_epoch(epoch)


def test_an_answer_in_one_piece_is_asked_again_at_the_new_primary(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    whole = beside(lambda: complete(client, 300))
    time.sleep(0.5)
    assert not whole.done()
    servers.signal_server(name, signal.SIGKILL)
    assert whole.result(30.0) == words(300)
    servers.wait_epoch(epoch)


def test_a_switchover_drains_and_no_stream_notices(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name = servers.primary()
    streams = [Stream(client, 300) for _ in range(3)]
    for stream in streams:
        assert stream.has_begun.wait(10.0)
    admin = servers.system.admin
    done = beside(lambda: admin.post("/v1/promote", timeout_s=60.0, group="chat").state)
    time.sleep(0.3)
    late = beside(lambda: complete(client))
    for stream in streams:
        assert stream.end().text == words(300)
        assert stream.error is None
    assert late.result(30.0) == words(4), "what comes while it drains waits for the new primary"
    assert done.result(30.0) == "done"
    assert servers.primary() != name


def test_a_server_that_dies_while_it_drains_is_replaced(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    stream = Stream(client, 4000)
    assert stream.has_begun.wait(10.0)
    admin = servers.system.admin
    done = beside(lambda: admin.post("/v1/promote", timeout_s=60.0, group="chat").state)
    time.sleep(0.5)
    assert not done.done()
    servers.signal_server(name, signal.SIGKILL)
    assert done.result(30.0) == "done"
    stream.end()
    assert stream.error is not None
    assert servers.wait_epoch(epoch).group.primary != name
    assert complete(client) == words(4)


def test_a_server_that_hangs_while_it_drains_is_not_waited_for(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    stream = Stream(client, 4000)
    assert stream.has_begun.wait(10.0)
    admin, began_s = servers.system.admin, time.monotonic()
    done = beside(lambda: admin.post("/v1/promote", timeout_s=60.0, group="chat").state)
    time.sleep(0.3)
    servers.order(name, "stall")
    assert done.result(30.0) == "done"
    assert time.monotonic() - began_s < 10.0, "not until the drain is over"
    stream.end()
    assert stream.error is not None
    assert servers.wait_epoch(epoch).group.primary != name
    assert complete(client) == words(4)


def test_a_switchover_whose_standby_is_lost_while_the_primary_drains_is_given_up(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    name, epoch = servers.primary(), servers.system.admin.status().group.epoch
    (standby,) = {"chat-a", "chat-b"} - {name}
    stream = Stream(client, 600)
    assert stream.has_begun.wait(10.0)
    admin = servers.system.admin

    def promote() -> str:
        try:
            return str(admin.post("/v1/promote", timeout_s=60.0, group="chat").state)
        except AdminRequestError as error:
            return str(error)

    done = beside(promote)
    time.sleep(0.3)
    servers.signal_server(standby, signal.SIGKILL)
    assert f"{standby} was lost while {name} drained" in done.result(5.0)
    assert complete(client) == words(4), "the primary takes requests again at once"
    assert stream.end().text == words(600)
    assert servers.primary() == name
    assert admin.status().group.epoch == epoch


def test_a_request_that_ends_every_server_is_poison(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    servers.primary()
    epoch = servers.system.admin.status().group.epoch
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="chat", prompt="poison", max_tokens=4)
    assert caught.value.status_code == 500
    assert caught.value.code == "poison"
    assert servers.wait_epoch(epoch + 2).group.is_redundant
    assert complete(client) == words(4)


def test_a_killed_supervisor_breaks_no_stream_and_the_next_one_adopts_both(
    servers: CommandSystem, client: openai.OpenAI
) -> None:
    servers.primary()
    before = servers.system.admin.status().group
    stream = Stream(client, 800)
    assert stream.has_begun.wait(10.0)
    servers.system.kill("supervisor")
    servers.system.supervisor.wait(10)
    servers.system.spawn_supervisor()
    servers.system.wait_ready()
    after = servers.system.admin.status().group
    assert (after.epoch, after.primary) == (before.epoch, before.primary)
    assert [e.pid for e in after.engines] == [e.pid for e in before.engines]
    assert stream.end().text == words(800)
    assert stream.error is None
    assert complete(client) == words(4)


def test_the_shipped_example_runs_as_the_readme_says(tmp_path: Path) -> None:
    gateway, admin = free_ports(2)
    text = (ROOT / "configs" / "command.yaml").read_text("utf-8")
    for old, new in (
        ("run/servers", str(tmp_path / "state")), ("8000", str(gateway)), ("9400", str(admin)),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    topology = tmp_path / "topology.yaml"
    topology.write_text(text, "utf-8")
    system = RunningSystem(
        tmp_path, topology=topology, state_dir=tmp_path / "state", ports=(gateway, admin)
    )
    with system:
        client = openai.OpenAI(base_url=system.base_url, api_key="none", max_retries=0)
        assert complete(client, 3) == "p p p "
        before = system.admin.status().group
        system.kill("primary")
        assert Stream(client, 3).end().text == "p p p "
        assert system.wait_whole().group.epoch == before.epoch + 1


def test_servers_on_unix_sockets_that_leave_the_session_are_adopted_and_fenced_too(
    tmp_path: Path,
) -> None:
    options = CommandOptions(where='--uds, "{socket}"', more=", --escape", drain_timeout="1s")
    made = CommandSystem(tmp_path, options)
    with made.system:
        client = openai.OpenAI(base_url=made.system.base_url, api_key="none", max_retries=0)
        name, epoch = made.primary(), made.system.admin.status().group.epoch
        server = made.server(name)
        assert complete(client) == words(4)
        before = [e.pid for e in made.system.admin.status().group.engines]
        made.system.kill("supervisor")
        made.system.supervisor.wait(10)
        made.system.spawn_supervisor()
        made.system.wait_ready()
        time.sleep(A_SWEEP_S)
        assert [e.pid for e in made.system.admin.status().group.engines] == before
        assert made.server(name) == server, "a leader of its own session, and no stray"
        made.system.kill("primary")
        made.wait_epoch(epoch)
        assert is_gone(server)
        assert complete(client) == words(4)
        # A drain has an end: what is left then is told so.
        stream = Stream(client, 100_000)
        assert stream.has_begun.wait(10.0)
        assert made.system.admin.post("/v1/promote", timeout_s=60.0, group="chat").state == "done"
        assert stream.end().error is not None
        assert stream.error is not None
        assert stream.error.code == "stream_lost"
