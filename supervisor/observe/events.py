"""The event log: what the supervisor saw and did, one JSON object a line in `events.jsonl`.

Invariants
    1. `append` never blocks and never raises. A thread writes, in order, and syncs to disk.
    2. `seq` rises by one, and goes on after a restart. Where the disk failed for so long that
       events had to be given up, one `events_lost` line names the range in their place.
    3. Nothing that is in the file is changed, except a torn last line (a crash in the middle of a
       write), which is cut off and noted.
    4. No prompts, no tokens, no generated text: fields with such names are withheld.

The file may be renamed at any time (log rotation): the next event starts a new one.
"""

import asyncio
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Self

from supervisor.observe.diskwriter import DiskWriter
from supervisor.observe.eventfile import EventFile

__all__ = ["FILE_NAME", "EventLog", "Subscription"]

FILE_NAME: Final = "events.jsonl"
MEMORY_EVENTS: Final = 2000
PENDING_EVENTS: Final = 10_000
"""Events that wait for a disk that fails; older ones are given up, and counted."""

_MAX_TEXT_CHARS: Final = 2000
_MAX_FIELD_CHARS: Final = 4000
_RESERVED: Final = frozenset({"seq", "time", "kind", "text", "group", "engine"})
_WITHHELD: Final = frozenset({
    "authorization", "body", "completion", "content", "delta", "message_text", "messages",
    "output", "prompt", "prompt_ids", "token", "token_ids",
})  # fmt: skip

_log = logging.getLogger(__name__)

Event = dict[str, Any]


class EventLog:
    """Appends events, keeps the newest in memory, and tells subscribers.

    Reads the end of the file when it is made, so make it before the event loop runs.
    `append` may be called from any thread.
    """

    def __init__(
        self, state_dir: Path, *, retry_s: float = 1.0, pending_events: int = PENDING_EVENTS
    ) -> None:
        self.path = state_dir / FILE_NAME
        self._lock = threading.Lock()
        self._file = EventFile(self.path)
        self._memory: deque[Event] = deque(maxlen=MEMORY_EVENTS)
        self._pending: deque[Event] = deque()
        self._max_pending = pending_events
        self._lost = 0
        self._closed = False
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._writer = DiskWriter(
            "events", self._write_pending, retry_s=retry_s, on_change=self._disk_changed
        )
        found = self._file.read_tail(MEMORY_EVENTS)
        self._memory.extend(found.events)
        self._seq = found.last_seq
        if found.note:
            self.append("events_repaired", found.note)

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 before the first."""
        return self._seq

    @property
    def lost(self) -> int:
        """Events of this process that never reached the disk."""
        return self._lost

    @property
    def degraded(self) -> str:
        """Why events do not reach the disk; empty while they do."""
        return self._writer.degraded

    def append(
        self, kind: str, text: str, *, group: str = "", engine: str = "", **fields: object
    ) -> Event:
        """Record one event (a past participle and a sentence) and return it as it is stored."""
        event: Event = {"seq": 0, "time": round(time.time(), 6), "kind": kind}
        event["text"] = _clip(text, _MAX_TEXT_CHARS)
        event.update({"group": group} if group else {})
        event.update({"engine": engine} if engine else {})
        for name, value in fields.items():
            event[name + "_" if name in _RESERVED else name] = _safe(name, value)
        with self._lock:
            self._seq += 1
            event["seq"] = self._seq
            self._memory.append(event)
            self._pending.append(event)
            self._bound_pending()
            subscriptions = list(self._subscriptions)
        self._writer.poke()
        for subscription in subscriptions:
            subscription.wake()
        return event

    def since(self, seq: int, *, limit: int | None = None) -> list[Event]:
        """Events behind `seq` that are still in memory, oldest first; at most the last `limit`."""
        with self._lock:
            found = [event for event in self._memory if event["seq"] > seq]
        return found if limit is None else found[max(0, len(found) - limit) :]

    def subscribe(self, *, after: int | None = None) -> "Subscription":
        """Events behind `after` (default: from now on) as they come; for the running event loop.

        A subscriber reads from the log's own memory, so a slow one costs nothing and loses only
        what falls out of it: `Subscription.skipped` counts that.
        """
        with self._lock:
            # A number from the future belongs to a life whose last events never reached the disk.
            start = self._seq if after is None else after if after <= self._seq else 0
            subscription = Subscription(self, start)
            self._subscriptions.add(subscription)
        return subscription

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything is on disk. Blocks: not for the event loop."""
        return self._writer.flush(timeout_s=timeout_s)

    def close(self, *, timeout_s: float = 2.0) -> bool:
        """Write what is pending, end the thread and all subscriptions. False: some is not on disk.

        Blocks for at most `timeout_s`.
        """
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.close()
        is_complete = self._writer.close(timeout_s=timeout_s)
        if is_complete:
            self._file.close()
        return is_complete

    def _bound_pending(self) -> None:
        """Give up the oldest pending events beyond the bound; one line stands for all of them."""
        while len(self._pending) > self._max_pending:
            first, second = self._pending.popleft(), self._pending.popleft()
            is_record = first["kind"] == "events_lost"
            lost = first["lost"] + 1 if is_record else 2
            self._lost += 1 if is_record else 2
            self._pending.appendleft({
                "seq": second["seq"], "time": second["time"], "kind": "events_lost",
                "text": f"{lost} events could not be written while the disk failed",
                "from_seq": first["from_seq"] if is_record else first["seq"], "lost": lost,
            })  # fmt: skip

    def _write_pending(self) -> None:
        """Writer thread: append what is pending, then forget it."""
        with self._lock:
            batch = list(self._pending)
        self._file.append(batch)
        last = batch[-1]["seq"] if batch else 0
        with self._lock:
            while self._pending and self._pending[0]["seq"] <= last:
                self._pending.popleft()

    def _disk_changed(self, trouble: str) -> None:
        if trouble:
            _log.error("events do not reach the disk: %s", trouble)
            self.append("events_degraded", f"events do not reach the disk: {trouble}")
        else:
            _log.info("events reach the disk again")
            self.append("events_recovered", "events reach the disk again")


