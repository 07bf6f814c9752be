"""Whether an error is our own lack: it says nothing about the process that was asked.

Who cannot open a socket hears no answer. That must neither count against a process that does its
work nor end it.
"""

import errno
from typing import Final

from cache.errors import DescriptorLimitError
from supervisor.errors import ProtocolError
from supervisor.process import RESERVE, ProcessNotReadableError

__all__ = ["is_our_lack"]

_LACKS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_FEW: Final = 2  # descriptors of an answer


def is_our_lack(error: BaseException) -> bool:
    """Whether we had no descriptor, or no memory, for what was tried."""
    if isinstance(error, DescriptorLimitError):
        return True
    if isinstance(error, ProcessNotReadableError):
        return error.cause_errno in _LACKS
    if isinstance(error, ProtocolError):  # its descriptors were cut off on the way, perhaps
        return not RESERVE.has_room(_FEW)
    return isinstance(error, OSError) and error.errno in _LACKS
