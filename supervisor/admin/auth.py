"""Who may ask: the same user over the Unix socket, the holder of the token over loopback TCP.

Invariants
    1. The token is made anew at every start, lies in `state_dir/admin.token` (0600) and is
       compared in constant time. It is never logged and never in an event. While the disk takes
       nothing the last one stays good: a supervisor that comes back must come back then too.
    2. Over TCP the Host header must name a loopback address: a web page whose name was made to
       point at 127.0.0.1 (DNS rebinding) still says its own name there.
    3. A request that says it comes from a web page (Origin) must come from our own.
"""

import hmac
import ipaddress
import logging
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from cache.wire import peer_uid
from supervisor.admin.problems import BadRequestError, ForbiddenError, UnauthorizedError
from supervisor.errors import StartFailedError
from supervisor.observe.files import replace_file
from supervisor.process import spare

__all__ = ["TOKEN_FILE", "check_peer", "check_source", "check_token", "make_token"]

log = logging.getLogger(__name__)

TOKEN_FILE: Final = "admin.token"  # noqa: S105 -- a file name
_TOKEN_BYTES: Final = 32


def make_token(state_dir: Path) -> str:
    """A new token, written to its file before anybody may use it. Blocks.

    Raises:
        StartFailedError: it cannot be written, and there is none from before.
    """
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    path = state_dir / TOKEN_FILE
    try:
        # Each start makes another: a disk that hangs must not keep a supervisor from its processes.
        replace_file(path, token.encode() + b"\n", durable=False)
    except OSError as error:
        if (last := _last_token(path)) is not None:
            log.warning("the admin token stays the last one: %s", error.strerror)
            return last
        raise StartFailedError(
            f"the admin token {path} cannot be written: {error.strerror}",
            hint="make room on the disk, or make the state directory writable",
        ) from error
    return token


def _last_token(path: Path) -> str | None:
    """The token of the last start, when its file is whole and nobody else could read it."""
    try:
        facts = path.lstat()
        token = path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    is_private = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
    is_private = is_private and not facts.st_mode & 0o077
    return token if is_private and len(token) >= _TOKEN_BYTES else None


def check_peer(request: web.Request) -> None:
    """A request over the Unix socket comes from our own user, or from root.

    Raises:
        ForbiddenError: it does not.
    """
    transport = request.transport
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None:
        raise ForbiddenError("the peer went away before it could be identified")
    # A duplicate: uvloop's stand-in for a socket lacks what we need.
    with socket.socket(fileno=spare(lambda: os.dup(connection.fileno()))) as duplicate:
        uid = peer_uid(duplicate)
    if uid not in (os.geteuid(), 0):
        raise ForbiddenError(
            f"uid {uid} may not administer a supervisor of uid {os.geteuid()}",
            hint="run the command as the user that runs the supervisor",
        )


def check_source(request: web.Request) -> None:
    """A request over TCP is meant for us and does not come from a foreign web page.

    Raises:
        BadRequestError: it has no Host header, or several.
        ForbiddenError: Host or Origin names somebody else.
    """
    hosts = request.headers.getall("Host", [])
    # HTTP/1.0 has no Host: health checks of load balancers ask so, browsers never do.
    if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
        raise BadRequestError("exactly one Host header is needed")
    host = hosts[0].strip() if hosts else ""
    if hosts and not _is_loopback(host):
        raise ForbiddenError(
            f"the Host header names {host[:100]!r}, not a loopback address",
            hint="ask 127.0.0.1 or localhost directly",
        )
    for origin in request.headers.getall("Origin", []):
        if urlsplit(origin).netloc.lower() != host.lower() or not host:
            raise ForbiddenError(f"a page of {origin[:100]!r} may not use the admin API")


def check_token(request: web.Request, token: str) -> None:
    """The request carries the token.

    Raises:
        UnauthorizedError: it does not.
    """
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    known = token.encode()
    offered = given.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() != "bearer" or not hmac.compare_digest(offered, known):
        raise UnauthorizedError(
            "this needs the bearer token of the supervisor",
            hint=f"send 'Authorization: Bearer' with the content of state_dir/{TOKEN_FILE}, "
            "or use the Unix socket",
        )


def _is_loopback(host: str) -> bool:
    """Whether `host`, `host:port` or `[v6]:port` names this machine by a loopback address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if urlsplit(f"//{host}").username is not None:
            return False
    except ValueError:
        return False
    if name.rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
