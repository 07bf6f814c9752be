"""The known answer: a short greedy completion, asked at start and compared ever after.

Which answer is right nobody knows beforehand. The supervisor takes the first one of the group, and
all engines must give the same from then on; the answer travels as the bytes of its text.

An answer is wrong when it differs twice in a row. A question that is not answered yet is never
given up for a new one: a server that stands still has it as work, and is judged by its progress.
"""

import asyncio
import hashlib
import time
from typing import Final

from engines.command.api import HttpEngine
from engines.command.errors import ServerUnusableError
from engines.command.progress import Progress
from engines.contract import CanaryResult
from engines.errors import NotReadyError

__all__ = ["PROMPT", "Canary"]

PROMPT: Final = "The understudy knows the whole part. When the lead cannot go on, the understudy"
_LONGEST_S: Final = 600.0
_ATTEMPTS: Final = 10  # of the start
_PAUSE_S: Final = 0.5
_WAIT_S: Final = 0.2
"""Of one question to us. The control socket answers one after another, so an order to take a role
waits as long; a slow server's answer is kept for the next question."""
_MAX_BYTES: Final = 256
_FAILURES: Final = frozenset({500, 502, 504})
"""A server that fails at the question which it has answered before gives a wrong answer: the status
instead of bytes. 429 and 503 say that it is full, which is none."""
_FULL: Final = frozenset({429, 503})


class Canary:
    """Asks one server, one question at a time."""

    def __init__(self, server: HttpEngine, model: str, progress: Progress) -> None:
        self._server = server
        self._model = model
        self._progress = progress
        self._unheard: CanaryResult | None = None  # the answer that the start has waited for
        self._known: list[int] | None = None  # by this server, at its start
        self._pending: asyncio.Task[CanaryResult | None] | None = None

    async def learn(self) -> None:
        """Ask a few times until there is an answer; the supervisor's first question gets it.

        Raises:
            ServerUnusableError: the server does not complete prompts.
        """
        for _ in range(_ATTEMPTS):  # some say that they are well before they are
            if (answer := await self._ask()) is not None:
                break
            await asyncio.sleep(_PAUSE_S)
        self._unheard = answer
        self._known = answer.token_ids if answer is not None else None
        if answer is None:
            raise ServerUnusableError(
                f"the server does not complete a prompt for model {self._model!r}",
                hint="it must answer POST /v1/completions; see its own log above",
            )

    async def ask(self) -> CanaryResult:
        """The answer, if it comes soon.

        Raises:
            NotReadyError: it has not come yet, or the server has refused; no statement about it.
        """
        if self._unheard is not None:
            result, self._unheard = self._unheard, None
            return result
        if self._pending is None:
            self._pending = asyncio.get_running_loop().create_task(self._ask())
        done, _ = await asyncio.wait([self._pending], timeout=_WAIT_S)
        if not done:
            raise NotReadyError("the server has not answered the canary yet")
        task, self._pending = self._pending, None
        answer = task.result()
        if answer is None:
            raise NotReadyError("the server does not answer the canary now")
        return answer

    def close(self) -> None:
        """Give up what is under way."""
        if self._pending is not None:
            self._pending.cancel()

    async def _ask(self) -> CanaryResult | None:
        """One answer. One that differs is asked for again: neighbours may have tipped it over."""
        answer = await self._ask_once()
        if answer is None or self._known is None or answer.token_ids == self._known:
            return answer
        await asyncio.sleep(_PAUSE_S)
        return await self._ask_once()

    async def _ask_once(self) -> CanaryResult | None:
        began_s = time.perf_counter()
        with self._progress.awaited():
            status, text = await self._server.ask(self._model, PROMPT, timeout_s=_LONGEST_S)
        duration_ms = (time.perf_counter() - began_s) * 1e3
        if status in _FAILURES and self._known is not None:
            return CanaryResult([status], duration_ms, time.monotonic_ns())
        if text is None:
            self._progress.is_refusing = status in _FULL
            return None
        self._progress.piece()  # and not for a refusal: it takes no step of the model
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > _MAX_BYTES:
            data = hashlib.sha256(data).digest()
        return CanaryResult(list(data), duration_ms, time.monotonic_ns())
