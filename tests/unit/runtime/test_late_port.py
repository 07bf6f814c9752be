"""A port that could not be had at the start is taken later, whatever fails meanwhile."""

import asyncio
import errno
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from supervisor import daemon
from supervisor.errors import ConfigurationError
from supervisor.runtime.listening import listen_tcp


def _no_descriptor(*_: object, **__: object) -> socket.socket:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_socket_that_cannot_be_made_is_an_address_that_cannot_be_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "socket", _no_descriptor)
    with pytest.raises(ConfigurationError, match="Too many open files"):
        listen_tcp("127.0.0.1", 0)


class FakeAdmin:
    """Refuses the first socket that it is given."""

    def __init__(self) -> None:
        self.asked = 0
        self.listener: socket.socket | None = None

    async def listen(self, sock: socket.socket) -> None:
        self.asked += 1
        if self.asked == 1:
            sock.close()
            raise OSError(errno.ENFILE, "Too many open files in system")
        self.listener = sock


async def test_the_admin_port_is_tried_until_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_PORT_RETRY_S", 0.01)
    attempts = 0

    def listen(host: str, port: int) -> socket.socket:
        nonlocal attempts
        attempts += 1
        return _no_descriptor() if attempts == 1 else listen_tcp(host, port)

    monkeypatch.setattr(daemon, "listen_tcp", listen)
    where = SimpleNamespace(admin=SimpleNamespace(listen=SimpleNamespace(host="127.0.0.1", port=0)))
    runtime, admin = SimpleNamespace(admin_address="", admin_trouble="taken"), FakeAdmin()
    async with asyncio.timeout(5):
        await daemon._listen_later(cast("Any", where), cast("Any", runtime), cast("Any", admin))
    assert (attempts, admin.asked) == (3, 2)
    assert admin.listener is not None
    assert runtime.admin_address == f"127.0.0.1:{admin.listener.getsockname()[1]}"
    assert not runtime.admin_trouble
    admin.listener.close()