class Subscription(AsyncIterator[Event]):
    """One reader of the log. Ends when it, or the log, is closed."""

    def __init__(self, log: EventLog, after: int) -> None:
        self._log = log
        self._seq = after
        self._ready: deque[Event] = deque()
        self._wakeup = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closed = False
        self.skipped = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            self._wakeup.clear()
            self._refill()
            if not self._ready:
                await self._wakeup.wait()
        event = self._ready.popleft()
        self._seq = event["seq"]
        return event

    def wake(self) -> None:
        """New events are there, or the end. From any thread."""
        if threading.get_ident() == self._thread:
            self._wakeup.set()
        elif not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._wakeup.set)
            except RuntimeError:  # the loop closed between the look and the call
                self._closed = True

    def close(self) -> None:
        """End the iteration once what is at hand was read. Idempotent."""
        self._closed = True
        self.wake()

    def _refill(self) -> None:
        self._ready.extend(self._log.since(self._seq))
        if self._ready:
            self.skipped += self._ready[0]["seq"] - self._seq - 1 if self._seq else 0


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _safe(name: str, value: object) -> object:
    """A field as it may be stored: JSON, bounded, and never what a user wrote."""
    if name.lower() in _WITHHELD:
        return "[withheld]"
    try:
        encoded = json.dumps(value, default=str, allow_nan=False)
        if len(encoded) <= _MAX_FIELD_CHARS:
            return json.loads(encoded)  # a copy: the caller may change its object later
        return _clip(encoded, _MAX_FIELD_CHARS)
    except Exception as error:  # noqa: BLE001 -- a caller in a failover must not fail on its report
        return f"[not recordable: {type(error).__name__}]"
