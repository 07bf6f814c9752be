"""Faults of clients: those that leave, those that never finish, those that send rubbish."""

import contextlib
import resource
import socket
import time
from collections import Counter
from typing import Annotated, Final, Literal

from pydantic import Field

from cache.errors import UnderstudyError
from chaos.faultmodel import FaultModel, Injury, World

__all__ = ["ClientsLeaveFault", "HostileClientsFault"]

_ANSWER_S: Final = 10.0
_ACCEPT_S: Final = 4.0
_AT_ONCE: Final = 200
_SPARE_DESCRIPTORS: Final = 2000
_HALF_A_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: appl"
_OVERSIZED: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000000000\r\n\r\n" + b"x" * 65536
)
_MALFORMED: Final = b"\x16\x03\x01\x02\x00 this is no HTTP\r\n\r\n"


class ClientsLeaveFault(FaultModel):
    """Clients go away in the middle of their streams, by closing (`fin`) or by reset (`rst`)."""

    kind: Literal["clients_leave"] = "clients_leave"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    how: Literal["fin", "rst"] = "fin"

    def inject(self, world: World) -> Injury:
        """Some of those that have got text."""
        at_ns = time.monotonic_ns()
        gone = world.load.leave(self.share, how=self.how, seed=world.seed)
        return Injury(at_ns, note=f"{len(gone)} left by {self.how}")


class HostileClientsFault(FaultModel):
    """Connections that cost and ask for nothing, or for what cannot be."""

    kind: Literal["hostile_clients"] = "hostile_clients"
    how: Literal["idle", "half_open", "oversized", "malformed"]
    count: Annotated[int, Field(ge=1)]

    def inject(self, world: World) -> Injury:
        """`idle` and `half_open` stay until the system or the end of the run closes them."""
        at_ns = time.monotonic_ns()
        if self.how in ("oversized", "malformed"):
            data = _OVERSIZED if self.how == "oversized" else _MALFORMED
            wanted = "413" if self.how == "oversized" else "400"
            answers = Counter(_ask(world.system.gateway_port, data) for _ in range(self.count))
            note = ", ".join(f"{count} x {answer}" for answer, count in answers.items())
            problem = "" if set(answers) == {wanted} else f"{self.how} requests got {note}"
            return Injury(at_ns, note=f"{self.how}: {note}", problem=problem)
        _raise_own_limit(self.count)
        held = [socket.socket() for _ in range(self.count)]
        world.on_end(lambda: _close_all(held))
        for number, sock in enumerate(held, start=1):
            _connect(sock, world.system.gateway_port)
            if number % _AT_ONCE == 0:
                time.sleep(0.01)  # more than the backlog holds would be tried again in a second
        if self.how == "half_open":
            for sock in held:
                with contextlib.suppress(OSError):  # not connected yet: it waits in the backlog
                    sock.send(_HALF_A_HEAD, socket.MSG_DONTWAIT)
        reached = _accepted(world, self.count)
        return Injury(at_ns, note=f"{self.count} {self.how}, {reached} connections at the gateway")


def _close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _raise_own_limit(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + _SPARE_DESCRIPTORS <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _connect(sock: socket.socket, port: int) -> None:
    """Without waiting: the kernel finishes it, or it stays half-open in a full backlog."""
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", port))


def _accepted(world: World, wanted: int) -> int:
    """How many connections the gateway says that it has; some seconds are given to accept them."""
    reached, until_s = 0, time.monotonic() + _ACCEPT_S
    while reached < wanted and time.monotonic() < until_s:
        with contextlib.suppress(OSError, UnderstudyError):  # no supervisor answers just now
            reached = int(world.system.admin.metric("understudy_gateway_connections"))
        time.sleep(0.1)
    return reached


def _ask(port: int, data: bytes) -> str:
    """The status of the answer, or why there was none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)  # it may be refused before all was sent
            head = sock.recv(64)
    except OSError as error:
        return type(error).__name__
    return head.split(b" ")[1].decode() if head.startswith(b"HTTP/") else "no HTTP"
