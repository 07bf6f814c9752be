"""Bounds of a worker: constants that no operator needs to turn, and the room for waiting requests.

What an operator may turn is in `protocol.GatewayLimits`. Every wait of the worker ends by one of
these numbers or by one of those.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from supervisor.gateway.errors import ApiError

__all__ = [
    "BODY_TIMEOUT_S",
    "CANCEL_LINGER_S",
    "DRAIN_DEADLINE_S",
    "ENGINE_SILENCE_S",
    "EXPLANATION_S",
    "FIRST_TABLE_GRACE_S",
    "HEAD_TIMEOUT_S",
    "KEEPALIVE_S",
    "LINGER_S",
    "MAX_FRUITLESS_ATTEMPTS",
    "MAX_VIOLATIONS",
    "SAME_ROUTE_FIRST_S",
    "SAME_ROUTE_LONGEST_S",
    "SOCKET_FLUSH_S",
    "TERM_DEADLINE_S",
    "TRIAL_FRAMES",
    "TRIAL_LEAST_S",
    "TRIAL_S",
    "TRIAL_WAIT_S",
    "UPSTREAM_BUFFER_BYTES",
    "Parking",
]

HEAD_TIMEOUT_S: Final = 15.0
"""From the connection to the end of the first request head."""

BODY_TIMEOUT_S: Final = 60.0
"""From the head to the end of the body: 4 MiB at half a megabit."""

KEEPALIVE_S: Final = 75.0
"""How long an idle connection stays open between requests; also bounds a torn later head."""

LINGER_S: Final = 2.0
"""How long the rest of a refused body is read, so that the client sees the answer, not a reset."""

FIRST_TABLE_GRACE_S: Final = 5.0
"""A new worker leaves connections in the backlog, where other workers may take them, until it has
a table; after this it takes them anyway, so that they get an answer."""

SAME_ROUTE_FIRST_S: Final = 0.25
"""An engine that broke off but still has its route is tried again after this long. A dead one is
out of the table within milliseconds, so this wait is only for a connection that broke alone."""

SAME_ROUTE_LONGEST_S: Final = 2.0
"""The wait doubles up to this."""

ENGINE_SILENCE_S: Final = 600.0
"""A last resort for a stream whose engine says nothing and whose supervisor is gone too. Long,
because a request may wait in an engine's queue behind others for minutes."""

MAX_VIOLATIONS: Final = 5
"""Wrong frames in one stream before it ends with an error."""

MAX_FRUITLESS_ATTEMPTS: Final = 10
"""Engines lost in a row, each after it had accepted, without one token."""

EXPLANATION_S: Final = 2.0
"""How long a request that may be poison waits to hear how the last engine ended: the kernel needs
up to a second to take a large one down, and until then nobody knows."""

TRIAL_WAIT_S: Final = 10.0
"""How long a suspect waits for its turn; then it goes on. Its slot is not kept longer either."""

TRIAL_S: Final = 1.0
"""An engine that lives this long with a suspect survives it (it may only wait for a slot)."""

TRIAL_FRAMES: Final = 2
"""So many deltas prove it too: the first may only hold what its old engine had committed."""

TRIAL_LEAST_S: Final = 0.1
"""But not sooner than this: a device reports what went wrong some steps later."""

UPSTREAM_BUFFER_BYTES: Final = 64 << 10
"""Frames of one engine connection that may wait for a slow client before reading stops."""

SOCKET_FLUSH_S: Final = 5.0
"""How long a closed engine connection may take to send its last frame."""

CANCEL_LINGER_S: Final = 1.0
"""How long an engine may take to hang up after a `Cancel`."""

TERM_DEADLINE_S: Final = 30.0
"""After SIGTERM: how long streams may take to finish."""

DRAIN_DEADLINE_S: Final = 3600.0
"""After the verb `drain`: the supervisor decides earlier with SIGTERM."""


class Parking:
    """Counts the requests that wait for a route before their first byte, and bounds them."""

    def __init__(self, max_parked: int) -> None:
        self._max = max_parked
        self.count = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place while waiting.

        Raises:
            ApiError: 429, all places are taken.
        """
        if self.count >= self._max:
            raise ApiError(
                429,
                "too_many_waiting",
                f"{self.count} requests already wait for the model to come back",
                retry_after_s=1.0,
            )
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
