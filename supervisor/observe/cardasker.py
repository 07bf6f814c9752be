"""Asking `nvidia-smi` beside the event loop: a thread waits, and may hang without harm.

A thread and `cache.children`, not the loop's own subprocesses: those of uvloop ignore `close_fds`,
and a child that hangs in a sick driver would keep every descriptor of ours open, device memory too.

Invariants
    1. One question at a time. While an earlier one has not come back, or its child has not ended,
       no other is begun: a sick driver gets one process of ours, not one more every time.
    2. `ask` ends within `ANSWER_S`, also when the thread does not.
    3. `stop` ends the child within some 20 ms; so does the end of whoever asks.

The thread is a daemon thread: a driver that never answers must not keep the process alive.
"""

import asyncio
import contextlib
import threading
from typing import Final

from cache.gpumemory import CardMemory, CardUnknownError, ask_card

__all__ = ["ANSWER_S", "CardAsker"]

ANSWER_S: Final = 8.0
"""More than a question and the end of its child take (6 s): later than this the thread hangs."""

_NICENESS: Final = 19


class CardAsker:
    """The one place of the supervisor that starts `nvidia-smi`."""

    def __init__(self) -> None:
        self._under_way: asyncio.Future[CardMemory | None] | None = None

    async def ask(self, uuid: str, *, stop: threading.Event) -> CardMemory | None:
        """One card, as the driver reports it; None when `stop` was set meanwhile.

        Raises:
            CardUnknownError: no answer in time, or none that can be understood.
        """
        if self._under_way is not None and not self._under_way.done():
            raise CardUnknownError("an earlier question has not come back")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[CardMemory | None] = loop.create_future()
        thread = threading.Thread(
            target=_ask, args=(uuid, stop, loop, answer), name="nvidia-smi", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread left for us
            raise CardUnknownError(str(error)) from error
        self._under_way = answer
        try:
            await asyncio.wait({answer}, timeout=ANSWER_S)
        finally:
            stop.set()
        if not answer.done():
            raise CardUnknownError(f"no answer for {ANSWER_S:g} s, and it cannot be ended")
        return answer.result()


def _ask(
    uuid: str,
    stop: threading.Event,
    loop: asyncio.AbstractEventLoop,
    answer: "asyncio.Future[CardMemory | None]",
) -> None:
    memory: CardMemory | None = None
    error: CardUnknownError | None = None
    try:
        memory = ask_card(uuid, niceness=_NICENESS, stop=stop)
    except CardUnknownError as known:
        error = known
    except Exception as unexpected:  # noqa: BLE001 - a thread that dies silently looks like one that hangs
        error = CardUnknownError(f"asking failed: {unexpected!r}")
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, answer, memory, error)


def _settle(
    answer: "asyncio.Future[CardMemory | None]",
    memory: CardMemory | None,
    error: CardUnknownError | None,
) -> None:
    if error is None:
        answer.set_result(memory)
    else:
        answer.set_exception(error)
        answer.exception()  # nobody may be waiting any more, and that is not worth a warning
