"""A small blocking client of the admin API, over the Unix socket in a state directory.

For scripts and tests that operate a running system. It reads what `GET /v1/status` promises and
ignores every other key, so it goes on working when the supervisor learns to say more.
"""

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cache.errors import DeadlineExceededError, UnderstudyError
from cache.wire import connect_unix

__all__ = [
    "AdminClient",
    "AdminReply",
    "AdminRequestError",
    "CacheView",
    "EngineView",
    "GatewayView",
    "GroupView",
    "OperationView",
    "ProcessView",
    "ProgressView",
    "StatusView",
    "wait_until",
]

SOCKET_NAME: Final = "admin.sock"
POLL_S: Final = 0.01

T = TypeVar("T")


class ProcessView(msgspec.Struct, frozen=True):
    """A process, as far as the status names it."""

    pid: int | None = None
    ready: bool = False  # a zygote that can fork
    degraded: dict[str, str] = {}  # what a supervisor lacks, by cause


class GatewayView(msgspec.Struct, frozen=True):
    """One gateway worker."""

    name: str
    pid: int | None = None
    state: str = ""


class ProgressView(msgspec.Struct, frozen=True):
    """How far loading is."""

    bytes_done: int = 0
    bytes_total: int = 0
    bytes_per_s: float = 0.0
    eta_s: float | None = None


class CacheView(msgspec.Struct, frozen=True):
    """The weight cache of one device."""

    device: str
    pid: int | None = None
    state: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    loads: int = 0  # from disk, by this daemon
    donations: int = 0  # memory handed on from a daemon that died
    load_s: float | None = None
    progress: ProgressView | None = None


class EngineView(msgspec.Struct, frozen=True):
    """One engine."""

    name: str
    role: str = ""
    configured_role: str = ""  # of the topology; engines exchange roles
    state: str = ""
    verdict: str = ""
    pid: int | None = None
    instance: str | None = None
    restarts: int = 0
    uptime_s: float = 0.0


class GroupView(msgspec.Struct, frozen=True):
    """One group: who serves, who stands by."""

    name: str
    state: str = ""
    epoch: int = 0
    primary: str | None = None
    standby: list[str] = []
    zygote: ProcessView | None = None
    cache: list[CacheView] = []
    engines: list[EngineView] = []

    def engine(self, role: str) -> EngineView | None:
        """The living engine that is primary, standby or batch now; None when there is none."""
        if role == "primary":
            meant = [e for e in self.engines if e.name == self.primary]
        elif role == "standby":
            meant = [e for e in self.engines if e.name in self.standby]
        else:
            meant = [e for e in self.engines if e.role == role]
        return next((engine for engine in meant if engine.pid), None)

    @property
    def is_redundant(self) -> bool:
        """Whether a verified standby waits behind a serving primary."""
        primary, standby = self.engine("primary"), self.engine("standby")
        return primary is not None and standby is not None and standby.state == "standby"


class StatusView(msgspec.Struct, frozen=True):
    """The whole system."""

    name: str
    paused: bool = False
    supervisor: ProcessView = ProcessView()
    gateway: list[GatewayView] = []
    groups: list[GroupView] = []

    @property
    def group(self) -> GroupView:
        """The first group, the only one in the topologies that this package makes."""
        return self.groups[0]


class OperationView(msgspec.Struct, frozen=True):
    """What came of a command."""

    id: str
    kind: str = ""
    state: str = ""
    cause: str = ""
    duration_ms: float | None = None
    phases_ms: dict[str, float] = {}
    epoch: int | None = None
    text: str = ""


class OperationReply(msgspec.Struct, frozen=True):
    """Answer to a command."""

    operation: OperationView


class HistoryView(msgspec.Struct, frozen=True):
    """Recent operations, oldest first."""

    operations: list[OperationView]


class AdminRequestError(UnderstudyError):
    """The admin API refused or failed a request; the problem document is in `details`."""

    code = "admin_request"

    def __init__(self, method: str, path: str, status: int, body: object) -> None:
        problem = body if isinstance(body, dict) else {}
        text = problem.get("detail") or problem.get("title") or str(body)[:200]
        super().__init__(
            f"{method} {path} answered {status}: {text}",
            hint=str(problem.get("hint", "")),
            details=problem,
        )
        self.status = status


@dataclass(frozen=True, slots=True)
class AdminReply:
    """Status, and the body: decoded when it is JSON, else text."""

    status: int
    body: object


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = connect_unix(self._path, timeout_s=self._timeout_s)


class AdminClient:
    """One request, one connection: nothing to go stale when the supervisor is replaced."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / SOCKET_NAME

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 10.0
    ) -> AdminReply:
        """Send one request.

        Raises:
            OSError: nobody listens, or the answer took longer than `timeout_s`.
        """
        connection = _UnixConnection(self._path, timeout_s=timeout_s)
        try:
            payload = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            kind = response.headers.get_content_type()
            decoded = json.loads(raw) if raw and kind.endswith("json") else raw.decode()
            return AdminReply(response.status, decoded)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path} broke off: {error!r}") from error
        finally:
            connection.close()

    def get(self, path: str, *, timeout_s: float = 10.0) -> object:
        """The body of a successful GET.

        Raises:
            AdminRequestError: any status but 2xx.
        """
        return self._checked("GET", path, timeout_s=timeout_s)

    def post(
        self, path: str, *, dry_run: bool = False, timeout_s: float = 10.0, **body: object
    ) -> OperationView:
        """Carry out a command and return its operation.

        Raises:
            AdminRequestError: any status but 2xx.
        """
        target = f"{path}?dry_run=true" if dry_run else path
        answer = self._checked("POST", target, body, timeout_s=timeout_s)
        return msgspec.convert(answer, OperationReply).operation

    def status(self, *, timeout_s: float = 10.0) -> StatusView:
        """The system as the supervisor sees it now."""
        return msgspec.convert(self.get("/v1/status", timeout_s=timeout_s), StatusView)

    def history(self) -> list[OperationView]:
        """Recent operations, oldest first."""
        return msgspec.convert(self.get("/v1/history"), HistoryView).operations

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample, or the sum of those that match the labels; 0 when absent."""
        total = 0.0
        for line in str(self.get("/metrics")).splitlines():
            sample, _, value = line.rpartition(" ")
            family = sample.partition("{")[0]
            if family == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def is_ready(self) -> bool:
        """Whether every group serves; False also while nobody listens."""
        try:
            return self.request("GET", "/readyz", timeout_s=2.0).status == 200
        except OSError:
            return False

    def _checked(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 10.0
    ) -> object:
        reply = self.request(method, path, body, timeout_s=timeout_s)
        if not 200 <= reply.status < 300:
            raise AdminRequestError(method, path, reply.status, reply.body)
        return reply.body


def wait_until(probe: Callable[[], T | None], what: str, *, timeout_s: float) -> T:
    """The first answer of `probe` that is neither None nor False.

    Raises:
        DeadlineExceededError: no such answer in time; the text names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = probe()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > deadline:
            raise DeadlineExceededError(what, timeout_s=timeout_s)
        time.sleep(POLL_S)
