"""Imported first by every Python process of a chaos run: obeys orders that lie in a folder.

The folder is `UNDERSTUDY_CHAOS_ORDERS`. What may lie there:

MODULE        whoever is started as `python -m MODULE` ends with exit status 1 at once, as with a
              broken environment
hold-MODULE   whoever is started as `python -m MODULE` waits until the file is gone
wall-clock    eight bytes, a native double: by so many seconds the wall clock of the process is
              off, from the moment on at which the file changes (it is mapped)
no-fsync      an empty file: fsync fails with EIO while it is there
slow-fsync    an empty file: fsync does not return while it is there, as on a disk that hangs

A wall clock that jumps for everybody on the machine would hurt others, so it jumps here.
"""

import os
import sys


def _obey(orders: str) -> None:
    for name in os.listdir(orders):  # noqa: PTH208 - no imports where nothing is ordered
        if name in sys.orig_argv:
            os.write(2, f"ImportError: {name} is broken by order\n".encode())
            os._exit(1)
        if name.removeprefix("hold-") in sys.orig_argv:
            _wait_gone(f"{orders}/{name}")
    if os.path.exists(f"{orders}/wall-clock"):  # noqa: PTH110
        _shift_wall_clock(f"{orders}/wall-clock")
    _obey_at_fsync(f"{orders}/no-fsync", f"{orders}/slow-fsync")


def _wait_gone(path: str) -> None:
    import time

    while os.path.exists(path):  # noqa: PTH110
        time.sleep(0.02)


def _shift_wall_clock(path: str) -> None:
    """Python reads the wall clock through these two; forks of this process inherit the change."""
    import mmap
    import time

    with open(path, "rb") as file:  # noqa: PTH123
        offset = memoryview(mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)).cast("d")
    true_s, true_ns = time.time, time.time_ns
    time.time = lambda: true_s() + offset[0]
    time.time_ns = lambda: true_ns() + int(offset[0] * 1e9)


def _obey_at_fsync(failing_path: str, hanging_path: str) -> None:
    def failing(true: object) -> object:
        def fsync(fd: int) -> None:
            if os.path.exists(hanging_path):  # noqa: PTH110
                _wait_gone(hanging_path)
            if os.path.exists(failing_path):  # noqa: PTH110
                raise OSError(5, os.strerror(5))
            true(fd)  # type: ignore[operator]

        return fsync

    os.fsync, os.fdatasync = failing(os.fsync), failing(os.fdatasync)  # type: ignore[assignment]


_orders = os.environ.get("UNDERSTUDY_CHAOS_ORDERS")
if _orders and os.path.isdir(_orders):  # noqa: PTH112
    _obey(_orders)
