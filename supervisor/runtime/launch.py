"""How our own modules are started: command line, environment, and what they are told.

A specification goes through a pipe, not over a disk that may be full: the child reads
`/proc/self/fd/N`, and the pipe is filled before the child exists, so nobody waits for anybody.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from supervisor.errors import StartFailedError

__all__ = ["child_environment", "python_module", "specification"]

_MAX_SPEC_BYTES: Final = 32 << 10  # half of what a pipe takes without a reader

_SINGLE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Without these, imports start two to four threads, and a zygote must have exactly one."""

_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Nothing is ever fetched while a service starts: what the checkpoint lacks is an error."""

_HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"
"""Heaps in huge pages, where the kernel grants them on request. A GPU's driver fills 600 MiB of
heap while an engine loads kernels: 157,000 page faults without, 16,000 with them (H200)."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Command line of one of our own modules, with this interpreter."""
    return [sys.executable, "-u", "-m", module, *arguments]


def child_environment(*, with_model: bool) -> dict[str, str]:
    """Environment of a child: ours, with our packages importable though nothing is installed."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    rest = env.get("PYTHONPATH", "")
    if root not in rest.split(os.pathsep):
        env["PYTHONPATH"] = f"{root}{os.pathsep}{rest}" if rest else root
    if with_model:
        env |= _SINGLE_THREAD | _OFFLINE
        given = env.get("GLIBC_TUNABLES", "")
        if "glibc.malloc.hugetlb" not in given:
            env["GLIBC_TUNABLES"] = f"{given}:{_HUGE_PAGES}".lstrip(":")
    return env


@contextlib.contextmanager
def specification(spec: msgspec.Struct, *, of: str) -> Iterator[int]:
    """A descriptor that the child reads its specification from; ours is closed behind the spawn.

    Raises:
        StartFailedError: it is longer than what a pipe takes without a reader.
    """
    data = msgspec.json.encode(spec)
    if len(data) > _MAX_SPEC_BYTES:
        raise StartFailedError(f"the specification of {of} has {len(data)} bytes")
    read_fd, write_fd = os.pipe()
    try:
        try:
            os.write(write_fd, data)
        finally:
            os.close(write_fd)
        yield read_fd
    finally:
        os.close(read_fd)
