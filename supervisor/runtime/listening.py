"""The TCP sockets that clients connect to. Bound once, and inherited by whoever serves them."""

import socket
from typing import Final

from supervisor.errors import ConfigurationError

__all__ = ["listen_tcp"]

_BACKLOG: Final = 1024


def listen_tcp(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket.

    Raises:
        ConfigurationError: the address is taken or not ours, or no descriptor is left.
    """
    try:
        return _listening(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="stop what uses the port (ss -ltnp shows it), or change the address",
        ) from error


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
