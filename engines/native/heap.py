"""The C library's heap of an engine on a GPU: one, grown in large steps, never given back.

The driver reads each kernel's module into memory of its own, hundreds of megabytes in all. By
default the C library maps a region for each large piece, and the kernel fills it page by page, at
each of three threads' turns at one lock. As one heap of huge pages (whoever starts us asks for
them by `GLIBC_TUNABLES`, which is read before any code of ours) an engine beside a busy one was
ready after 0.59 s in place of 0.84 (H200).
"""

import ctypes
import logging
from typing import Final

__all__ = ["keep_heap"]

log = logging.getLogger(__name__)

# Parameters of mallopt(3), and their values.
_NEVER: Final = 2**31 - 1
_OPTIONS: Final = {
    "M_TRIM_THRESHOLD": (-1, _NEVER),
    "M_TOP_PAD": (-2, 64 << 20),
    "M_MMAP_MAX": (-4, 0),
    "M_ARENA_MAX": (-8, 1),
}


def keep_heap() -> None:
    """Set it up; another C library than glibc goes on as it does."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return
    for name, (option, value) in _OPTIONS.items():
        if not library.mallopt(option, value):
            log.info("the heap: %s was refused", name)
