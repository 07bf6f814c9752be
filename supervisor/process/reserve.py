"""Spare descriptors, so that a process without any can still see a death and prove a fence.

Every look at /proc opens a file for a moment. When the table is full (a leak, a lowered limit, the
whole machine at its bound) a dead primary would stay unseen, and that is the worst time for it.
So some descriptors are held in reserve, and lent to `spare` calls alone.

Invariants
    1. Only what detection and fencing need takes from here; starting something new does not.
    2. Without a filled reserve everything works as if this module were not there.

Belongs to one thread at a time, except that `spare` may also be called from helpers: the lists it
pops from and appends to are atomic operations of the interpreter.
"""

import errno
import os
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["RESERVE", "DescriptorReserve", "spare"]

T = TypeVar("T")

_SIZE: Final = 24
"""A fence holds two for each member of a tree and one timer; a look at /proc one or two."""

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


class DescriptorReserve:
    """Holds descriptors that mean nothing."""

    def __init__(self) -> None:
        self._size = 0
        self._fds: list[int] = []

    @property
    def is_short(self) -> bool:
        """Whether some are lent, or could not be had: nothing new can be opened now."""
        return len(self._fds) < self._size

    def open(self, size: int = _SIZE) -> None:
        """Begin to hold `size`; called once, early, so that their numbers are low."""
        self._size = size
        self.fill()

    def fill(self) -> bool:
        """Take back what was lent, as far as there is anything; False: still short."""
        while len(self._fds) < self._size:
            try:
                self._fds.append(os.eventfd(0, os.EFD_CLOEXEC))
            except OSError:
                return False
        return True

    def has_room(self, count: int) -> bool:
        """Whether `count` more can be opened now beside a full reserve.

        Called before a start: a process that we could not watch is better not begun.
        """
        if not self.fill():
            return False
        probes: list[int] = []
        try:
            while len(probes) < count:
                probes.append(os.eventfd(0, os.EFD_CLOEXEC))
        except OSError:
            return False
        finally:
            for fd in probes:
                os.close(fd)
        return True

    def lend(self) -> bool:
        """Free one for whoever opens next; False: there is none."""
        if not self._fds:
            return False
        os.close(self._fds.pop())
        return True

    def close(self) -> None:
        """Hold none any more."""
        self._size = 0
        while self.lend():
            pass


RESERVE: Final = DescriptorReserve()
"""The descriptor table belongs to the process, and so does its reserve."""


def spare(call: Callable[[], T]) -> T:
    """Call something that opens a descriptor; when there is none left, with one of the reserve.

    Raises:
        OSError: whatever the call raises; EMFILE only when the reserve is used up too.
    """
    if RESERVE.is_short:
        RESERVE.fill()
    try:
        return call()
    except OSError as error:
        if error.errno not in _NONE_LEFT or not RESERVE.lend():
            raise
    return call()
