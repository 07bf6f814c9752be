"""The hand-over between the model thread and the event loop, one port per connection.

Each field has one writer, so that no lock is needed: the model thread counts what it produced,
the event loop counts what the kernel has taken. The difference is what a slow gateway has not
read yet, and the model thread pauses that row when it grows too large.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engines.contract import EngineFrame

__all__ = ["Outbox", "Outgoing", "StreamPort"]


@dataclass(slots=True, eq=False)
class StreamPort:
    """One stream as both threads see it. Compared by identity."""

    produced_tokens: int = 0  # written by the model thread
    sent_tokens: int = 0  # written by the event loop
    wants_wake: bool = False  # set by the model thread when it pauses, cleared by the loop

    @property
    def unsent_tokens(self) -> int:
        """Tokens that were produced and not yet taken by the kernel."""
        return self.produced_tokens - self.sent_tokens


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One frame for one stream; `is_last` closes the connection after it."""

    port: StreamPort
    frame: EngineFrame
    tokens: int = 0
    is_last: bool = False


class Outbox:
    """Frames of one step, handed to the event loop in one go: a wake-up costs more than a frame."""

    def __init__(self, deliver: Callable[[list[Outgoing]], None]) -> None:
        self._deliver = deliver
        self._waiting: list[Outgoing] = []

    def put(
        self, port: StreamPort, frame: EngineFrame, *, tokens: int = 0, is_last: bool = False
    ) -> None:
        """Add a frame; it leaves with the next `flush`."""
        port.produced_tokens += tokens
        self._waiting.append(Outgoing(port, frame, tokens, is_last))

    def flush(self) -> None:
        """Hand everything over. Called after the tokens were committed, never before."""
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self._deliver(batch)
