"""Requests that wait for a slot: two bounded queues, resumes before new ones."""

from collections import deque
from collections.abc import Callable

from engines.native.commands import Submit
from engines.native.streams import StreamPort

__all__ = ["WaitingRequests"]


class WaitingRequests:
    """Used by the model thread alone."""

    def __init__(self, *, max_queue: int, slots: int) -> None:
        self._max_queue = max_queue
        self._slots = slots
        self._resumes: deque[Submit] = deque()
        self._fresh: deque[Submit] = deque()

    def __len__(self) -> int:
        return len(self._resumes) + len(self._fresh)

    def try_add(self, submit: Submit, *, free_slots: int) -> bool:
        """Append, unless the queue is full.

        What the next loop moves into free slots does not count. Resumes have room for one full
        set of slots more: refusing them would break streams that a client is reading.
        """
        waiting = self._resumes if submit.request.is_resume else self._fresh
        bound = self._max_queue + free_slots
        if submit.request.is_resume:
            bound += self._slots
        if len(waiting) >= bound:
            return False
        waiting.append(submit)
        return True

    def pop(self) -> Submit:
        """The next one to get a slot.

        Raises:
            IndexError: nothing waits.
        """
        return (self._resumes or self._fresh).popleft()

    def remove_port(self, port: StreamPort) -> None:
        """Forget what this connection asked for."""
        self._remove(lambda submit: submit.port is port)

    def remove_gateway(self, gateway: str) -> None:
        """Forget what this gateway worker asked for."""
        self._remove(lambda submit: submit.request.params.gateway == gateway)

    def remove_request(self, request_id: bytes) -> list[Submit]:
        """Take out earlier submissions of the same request."""
        return self._remove(lambda submit: submit.request.request_id == request_id)

    def remove_all(self) -> list[Submit]:
        """Take out everything."""
        return self._remove(lambda _: True)

    def _remove(self, matches: Callable[[Submit], bool]) -> list[Submit]:
        removed: list[Submit] = []
        for waiting in (self._resumes, self._fresh):
            found = [submit for submit in waiting if matches(submit)]
            for submit in found:
                waiting.remove(submit)
            removed += found
        return removed
