"""Logging: one sentence per decision, then `key=value` fields, written by a thread.

    log.warning("chat-a is dead, promoting chat-b", extra=fields(epoch=4, group="chat"))
    2026-05-01T12:00:00.123Z WARNING supervisor.runtime chat-a is dead, promoting chat-b epoch=4 ...

Invariants
    1. Logging never blocks the event loop: standard error may be a pipe that nobody reads. Lines
       wait in a bounded queue; those that do not fit are dropped, counted, and reported.
    2. One record is one line: line breaks and control characters are escaped, so that text from
       outside cannot forge a line.
"""

import atexit
import codecs
import logging
import re
import sys
import threading
import time
from collections import deque
from typing import Any, Final, TextIO

__all__ = ["FieldFormatter", "ThreadedHandler", "fields", "setup_logging"]

_escape: Final = codecs.getencoder("unicode_escape")  # now: it may have to be read from a file
_QUEUE_LINES: Final = 10_000
_BARE = re.compile(r"[\w.:/@+,\[\]{}%-]+", re.ASCII)


def fields(**values: object) -> dict[str, Any]:
    """The `extra` of a logging call that carries fields."""
    return {"fields": values}


class FieldFormatter(logging.Formatter):
    """`TIME LEVEL logger sentence key=value ...`, in UTC, one line whatever the text holds."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows behind ` | ` with its line breaks escaped."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{seconds}.{int(record.msecs):03d}Z", record.levelname, record.name]
        parts.append(_one_line(record.getMessage()))
        extra = getattr(record, "fields", None)
        if isinstance(extra, dict):
            parts += [f"{key}={_value(value)}" for key, value in extra.items()]
        if record.exc_info and record.exc_info[0] is not None:
            parts.append("| " + _one_line(self.formatException(record.exc_info)))
        return " ".join(parts)


class ThreadedHandler(logging.Handler):
    """Formats in the caller's thread, writes in its own; never blocks, drops when full."""

    def __init__(self, stream: TextIO, *, queue_lines: int = _QUEUE_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._queue_lines = queue_lines
        self._dropped = 0
        self._unreported = 0
        self._writing = False
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were given up because nobody read the stream."""
        return self._dropped

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 -- a bad format string must not break the caller
            cause = record.exc_info[1] if record.exc_info else None
            line = f"a log line of {record.name} could not be formatted ({error!r}): {record.msg!r}"
            if cause is not None:
                line += f" | {cause!r} at {_place(cause)}"
        with self._condition:
            if len(self._lines) >= self._queue_lines:
                self._dropped += 1
                self._unreported += 1
                return
            self._lines.append(line)
            self._condition.notify_all()

    def drain(self, *, timeout_s: float) -> bool:
        """Wait until all lines are written; False when the stream does not take them."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._lines and not self._writing, timeout_s
            )

    def close(self) -> None:
        """Write what waits, for at most a second, and end the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        super().close()

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._stream.write("".join(line + "\n" for line in batch))
                self._stream.flush()
            except (OSError, ValueError):
                with self._condition:  # the reader is gone: there is nobody left to tell
                    self._dropped += len(batch)

    def _take(self) -> list[str] | None:
        with self._condition:
            self._writing = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._lines or self._closing)
            if not self._lines:
                return None
            batch = list(self._lines)
            self._lines.clear()
            if self._unreported:
                batch.append(f"{self._unreported} log lines were dropped: nobody read them in time")
                self._unreported = 0
            self._writing = True
            return batch


def setup_logging(level: str = "INFO", stream: TextIO | None = None) -> ThreadedHandler:
    """Send all logging through one `ThreadedHandler`; call it once, early, from `main`."""
    handler = ThreadedHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(FieldFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    atexit.register(handler.close)
    return handler


def _place(error: BaseException) -> str:
    """Where it was raised, without reading any source file: there may be no descriptor left."""
    trace, places = error.__traceback__, []
    while trace is not None:
        places.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-8:]))


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c)[0].decode() for c in text)


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _BARE.fullmatch(text):
        return text
    return '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
