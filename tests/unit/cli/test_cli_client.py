"""The admin client: every way in which an answer can fail has its own error and exit code."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cli.client import AdminClient
from supervisor.cli.errors import AdminError
from supervisor.errors import NotReachableError, ProtocolError
from tests.unit.cli.fake_admin import OPERATION, STATUS, Answer, FakeAdmin, fake_admin


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[FakeAdmin]:
    with fake_admin(tmp_path / "admin.sock") as server:
        yield server


@pytest.fixture
def client(admin: FakeAdmin) -> AdminClient:
    return AdminClient(admin.socket)


def test_status_arrives(client: AdminClient) -> None:
    assert client.status() == STATUS


def test_a_post_sends_what_is_given_and_nothing_that_is_none(
    admin: FakeAdmin, client: AdminClient
) -> None:
    admin.on("POST /v1/promote", {"operation": OPERATION})
    answer = client.post("promote", body={"group": None, "to": "chat-b"})
    assert answer["operation"]["epoch"] == 4
    ((_, headers, body),) = admin.asked
    assert body == {"to": "chat-b"}
    assert headers["Host"] == "localhost"


def test_a_name_cannot_leave_its_place_in_the_path(admin: FakeAdmin, client: AdminClient) -> None:
    with pytest.raises(AdminError):
        client.post("evict", "../stop?x")
    assert admin.asked[0][0] == "POST /v1/evict/..%2Fstop%3Fx"


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (412, "precondition", 4),
        (409, "conflict", 4),
        (404, "not_found", 4),
        (412, "a_code_of_a_later_release", 4),
        (400, "configuration", 2),
        (500, "internal", 1),
        (503, "limit_reached", 1),
    ],
)
def test_a_problem_becomes_an_error_with_code_hint_and_exit_code(
    admin: FakeAdmin, client: AdminClient, status: int, code: str, exit_code: int
) -> None:
    problem = {"status": status, "code": code, "detail": "it is so", "hint": "do that"}
    admin.on("POST /v1/ack", problem, status=status)
    with pytest.raises(AdminError) as caught:
        client.post("ack")
    assert caught.value.stable_code == code
    assert str(caught.value) == "it is so; do that"
    assert caught.value.exit == exit_code


def test_a_problem_without_a_document_is_still_an_error(
    admin: FakeAdmin, client: AdminClient
) -> None:
    admin.answers["GET /v1/status"] = Answer(b"<html>", 502, "text/html")
    with pytest.raises(AdminError, match="HTTP status 502"):
        client.status()


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(NotReachableError, match="No such file or directory"):
        AdminClient(tmp_path / "admin.sock").status()


def test_a_socket_of_a_dead_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(NotReachableError, match="Connection refused"):
        AdminClient(path).status()


def test_a_supervisor_that_dies_before_it_answers(admin: FakeAdmin, client: AdminClient) -> None:
    admin.answers["GET /v1/status"] = Answer(None, cut=True)
    with pytest.raises(NotReachableError, match="closed the connection"):
        client.status()


def test_an_answer_that_is_not_json(admin: FakeAdmin, client: AdminClient) -> None:
    admin.on("GET /v1/status", b"hello")
    with pytest.raises(ProtocolError, match="not JSON"):
        client.status()


def test_a_socket_path_longer_than_an_address(tmp_path: Path) -> None:
    """An AF_UNIX address holds 107 bytes; the client goes through a descriptor of the folder."""
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    folder.mkdir(parents=True)
    near = tmp_path / "near"
    near.symlink_to(folder)
    with fake_admin(near / "a.sock"):
        assert len(str(folder / "a.sock")) > 107
        assert AdminClient(folder / "a.sock").status() == STATUS


def test_events_so_far(admin: FakeAdmin, client: AdminClient) -> None:
    admin.on("GET /v1/events?since=7&limit=2000", {"events": [{"seq": 8}], "last_seq": 8})
    assert client.events(since=7) == [{"seq": 8}]
    assert admin.asked[0][1]["Accept"] == "application/json"


def test_events_as_a_stream_without_heartbeats_and_half_events(
    admin: FakeAdmin, client: AdminClient
) -> None:
    stream = (
        b"retry: 1000\n\n"
        b'id: 1\ndata: {"seq":1}\n\n'
        b": nothing new\n\n"
        b'data: {"seq":\ndata: 2}\r\n\r\n'
        b'data: {"seq":3}\n'
    )
    request = "GET /v1/events?follow=1&since=0"
    admin.answers[request] = Answer(stream, content_type="text/event-stream")
    assert list(client.follow_events(since=0)) == [{"seq": 1}, {"seq": 2}]
