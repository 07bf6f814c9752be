"""The zygote: one thread, fast forks, clean children, and nobody who can block it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache.errors import ConnectionClosedError, RemoteError
from cache.protocol import LoadSpec
from cache.rpc import Hello
from cache.wire import Connection, Event, Request
from engines.contract import (
    ZYGOTE_PROTOCOL,
    ZYGOTE_VERSION,
    ChildRecord,
    Children,
    EngineSpec,
    Fork,
    GenerateBody,
    ZygoteHello,
)
from tests.integration.engines_support import (
    MARKER,
    Engine,
    ZygoteClient,
    cache_daemon,
    engine_spec,
    wait_for,
    without_descriptors,
    zygote,
)

HELLO = Hello(ZYGOTE_PROTOCOL, ZYGOTE_VERSION, "tests")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    run_dir = tmp_path_factory.mktemp("run")
    with cache_daemon(run_dir), zygote(run_dir) as client:
        yield client
        # Last of all: SIGTERM ends the zygote in order and leaves its children alone.
        child = client.fork(spec(client))
        assert client.spawned.terminate() == 0
        assert not (run_dir / "zygote.sock").exists()
        assert state_of(child.pid) not in ("Z", "X")


def spec(parent: ZygoteClient, **changes: Any) -> EngineSpec:
    name = f"chat-{os.urandom(3).hex()}"
    return engine_spec(parent.run_dir, name, **changes)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def environ_of(pid: int) -> dict[str, str]:
    data = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in data if b"=" in entry)


def children_of(connection: Connection) -> list[ChildRecord]:
    raw, _ = connection.call("children", timeout_s=5)
    return msgspec.json.decode(raw, type=Children).children


def client_of(parent: ZygoteClient) -> Connection:
    connection = Connection.open(parent.run_dir / "zygote.sock")
    connection.call("hello", HELLO, timeout_s=5)
    return connection


def status_of(parent: ZygoteClient, pid: int) -> int | None:
    return next(r.status for r in children_of(parent.connection) if r.pid == pid)


def fds_of(pid: int) -> dict[str, str]:
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            found[entry.name] = str(entry.readlink())
    return found


def start_ticks_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def next_exit(connection: Connection, pid: int) -> ChildRecord:
    """The `exited` event of this child; those of earlier ones may come before it."""
    while True:
        frame, _ = connection.receive(timeout_s=10, what="an exit event")
        if isinstance(frame, Event):
            record = msgspec.json.decode(frame.params, type=ChildRecord)
            if record.pid == pid:
                return record


def test_it_listens_with_exactly_one_thread(parent: ZygoteClient) -> None:
    hello = msgspec.json.decode(parent.hello, type=ZygoteHello)
    assert hello.threads == 1
    assert hello.pid == parent.spawned.pid
    assert hello.ready_ms > 0
    assert len(list(Path(f"/proc/{hello.pid}/task").iterdir())) == 1


async def test_a_fork_is_a_process_of_its_own_and_serves(parent: ZygoteClient) -> None:
    wanted = spec(parent, niceness=3, private_kv=True, slots=4)
    started = time.monotonic()
    record = parent.fork(wanted)
    fork_s = time.monotonic() - started
    engine = Engine(wanted)
    status = await engine.ready()

    assert fork_s < 1.0
    assert status.pid == record.pid
    assert os.getsid(record.pid) == record.pid
    assert os.getpriority(os.PRIO_PROCESS, record.pid) == 3
    assert start_ticks_of(record.pid) == record.start_ticks
    marker = environ_of(record.pid)["UNDERSTUDY_INSTANCE"]
    assert marker.rstrip() == MARKER + wanted.instance
    assert len(marker) == 96
    assert environ_of(parent.spawned.pid)["UNDERSTUDY_INSTANCE"].startswith(MARKER + "zygote")

    fds = fds_of(record.pid)
    assert fds["0"] == "/dev/null"
    assert fds["1"] == fds["2"] == str(parent.run_dir / f"{wanted.name}.log")
    assert not [target for target in fds.values() if "zygote" in target]

    await engine.assume("batch", 1)
    stream = await engine.complete(
        GenerateBody("completion", prompt="The lantern", max_tokens=5, temperature=0.0)
    )
    assert len(stream.token_ids) == 5
    await engine.call("shutdown")
    assert wait_for(lambda: status_of(parent, record.pid) == 0)


async def test_without_a_daemon_an_engine_loads_for_itself(parent: ZygoteClient) -> None:
    """Cache mode `off`: memory of its own, any role, nothing to adopt and nothing to donate."""
    wanted = spec(parent, cache_socket=None)
    parent.fork(wanted)
    engine = Engine(wanted)
    status = await engine.ready()
    assert not status.cache_registered
    assert (await engine.assume("standby", 1)).role == "standby"
    assert (await engine.assume("primary", 2)).adopted == []
    stream = await engine.complete(
        GenerateBody("completion", prompt="The lantern", max_tokens=5, temperature=0.0)
    )
    assert len(stream.token_ids) == 5
    await engine.call("shutdown")


def test_a_killed_child_is_reported_to_every_client_and_remembered(parent: ZygoteClient) -> None:
    first, second = client_of(parent), client_of(parent)
    record = parent.fork(spec(parent))
    assert record in children_of(first)

    os.kill(record.pid, signal.SIGKILL)

    for client in (first, second):
        assert next_exit(client, record.pid).status == signal.SIGKILL
    late = client_of(parent)
    assert [r.status for r in children_of(late) if r.pid == record.pid] == [signal.SIGKILL]
    for client in (first, second, late):
        client.close()


def test_a_failed_start_is_an_exit_status_and_one_line(parent: ZygoteClient) -> None:
    wanted = spec(parent, max_length=1_000_000)
    client = client_of(parent)
    record = parent.fork(wanted)

    ended = next_exit(client, record.pid)

    assert os.waitstatus_to_exitcode(ended.status or 0) == 1
    log = (parent.run_dir / f"{wanted.name}.log").read_text().splitlines()
    errors = [line for line in log if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: unsupported_model: kv.max_length 1000000 is over")
    client.close()


def test_a_client_that_does_not_read_blocks_nobody(parent: ZygoteClient) -> None:
    mute = client_of(parent)
    cut_off = False
    for number in range(200_000):
        try:
            mute.send(Request(number + 10, "children"), timeout_s=1.0)
        except ConnectionClosedError:
            cut_off = True
            break
    started = time.monotonic()
    other = client_of(parent)
    children_of(other)
    record = parent.fork(spec(parent))

    assert cut_off
    assert time.monotonic() - started < 5.0
    os.kill(record.pid, signal.SIGKILL)
    assert next_exit(other, record.pid).status == signal.SIGKILL
    mute.close()
    other.close()


def test_orders_that_cannot_be_obeyed_are_refused(parent: ZygoteClient) -> None:
    client = client_of(parent)
    good = spec(parent)

    def refusal(order: Fork, fds: list[int]) -> str:
        with pytest.raises(RemoteError) as refused:
            client.call("fork", order, fds=fds, timeout_s=5)
        return refused.value.stable_code

    with Path(os.devnull).open("wb") as log:
        other_model = msgspec.structs.replace(good, load=LoadSpec("/nowhere"))
        assert refusal(Fork(good, MARKER + good.instance), []) == "protocol"
        assert refusal(Fork(other_model, MARKER + good.instance), [log.fileno()]) == "protocol"
        assert refusal(Fork(good, "x" * 97), [log.fileno()]) == "marker"
    with pytest.raises(RemoteError) as unknown:
        client.call("dance", timeout_s=5)
    assert unknown.value.stable_code == "protocol"
    assert children_of(client) == children_of(parent.connection)
    client.close()


def test_hello_comes_first_and_must_fit(parent: ZygoteClient) -> None:
    for verb, params in (
        ("children", None),
        ("hello", Hello(ZYGOTE_PROTOCOL, ZYGOTE_VERSION + 1)),
        ("hello", Hello("other", ZYGOTE_VERSION)),
    ):
        connection = Connection.open(parent.run_dir / "zygote.sock")
        with pytest.raises(RemoteError) as refused:
            connection.call(verb, params, timeout_s=5)
        assert refused.value.stable_code.startswith("protocol")
        connection.close()


def test_without_a_descriptor_clients_wait_and_the_zygote_does_not_spin(
    parent: ZygoteClient,
) -> None:
    log = parent.spawned.log
    before = log.read_text().count("cannot accept")
    with without_descriptors(parent.spawned.pid):
        other = Connection.open(parent.run_dir / "zygote.sock")
        time.sleep(1.0)
        assert 0 < log.read_text().count("cannot accept") - before <= 30
    other.call("hello", HELLO, timeout_s=5)
    other.close()
