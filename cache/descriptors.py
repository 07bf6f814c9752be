"""Room for descriptors, taken before there are threads.

A process's table of descriptors grows by doubling. With a second thread the kernel first waits
until no CPU can still be looking at the old table (an RCU grace period): the call that opens the
256th descriptor, an `accept` or a message that brings memory, then takes 10 to 30 ms (measured on
Linux 6.18, on 2 and on 16 cores). On the way of a takeover that is a quarter of the whole time.
"""

import contextlib
import os
import resource
from typing import Final

__all__ = ["reserve_descriptors"]

_BYTES_EACH: Final = 8
_USUAL: Final = 4096
_MOST: Final = (1 << 20) // _BYTES_EACH


def reserve_descriptors(count: int = _USUAL) -> None:
    """Make the table hold `count` descriptors, 8 bytes each, as far as the limit allows.

    Call it first thing in a process: with one thread it takes microseconds, later it waits once.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
    last = min(count, limit) - 1
    with contextlib.suppress(OSError):  # it is taken, so the table is as long as that
        os.fstat(last)
        return
    with contextlib.suppress(OSError):  # not one is left: whoever needs one will say so
        spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if spare < last:
            os.dup2(spare, last, inheritable=False)
            os.close(last)
        os.close(spare)
