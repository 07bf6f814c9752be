"""What one client has got of its answer, and what the next engine must be told. Pure.

Frames go in; out comes what to emit. Nothing is emitted that does not continue, token for token
and character for character, what was emitted before: whatever engines do, a client's text is never
repeated, torn or reordered.

Invariants
    1. `token_ids` and `chars` describe exactly what `take` returned so far. The caller emits it
       before it takes the next frame, or gives the client up.
    2. A frame that violates the order changes nothing.
    3. `resume()` is None as long as no engine has accepted: then the request starts afresh, with
       the same id and seed. So it does behind `restart`, which only who has emitted nothing calls.

WARNING: on a cut, discard the old connection's unread frames first and ask `resume()` afterwards.
"""

from dataclasses import dataclass
from typing import Literal

from engines.contract import Accepted, Delta, End, Resume
from supervisor.gateway.errors import StreamViolationError

__all__ = ["Delivery", "Emit", "Started"]


@dataclass(frozen=True, slots=True)
class Started:
    """An engine accepted: the answer begins, or goes on."""

    source: Literal["fresh", "slot", "replay"]
    resumed: bool


@dataclass(frozen=True, slots=True)
class Emit:
    """New text for the client; `text` may be empty while the engine holds it back."""

    text: str
    tokens: int


class Delivery:
    """The record of one request, over all engines that worked on it."""

    def __init__(self) -> None:
        self.prompt_ids: list[int] | None = None
        self.token_ids: list[int] = []
        self.chars = 0
        self._epoch = -1
        self._accepted = False
        self._ended = False
        self.is_resumable = True  # as the engine said that accepted last

    @property
    def was_accepted(self) -> bool:
        """Whether any engine ever accepted the request."""
        return self.prompt_ids is not None

    @property
    def is_accepted(self) -> bool:
        """Whether the engine of this attempt has accepted."""
        return self._accepted

    def begin(self, epoch: int) -> None:
        """A new attempt, at an engine of this epoch; what the last one still had is void."""
        self._epoch = epoch
        self._accepted = False

    def restart(self) -> None:
        """Nothing of what came has reached a client, and nobody can go on with it: begin anew."""
        self.prompt_ids = None
        self.token_ids = []
        self.chars = 0
        self._accepted = False
        self.is_resumable = True

    def resume(self, *, with_prompt: bool = True) -> Resume | None:
        """What to tell the next engine; None: start afresh."""
        if self.prompt_ids is None:
            return None
        tokens = list(self.token_ids)
        if with_prompt:
            return Resume(self.prompt_ids, tokens, self.chars)
        return Resume(None, tokens, self.chars, prompt_tokens=len(self.prompt_ids))

    def take(self, frame: Accepted | Delta | End) -> Started | Emit | End:
        """The next frame of this attempt, and what follows from it.

        Raises:
            StreamViolationError: the frame does not continue the stream; drop the connection.
        """
        if self._ended:
            raise StreamViolationError("the engine went on behind the end of the stream")
        if isinstance(frame, Accepted):
            return self._accept(frame)
        if not self._accepted:
            raise StreamViolationError("the engine sent tokens before it accepted the request")
        if isinstance(frame, Delta):
            return self._append(frame)
        self._ended = True
        return frame

    def _accept(self, frame: Accepted) -> Started:
        if self._accepted:
            raise StreamViolationError("the engine accepted twice")
        if frame.epoch != self._epoch:
            raise StreamViolationError(
                f"the engine answers for epoch {frame.epoch}, epoch {self._epoch} was asked"
            )
        resumed = self.prompt_ids is not None
        if resumed and frame.prompt_ids and frame.prompt_ids != self.prompt_ids:
            raise StreamViolationError("the engine resumed another prompt")
        if not resumed:
            self.prompt_ids = frame.prompt_ids
        self._accepted = True
        self.is_resumable = frame.resumable
        return Started(frame.source, resumed)

    def _append(self, frame: Delta) -> Emit:
        if frame.index != len(self.token_ids):
            raise StreamViolationError(
                f"the engine sent token {frame.index}, token {len(self.token_ids)} is next"
            )
        chars = self.chars + len(frame.text)
        if frame.chars != chars:
            raise StreamViolationError(
                f"the engine counts {frame.chars} characters, the client has {chars}"
            )
        self.token_ids += frame.token_ids
        self.chars = chars
        return Emit(frame.text, len(frame.token_ids))
