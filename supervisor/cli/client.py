"""The admin API over its Unix socket, as blocking calls with deadlines.

`http.client` over a socket of our own: it is in the standard library, starts in milliseconds and
needs no event loop. Each call opens a connection; nothing is retried here, since a mutating call
whose answer was lost may have taken effect.
"""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from cache.wire import connect_unix
from supervisor.cli.errors import AdminError
from supervisor.errors import DeadlineExceededError, NotReachableError, ProtocolError

__all__ = ["AdminClient"]

_CONNECT_TIMEOUT_S: Final = 3.0
_READ_TIMEOUT_S: Final = 15.0
_OPERATION_TIMEOUT_S: Final = 310.0
"""A restart waits for an engine to come up; the supervisor itself gives up after 300 s."""
_MAX_BODY_BYTES: Final = 64 << 20
_MAX_EVENT_BYTES: Final = 1 << 20
_MAX_EVENTS: Final = 2000
_STREAM_TIMEOUT_S: Final = 60.0
"""Without a heartbeat for so long (they come every 10 s), the other side hangs."""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, also for paths that are longer than a socket address."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = connect_unix(self._path, timeout_s=_CONNECT_TIMEOUT_S)
        self.sock.settimeout(self._timeout_s)


class AdminClient:
    """One supervisor's admin API. Every method raises the errors of `_exchange`."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def status(self) -> dict[str, Any]:
        """`GET /v1/status`."""
        return self.get("/v1/status")

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that `path` answers with."""
        return self._call("GET", path, None, _READ_TIMEOUT_S)

    def post(
        self,
        *segments: str,
        body: dict[str, Any] | None = None,
        dry_run: bool = False,
        timeout_s: float = _OPERATION_TIMEOUT_S,
    ) -> dict[str, Any]:
        """`POST /v1/<segments>`; returns when the operation is done."""
        path = "/v1/" + "/".join(quote(segment, safe="") for segment in segments)
        given = {key: value for key, value in (body or {}).items() if value is not None}
        return self._call("POST", path + ("?dry_run=true" if dry_run else ""), given, timeout_s)

    def events(self, *, since: int) -> list[dict[str, Any]]:
        """Events after `since` that the supervisor still has in memory, oldest first."""
        found = self.get(f"/v1/events?since={since}&limit={_MAX_EVENTS}").get("events")
        return [event for event in found if isinstance(event, dict)] if found else []

    def follow_events(self, *, since: int | None) -> Iterator[dict[str, Any]]:
        """Events after `since` (default: only new ones) until the connection ends."""
        path = "/v1/events?follow=1" + ("" if since is None else f"&since={since}")
        accept = "text/event-stream"
        with self._exchange("GET", path, None, _STREAM_TIMEOUT_S, accept) as response:
            yield from _server_sent_events(response)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        with self._exchange(method, path, body, timeout_s) as response:
            return _json_object(response)

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float,
        accept: str = "application/json",
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; inside the block the response's body can be read.

        Raises:
            NotReachableError: nobody listens, or the supervisor went away meanwhile.
            DeadlineExceededError: no answer in time.
            AdminError: the supervisor answered with a problem.
        """
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Accept": accept}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        with contextlib.closing(_UnixConnection(self.socket, timeout_s=timeout_s)) as connection:
            self._connect(connection)
            with _explained(timeout_s):
                connection.request(method, path, payload, headers)
                # A response that ends with its connection owns the socket: close it as well.
                with contextlib.closing(connection.getresponse()) as response:
                    _raise_for_problem(response)
                    yield response

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except OSError as error:
            raise NotReachableError(
                f"no supervisor answers at {self.socket}: {error.strerror or 'timed out'}",
                hint="start it with 'supervisor run FILE', or check -f FILE and the directory",
            ) from error


@contextlib.contextmanager
def _explained(timeout_s: float) -> Iterator[None]:
    """Errors of the transport in the words of an operator."""
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceededError("the supervisor's answer", timeout_s=timeout_s) from error
    except (http.client.HTTPException, OSError) as error:
        raise NotReachableError(
            "the supervisor closed the connection before it answered",
            hint="it may have stopped or crashed; see 'supervisor status'",
        ) from error


def _raise_for_problem(response: http.client.HTTPResponse) -> None:
    if response.status >= http.HTTPStatus.BAD_REQUEST:
        raise AdminError(response.status, _json_object(response, tolerant=True))


def _json_object(response: http.client.HTTPResponse, *, tolerant: bool = False) -> dict[str, Any]:
    raw = response.read(_MAX_BODY_BYTES)
    try:
        value = json.loads(raw)
    except ValueError as error:
        if tolerant:  # a problem without a document: its status says enough
            return {}
        raise ProtocolError("the supervisor's answer is not JSON") from error
    return value if isinstance(value, dict) else {"items": value}


def _server_sent_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` block; comments (heartbeats) and other fields are skipped."""
    data: list[str] = []
    while line := response.readline(_MAX_EVENT_BYTES):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and data:
            value = json.loads("\n".join(data))
            data.clear()
            if isinstance(value, dict):
                yield value
