"""HTTP probe of an engine's `/health` over its Unix socket.

A 200 proves nothing (frozen cores answer it), so this probe alone never makes an engine healthy;
a clear non-200 makes it DEGRADED. No answer is no statement: progress and the canary judge that.
"""

from pathlib import Path
from typing import Final

import aiohttp

from cache.wire import unix_address

__all__ = ["probe_health"]

_OK: Final = 200


async def probe_health(socket: Path, *, timeout_s: float) -> bool | None:
    """True for 200, False for any other status, None when there was no answer in time."""
    try:
        with unix_address(socket) as address:
            connector = aiohttp.UnixConnector(path=address)
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=limit) as session,
                session.get("http://engine/health") as response,
            ):
                return response.status == _OK
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
