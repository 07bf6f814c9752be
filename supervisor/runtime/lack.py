"""Whether an error is a lack of the machine's: it says nothing about the process concerned.

Who cannot open a socket hears no answer; who has no room for a process starts none. That must
neither count against a process that does its work nor end it, and is tried again for ever.
"""

import errno
from typing import Final

from cache.errors import DescriptorLimitError, RemoteError
from supervisor.errors import ProtocolError, StartFailedError
from supervisor.process import RESERVE, ProcessNotReadableError, SpawnError

__all__ = ["is_our_lack", "refusal_of"]

_LACKS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_FEW: Final = 2  # descriptors of an answer
_FORK_FAILED: Final = "fork_failed"


def is_our_lack(error: BaseException) -> bool:
    """Whether we had no descriptor, or no memory, for what was asked of somebody."""
    if isinstance(error, DescriptorLimitError):
        return True
    if isinstance(error, ProcessNotReadableError):
        return error.cause_errno in _LACKS
    if isinstance(error, ProtocolError):  # its descriptors were cut off on the way, perhaps
        return not RESERVE.has_room(_FEW)
    return isinstance(error, OSError) and error.errno in _LACKS


def refusal_of(error: BaseException) -> str | None:
    """What the machine refused when something was started; None: it is not to blame."""
    if isinstance(error, OSError | SpawnError | ProcessNotReadableError | DescriptorLimitError):
        return str(error)
    if isinstance(error, RemoteError):
        return error.message if error.stable_code == _FORK_FAILED else None
    # The process says itself that somebody, it or the cache daemon, has no descriptor left.
    if isinstance(error, StartFailedError) and error.cause == DescriptorLimitError.code:
        return error.message
    return None
