"""One compute thread: the environment that makes it so, and the check that it did.

OpenMP, OpenBLAS and MKL read these once, when their library is loaded. Bits of a row depend on
the number of threads (measured: flash attention with two threads depends on the row index), and
a process that has more than one thread cannot be forked safely.
"""

import os
from pathlib import Path
from typing import Final

from engines.native.errors import ThreadsNotPinnedError

__all__ = [
    "SINGLE_THREAD_ENVIRONMENT",
    "check_environment",
    "other_threads",
    "thread_count",
]

SINGLE_THREAD_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What whoever starts a zygote or an engine must set."""


def check_environment() -> None:
    """Refuse to go on when the environment would allow more than one compute thread.

    Raises:
        ThreadsNotPinnedError: naming the variables.
    """
    missing = [
        f"{name}={value}"
        for name, value in SINGLE_THREAD_ENVIRONMENT.items()
        if os.environ.get(name) != value
    ]
    if missing:
        raise ThreadsNotPinnedError(missing)


def thread_count() -> int:
    """Threads of this process, as the kernel counts them."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def other_threads() -> dict[str, bool]:
    """Names of the threads beside the first, and whether each is asleep.

    A library may start a thread of its own when it is imported, such as the background thread of
    a memory allocator.
    """
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name == str(os.getpid()):
            continue
        fields = (task / "stat").read_text(encoding="utf-8", errors="replace")
        name, _, rest = fields.partition("(")[2].rpartition(")")
        found[f"{name} ({task.name})"] = rest.split()[0] == "S"
    return found
