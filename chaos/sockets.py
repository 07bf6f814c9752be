"""Which client is connected to which process: what the kernel's tables say."""

import os
from pathlib import Path
from typing import Final

__all__ = ["client_ports_of"]

_ESTABLISHED: Final = "01"


def client_ports_of(pid: int, own_port: int) -> set[int]:
    """Remote ports of the TCP connections that a process has accepted on `own_port`."""
    inodes = _socket_inodes(pid)
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote, state, inode = fields[1], fields[2], fields[3], fields[9]
        if state == _ESTABLISHED and int(local[-4:], 16) == own_port and inode in inodes:
            found.add(int(remote[-4:], 16))
    return found


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(entry.path)  # noqa: PTH115 -- not a path: "socket:[7]"
            except OSError:
                continue  # closed while we looked
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # gone: it has no client any more
    return found
