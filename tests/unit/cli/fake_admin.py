"""A supervisor's admin socket that answers as it is told to and remembers what it was asked."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

STATUS: dict[str, Any] = {
    "name": "demo",
    "paused": False,
    "supervisor": {"pid": 4242},
    "gateway": [{"name": "gateway-0", "pid": 50, "state": "ready"}],
    "groups": [
        {
            "name": "chat",
            "state": "redundant",
            "epoch": 3,
            "primary": "chat-b",
            "standby": ["chat-a"],
            "zygote": {"pid": 51},
            "cache": [
                {
                    "device": "cpu",
                    "pid": 52,
                    "state": "serving",
                    "weights_bytes": 8 << 20,
                    "kv_bytes": 80 << 20,
                    "attached": ["chat-a-00000001", "chat-b-00000002"],
                }
            ],
            "engines": [
                {
                    "name": "chat-a",
                    "kind": "native",
                    "role": "standby",
                    "state": "standby",
                    "verdict": "healthy",
                    "pid": 53,
                    "instance": "chat-a-00000001",
                    "restarts": 1,
                    "uptime_s": 12.5,
                },
                {"name": "chat-b", "role": "primary", "state": "primary", "pid": 54},
            ],
        }
    ],
}

OPERATION: dict[str, Any] = {
    "id": "1-1",
    "kind": "switchover",
    "group": "chat",
    "engine": "chat-b",
    "state": "done",
    "cause": "operator",
    "started": 1_800_000_000.0,
    "duration_ms": 41.0,
    "phases_ms": {"fence": 1.0, "promote": 30.0, "route": 10.0, "total": 41.0},
    "epoch": 4,
    "text": "chat-a handed over",
    "error": "",
}


@dataclass
class Answer:
    """What one request gets."""

    body: Any
    status: int = 200
    content_type: str = "application/json"
    cut: bool = False
    """Close the connection without a word."""


@dataclass
class FakeAdmin:
    """The socket, the answers by `METHOD /path`, and what was asked."""

    socket: Path
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    def on(self, request: str, body: Any, *, status: int = 200) -> None:
        self.answers[request] = Answer(body, status)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    admin: FakeAdmin


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        admin = cast("_Server", self.server).admin
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = f"{self.command} {self.path}"
        admin.asked.append((key, dict(self.headers), json.loads(body) if body else None))
        problem = {"code": "not_found", "status": 404, "detail": f"no route {key}"}
        answer = admin.answers.get(key) or Answer(problem, 404)
        if answer.cut:
            self.close_connection = True
            return
        raw = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def address_string(self) -> str:
        return "unix"


@contextmanager
def fake_admin(path: Path) -> Iterator[FakeAdmin]:
    """Serve at `path` until the block ends."""
    admin = FakeAdmin(path)
    admin.on("GET /v1/status", STATUS)
    with _Server(str(path), _Handler) as server:
        server.admin = admin
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield admin
        finally:
            server.shutdown()
            thread.join(5.0)
