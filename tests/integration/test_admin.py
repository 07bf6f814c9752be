"""The admin API over real sockets, with a controller that answers from a script."""

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from supervisor.admin.controller import Controller, Operation
from supervisor.admin.routes import ROUTES
from supervisor.admin.server import AdminServer
from supervisor.errors import ConflictError, NotFoundError, PreconditionError
from supervisor.observe.events import EventLog
from supervisor.observe.metrics import Metrics
from supervisor.topology.schema import Topology

TOPOLOGY = Topology.model_validate({
    "version": 1,
    "name": "demo",
    "state_dir": "run",
    "groups": [{
        "name": "chat",
        "model": {"path": "model"},
        "engines": [
            {"name": "chat-a", "role": "primary"},
            {"name": "chat-b", "role": "standby"},
            {"name": "chat-batch", "role": "batch"},
        ],
    }],
})  # fmt: skip


def group(name: str, *, primary: str | None, standby: list[str], verdict: str = "healthy") -> Any:
    engines = [{"name": n, "verdict": verdict} for n in (f"{name}-a", f"{name}-b")]
    return {
        "name": name, "epoch": 3, "primary": primary, "standby": standby, "engines": engines,
    }  # fmt: skip


@dataclass
class FakeController:
    """Answers from a script and remembers what it was asked."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    groups: list[Any] = field(
        default_factory=lambda: [group("chat", primary="chat-a", standby=["chat-b"])]
    )
    live: bool = True
    ready: dict[str, bool] = field(default_factory=lambda: {"chat": True})
    error: Exception | None = None
    gate: asyncio.Event | None = None

    def _done(self, kind: str, *arguments: Any, **fields: Any) -> Operation:
        self.calls.append((kind, *arguments))
        if self.error is not None:
            raise self.error
        return Operation(id=f"op-{len(self.calls)}", kind=kind, epoch=4, text=kind, **fields)

    def status(self) -> dict[str, Any]:
        return {"name": "demo", "paused": False, "groups": self.groups}

    async def topology(self) -> dict[str, Any]:
        return TOPOLOGY.model_dump(mode="json")

    async def promote(
        self, group: str | None, to: str | None, expected_epoch: int | None, dry_run: bool
    ) -> Operation:
        if self.gate is not None:
            await self.gate.wait()
        return self._done(
            "promote", group, to, expected_epoch, dry_run, state="planned" if dry_run else "done"
        )

    async def failover(
        self, group: str | None, to: str | None, expected_epoch: int | None, dry_run: bool
    ) -> Operation:
        return self._done("failover", group, to, expected_epoch, dry_run)

    async def evict(self, engine: str, hold: bool, dry_run: bool) -> Operation:
        return self._done("evict", engine, hold, dry_run)

    async def resume(self, engine: str, dry_run: bool) -> Operation:
        return self._done("resume", engine, dry_run)

    async def freeze(self, engine: str) -> Operation:
        return self._done("freeze", engine)

    async def thaw(self, engine: str) -> Operation:
        return self._done("thaw", engine)

    async def restart(self, engine: str) -> Operation:
        return self._done("restart", engine)

    async def fence(self, engine: str, confirm: bool) -> Operation:
        return self._done("fence", engine, confirm)

    async def pause(self) -> Operation:
        return self._done("pause")

    async def unpause(self) -> Operation:
        return self._done("unpause")

    async def ack(self, group: str | None) -> Operation:
        return self._done("ack", group)

    async def stop(self) -> Operation:
        return self._done("stop")

    async def history(self) -> list[dict[str, Any]]:
        return [{"id": "op-1"}]

    async def operation(self, operation_id: str) -> Operation | None:
        return Operation(id="op-1", kind="promote") if operation_id == "op-1" else None

    async def is_live(self) -> bool:
        return self.live

    async def readiness(self) -> dict[str, bool]:
        return self.ready


@dataclass
class Admin:
    """A running server and two clients."""

    server: AdminServer
    controller: FakeController
    events: EventLog
    metrics: Metrics
    port: int
    tcp: aiohttp.ClientSession
    unix: aiohttp.ClientSession
    token: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # tmp_path may be too long for aiohttp's client
        yield Path(path)


async def start(state_dir: Path, **options: Any) -> Admin:
    controller: Controller = FakeController()
    assert isinstance(controller, FakeController)
    events = EventLog(state_dir)
    metrics = Metrics(TOPOLOGY, version="test")
    metrics.watch(events=events)
    sock = socket.create_server(("127.0.0.1", 0))
    server = AdminServer(controller, events, metrics, state_dir, sock, **options)
    await server.start()
    return Admin(
        server, controller, events, metrics, sock.getsockname()[1],
        aiohttp.ClientSession(),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(server.socket_path))),
        {"Authorization": f"Bearer {(state_dir / 'admin.token').read_text().strip()}"},
    )  # fmt: skip


async def end(admin: Admin) -> None:
    await admin.tcp.close()
    await admin.unix.close()
    await asyncio.wait_for(admin.server.stop(), 10)
    admin.events.close()


@pytest.fixture
async def admin(state_dir: Path) -> AsyncIterator[Admin]:
    running = await start(state_dir)
    yield running
    await end(running)


async def call(
    session: aiohttp.ClientSession, method: str, url: str, **options: Any
) -> tuple[int, Any]:
    async with session.request(method, url, **options) as response:
        text = await response.text()
        is_json = "json" in response.content_type
        if response.status >= 400 and is_json and response.content_type.endswith("problem+json"):
            document = json.loads(text)
            assert document["status"] == response.status
            assert document["type"] == f"urn:understudy:problem:{document['code']}"
        return response.status, json.loads(text) if is_json else text


# ------------------------------------------------------------------- who may ask


async def test_the_socket_and_the_token_are_private(admin: Admin, state_dir: Path) -> None:
    assert (state_dir / "admin.sock").stat().st_mode & 0o777 == 0o600
    assert (state_dir / "admin.token").stat().st_mode & 0o777 == 0o600
    assert len((state_dir / "admin.token").read_text().strip()) >= 43


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_over_tcp_only_open_routes_answer_without_the_token(admin: Admin, route: Any) -> None:
    url = admin.url + route.path.replace("{engine}", "chat-batch").replace("{id}", "op-1")
    status, body = await call(admin.tcp, route.method, url)
    if route.is_open:
        assert status == 200
        assert route.method == "GET"
    else:
        assert (status, body["code"]) == (401, "unauthorized")
    assert (await call(admin.tcp, route.method, url, headers=admin.token))[0] == 200
    assert route.is_open == (
        route.path in {"/livez", "/readyz", "/primary", "/standby", "/metrics", "/v1/status"}
    )


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_over_the_socket_everything_answers_without_a_token(admin: Admin, route: Any) -> None:
    path = route.path.replace("{engine}", "chat-batch").replace("{id}", "op-1")
    assert (await call(admin.unix, route.method, "http://localhost" + path))[0] == 200


async def test_with_auth_all_even_probes_need_the_token(state_dir: Path) -> None:
    admin = await start(state_dir, auth="all")
    for path in ("/livez", "/metrics", "/v1/status"):
        assert (await call(admin.tcp, "GET", admin.url + path))[0] == 401
        assert (await call(admin.tcp, "GET", admin.url + path, headers=admin.token))[0] == 200
    await end(admin)


@pytest.mark.parametrize("value", ["Bearer wrong", "Bearer ", "Basic x", "", "Bearer \xe9"])
async def test_a_wrong_token_is_refused(admin: Admin, value: str) -> None:
    headers = {"Authorization": value}
    status, body = await call(admin.tcp, "POST", admin.url + "/v1/pause", headers=headers)
    assert (status, body["code"]) == (401, "unauthorized")
    assert admin.controller.calls == []


async def test_a_token_in_another_case_of_bearer_is_taken(admin: Admin) -> None:
    headers = {"Authorization": admin.token["Authorization"].replace("Bearer", "bearer")}
    assert (await call(admin.tcp, "POST", admin.url + "/v1/pause", headers=headers))[0] == 200


async def test_each_start_has_its_own_token(state_dir: Path) -> None:
    first = await start(state_dir)
    await end(first)
    second = await start(state_dir)
    assert first.token != second.token
    await end(second)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:9400", 200), ("localhost:1", 200), ("LOCALHOST", 200), ("[::1]:9400", 200),
        ("127.8.8.8", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("192.168.0.7:9400", 403), ("localhost@evil.example", 403), ("evil@localhost", 403),
        ("", 403), ("[::1", 403),
    ],
)  # fmt: skip
async def test_the_host_header_must_be_loopback(admin: Admin, host: str, expected: int) -> None:
    assert (await call(admin.tcp, "GET", admin.url + "/livez", headers={"Host": host}))[0] == (
        expected
    )


async def test_a_foreign_web_page_is_refused_even_with_the_token(admin: Admin) -> None:
    url = admin.url + "/v1/status"
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{admin.port + 1}"):
        status, body = await call(admin.tcp, "GET", url, headers=admin.token | {"Origin": origin})
        assert (status, body["code"]) == (403, "forbidden")
    assert (await call(admin.tcp, "GET", url, headers={"Origin": admin.url}))[0] == 200


async def raw(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_load_balancer_may_ask_in_http_1_0_without_host(admin: Admin) -> None:
    assert b" 200 " in (await raw(admin.port, b"GET /primary HTTP/1.0\r\n\r\n")).splitlines()[0]
    answer = await raw(admin.port, b"GET /primary HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b" 400 " in answer.splitlines()[0]


async def test_another_user_is_refused_at_the_socket(admin: Admin, state_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.chmod(state_dir, 0o755)  # noqa: PTH101, S103 -- the peer check stands alone
    os.chmod(state_dir / "admin.sock", 0o666)  # noqa: PTH101, S103
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(b'GET /livez HTTP/1.0\\r\\n\\r\\n')\n"
        "sys.stdout.buffer.write(s.recv(4096))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(admin.server.socket_path), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert output.startswith(b"HTTP/1.0 403 ")


# ------------------------------------------------------------------------ looking


async def test_primary_and_standby_say_which_engine(admin: Admin) -> None:
    assert await call(admin.tcp, "GET", admin.url + "/primary") == (
        200, {"group": "chat", "engine": "chat-a", "epoch": 3},
    )  # fmt: skip
    assert (await call(admin.tcp, "GET", admin.url + "/standby"))[1]["engine"] == "chat-b"
    async with admin.tcp.head(admin.url + "/primary") as response:
        assert response.status == 200

    admin.controller.groups = [group("chat", primary=None, standby=[])]
    assert await call(admin.tcp, "GET", admin.url + "/primary") == (
        503, {"group": "chat", "engine": None, "epoch": 3},
    )  # fmt: skip
    assert (await call(admin.tcp, "GET", admin.url + "/standby"))[0] == 503
    async with admin.tcp.head(admin.url + "/primary") as response:
        assert response.status == 503


async def test_a_hung_primary_is_no_primary_for_a_load_balancer(admin: Admin) -> None:
    admin.controller.groups = [group("chat", primary="chat-a", standby=[], verdict="HUNG")]
    assert (await call(admin.tcp, "GET", admin.url + "/primary"))[0] == 503


async def test_with_several_groups_one_must_be_named(admin: Admin) -> None:
    admin.controller.groups.append(group("code", primary=None, standby=[]))
    admin.controller.ready["code"] = False
    status, body = await call(admin.tcp, "GET", admin.url + "/primary")
    assert status == 400
    assert "chat, code" in body["hint"]
    assert (await call(admin.tcp, "GET", admin.url + "/primary?group=chat"))[0] == 200
    assert (await call(admin.tcp, "GET", admin.url + "/primary?group=code"))[0] == 503
    assert (await call(admin.tcp, "GET", admin.url + "/primary?group=no"))[0] == 404
    assert (await call(admin.tcp, "GET", admin.url + "/readyz"))[0] == 503
    assert (await call(admin.tcp, "GET", admin.url + "/readyz?group=chat"))[0] == 200
    assert (await call(admin.tcp, "GET", admin.url + "/readyz?group=no"))[0] == 404


async def test_livez_and_readyz_follow_the_controller(admin: Admin) -> None:
    admin.controller.live = False
    admin.controller.ready = {}
    assert await call(admin.tcp, "GET", admin.url + "/livez") == (503, {"live": False})
    assert (await call(admin.tcp, "GET", admin.url + "/readyz"))[0] == 503


async def test_metrics_count_the_requests_by_route_template(admin: Admin) -> None:
    await call(admin.unix, "POST", "http://localhost/v1/evict/chat-batch")
    await call(admin.unix, "GET", "http://localhost/no/such/path")
    _, text = await call(admin.tcp, "GET", admin.url + "/metrics")
    prefix = "understudy_admin_requests_total"
    assert f'{prefix}{{method="POST",route="/v1/evict/{{engine}}",status="200"}} 1.0' in text
    assert f'{prefix}{{method="GET",route="other",status="404"}} 1.0' in text


async def test_history_topology_and_operations(admin: Admin) -> None:
    base = "http://localhost/v1/"
    assert (await call(admin.unix, "GET", base + "history"))[1] == {"operations": [{"id": "op-1"}]}
    assert (await call(admin.unix, "GET", base + "topology"))[1]["name"] == "demo"
    assert (await call(admin.unix, "GET", base + "operations/op-1"))[1]["operation"]["id"] == "op-1"
    status, body = await call(admin.unix, "GET", base + "operations/op-2")
    assert (status, body["code"]) == (404, "not_found")


# ------------------------------------------------------------------------- acting


async def test_parameters_reach_the_controller_from_body_and_query(admin: Admin) -> None:
    base = "http://localhost/v1/"
    body = {"group": "chat", "to": "chat-b", "expected_epoch": 3}
    status, answer = await call(admin.unix, "POST", base + "promote?dry_run=true", json=body)
    assert status == 200
    assert answer["operation"]["state"] == "planned"
    await call(admin.unix, "POST", base + "failover?to=chat-b&dry_run=false")
    await call(admin.unix, "POST", base + "evict/chat-batch", json={"hold": True})
    await call(admin.unix, "POST", base + "resume/chat-batch", json={"dry_run": True})
    await call(admin.unix, "POST", base + "ack", json={"group": None})
    await call(admin.unix, "POST", base + "restart/chat-a", json={})
    await call(admin.unix, "POST", base + "fence/chat-a", json={"confirm": True})
    assert admin.controller.calls == [
        ("promote", "chat", "chat-b", 3, True),
        ("failover", None, "chat-b", None, False),
        ("evict", "chat-batch", True, False),
        ("resume", "chat-batch", True),
        ("ack", None),
        ("restart", "chat-a"),
        ("fence", "chat-a", True),
    ]


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("promote", {"json": {"dryrun": True}}, 400),
        ("promote?dryrun=1", {}, 400),
        ("promote?dry_run=perhaps", {}, 400),
        ("promote?to=a&to=b", {}, 400),
        ("promote?to=a", {"json": {"to": "a"}}, 400),
        ("promote", {"json": {"expected_epoch": -1}}, 400),
        ("promote", {"json": [1]}, 400),
        ("promote", {"data": b"{nonsense", "headers": {"Content-Type": "application/json"}}, 400),
        ("promote", {"data": b"[" * 5000, "headers": {"Content-Type": "application/json"}}, 400),
        ("promote", {"data": b"\xff\xfe", "headers": {"Content-Type": "application/json"}}, 400),
        ("promote", {"data": b'{"to":"a"}', "headers": {"Content-Type": "text/plain"}}, 415),
        ("promote", {"data": {"to": "a"}}, 415),
        ("promote", {"json": {"to": "x" * 70_000}}, 413),
        ("freeze/chat-batch?dry_run=true", {}, 400),
        ("pause?dry_run=true", {}, 400),
        ("nothing", {}, 404),
    ],
)
async def test_a_malformed_command_is_never_carried_out(
    admin: Admin, path: str, options: Any, expected: int
) -> None:
    status, body = await call(admin.unix, "POST", f"http://localhost/v1/{path}", **options)
    assert (status, body["status"]) == (expected, expected)
    assert body["code"]
    assert admin.controller.calls == []


async def test_a_wrong_method_is_a_problem_with_the_allowed_ones(admin: Admin) -> None:
    async with admin.unix.get("http://localhost/v1/promote") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert response.content_type == "application/problem+json"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PreconditionError("no standby", hint="wait"), 412, "precondition"),
        (ConflictError("the epoch is 4, not 3"), 409, "conflict"),
        (NotFoundError("no such engine"), 404, "not_found"),
        (RuntimeError("secret detail"), 500, "internal"),
    ],
)
async def test_errors_of_the_controller_become_problems(
    admin: Admin, error: Exception, status: int, code: str
) -> None:
    admin.controller.error = error
    found, body = await call(admin.unix, "POST", "http://localhost/v1/pause")
    assert (found, body["code"]) == (status, code)
    assert "secret" not in json.dumps(body)
    if isinstance(error, PreconditionError):
        assert (body["detail"], body["hint"]) == ("no standby", "wait")


async def test_the_same_idempotency_key_does_it_once(admin: Admin) -> None:
    url = "http://localhost/v1/promote"
    admin.controller.gate = asyncio.Event()
    key = {"Idempotency-Key": "k-1"}
    both = [asyncio.ensure_future(call(admin.unix, "POST", url, headers=key)) for _ in range(2)]
    done, _ = await asyncio.wait(both, timeout=0.2)
    assert not done, "the second waits for the first"
    admin.controller.gate.set()
    first, second = await asyncio.gather(*both)
    assert first == second == await call(admin.unix, "POST", url, headers=key)
    assert len(admin.controller.calls) == 1

    status, body = await call(admin.unix, "POST", url + "?to=chat-b", headers=key)
    assert (status, body["code"]) == (422, "idempotency_key_reused")
    await call(admin.unix, "POST", url, headers={"Idempotency-Key": "k-2"})
    assert len(admin.controller.calls) == 2


async def test_a_command_goes_on_when_its_caller_leaves(admin: Admin) -> None:
    url = "http://localhost/v1/promote"
    admin.controller.gate = asyncio.Event()
    key = {"Idempotency-Key": "k-1"}
    timeout = aiohttp.ClientTimeout(total=0.2)
    with pytest.raises(asyncio.TimeoutError):
        await call(admin.unix, "POST", url, headers=key, timeout=timeout)
    admin.controller.gate.set()
    status, body = await call(admin.unix, "POST", url, headers=key)
    assert (status, body["operation"]["id"]) == (200, "op-1")
    assert len(admin.controller.calls) == 1


# ------------------------------------------------------------------------- events


async def read_events(response: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        line = await asyncio.wait_for(response.content.readline(), 10)
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    return found


async def test_events_as_json(admin: Admin) -> None:
    for number in range(5):
        admin.events.append("tested", f"event {number}")
    _, body = await call(admin.unix, "GET", "http://localhost/v1/events?since=2")
    assert [event["seq"] for event in body["events"]] == [3, 4, 5]
    assert (body["last_seq"], body["degraded"]) == (5, "")
    _, body = await call(admin.unix, "GET", "http://localhost/v1/events?limit=1")
    assert [event["seq"] for event in body["events"]] == [5]


async def test_events_are_followed_and_resumed_by_last_event_id(admin: Admin) -> None:
    url = "http://localhost/v1/events"
    admin.events.append("old", "before")
    async with admin.unix.get(url + "?follow=1&since=0") as response:
        assert response.content_type == "text/event-stream"
        admin.events.append("new", "line one\nline two")
        found = await read_events(response, 2)
        assert [event["kind"] for event in found] == ["old", "new"]
    headers = {"Last-Event-ID": "1", "Accept": "text/event-stream"}
    async with admin.unix.get(url, headers=headers) as response:
        assert [e["seq"] for e in await read_events(response, 1)] == [2]
    headers["Last-Event-ID"] = "nonsense"
    assert (await call(admin.unix, "GET", url, headers=headers))[0] == 400


async def test_a_client_that_takes_both_gets_past_events_as_a_stream_that_ends(
    admin: Admin,
) -> None:
    admin.events.append("old", "before")
    headers = {"Accept": "application/json, text/event-stream"}
    async with admin.unix.get("http://localhost/v1/events?since=0", headers=headers) as response:
        assert response.content_type == "text/event-stream"
        assert b'"kind":"old"' in await asyncio.wait_for(response.read(), 10)


async def test_streams_are_bounded_and_freed_when_clients_leave(admin: Admin) -> None:
    url = admin.url + "/v1/events?follow=1"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=admin.token) as session:
        streams = [await session.get(url) for _ in range(32)]
        status, body = await call(session, "GET", url)
        assert (status, body["code"]) == (503, "limit_reached")
        for stream in streams:
            stream.close()
        async with asyncio.timeout(10):
            while (response := await session.get(url)).status != 200:
                response.close()
                await asyncio.sleep(0.01)
        response.close()


async def test_stopping_ends_streams_at_once_and_removes_the_socket(
    admin: Admin, state_dir: Path
) -> None:
    async with admin.unix.get("http://localhost/v1/events?follow=1") as response:
        started = asyncio.get_running_loop().time()
        stopping = asyncio.ensure_future(admin.server.stop())
        await asyncio.wait_for(response.read(), 10)
        await stopping
        assert asyncio.get_running_loop().time() - started < 2.0
    assert not (state_dir / "admin.sock").exists()


# -------------------------------------------------------------------------- bounds


async def test_connections_are_bounded_per_listener(state_dir: Path) -> None:
    admin = await start(state_dir, max_connections=3)
    writers = [(await asyncio.open_connection("127.0.0.1", admin.port))[1] for _ in range(3)]
    answer = await raw(admin.port, b"")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"limit_reached" in answer
    assert (await call(admin.unix, "GET", "http://localhost/livez"))[0] == 200
    writers[0].close()
    async with asyncio.timeout(10):
        while b" 200 " not in await raw(admin.port, b"GET /livez HTTP/1.0\r\n\r\n"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for writer in writers:
        writer.close()
    await end(admin)


async def test_a_client_that_sends_its_headers_slowly_is_cut_off(state_dir: Path) -> None:
    admin = await start(state_dir, idle_timeout_s=0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(_send_slowly(writer), 10)
    writer.close()
    with pytest.raises(ConnectionError):
        await writer.wait_closed()
    assert reader.exception() is not None or reader.at_eof()
    await end(admin)


async def _send_slowly(writer: asyncio.StreamWriter) -> None:
    for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def test_a_body_that_never_comes_is_a_timeout(state_dir: Path) -> None:
    admin = await start(state_dir, body_timeout_s=0.1)
    head = b"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n"
    head += b"Authorization: " + admin.token["Authorization"].encode() + b"\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write(head)
    assert b" 504 " in await asyncio.wait_for(reader.readline(), 10)
    assert admin.controller.calls == []
    writer.close()
    await writer.wait_closed()
    await end(admin)


async def test_everything_works_on_uvloop_and_with_a_long_path(tmp_path: Path) -> None:
    long_dir = tmp_path / ("x" * 120)
    long_dir.mkdir()

    async def scenario() -> list[int]:
        admin = await start_for_uvloop(long_dir)
        statuses = [(await call(admin.tcp, "GET", admin.url + "/metrics"))[0]]
        statuses.append(await _over_unix(admin.server.socket_path, "GET /v1/status"))
        statuses.append(await _over_unix(admin.server.socket_path, "POST /v1/pause"))
        await end(admin)
        return statuses

    def run() -> list[int]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(scenario())

    assert await asyncio.to_thread(run) == [200, 200, 200]


async def start_for_uvloop(state_dir: Path) -> Admin:
    return await start(state_dir)


async def _over_unix(path: Path, request: str) -> int:
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        reader, writer = await asyncio.open_unix_connection(
            f"/proc/self/fd/{directory}/{path.name}"
        )
    finally:
        os.close(directory)
    writer.write(f"{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])
