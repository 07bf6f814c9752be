"""Logging: one line per record, and nobody waits for the reader."""

import io
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from supervisor.observe.logs import FieldFormatter, ThreadedHandler, fields, setup_logging


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    log = logging.getLogger("test.observe.logs")
    log.propagate = False
    log.setLevel("DEBUG")
    yield log
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def attach(log: logging.Logger, stream: io.TextIOBase, **options: int) -> ThreadedHandler:
    handler = ThreadedHandler(stream, **options)  # type: ignore[arg-type]
    handler.setFormatter(FieldFormatter())
    log.addHandler(handler)
    return handler


def test_a_line_is_a_sentence_and_fields(logger: logging.Logger) -> None:
    stream = io.StringIO()
    handler = attach(logger, stream)
    logger.warning("%s is dead", "chat-a", extra=fields(epoch=4, took_s=0.25, why="no answer"))
    assert handler.drain(timeout_s=5)
    time_text, level, name, rest = stream.getvalue().split(" ", 3)
    assert time_text.endswith("Z")
    assert (level, name) == ("WARNING", "test.observe.logs")
    assert rest == 'chat-a is dead epoch=4 took_s=0.25 why="no answer"\n'


def test_text_from_outside_cannot_forge_a_line(logger: logging.Logger) -> None:
    stream = io.StringIO()
    handler = attach(logger, stream)
    logger.info("name: %s", "a\n2026-01-01 ERROR forged\x1b[31m", extra=fields(x='a" b="c\n'))
    try:
        int("two\nlines")
    except ValueError:
        logger.exception("failed")
    assert handler.drain(timeout_s=5)
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b" not in stream.getvalue()


def test_a_pipe_that_nobody_reads_blocks_nobody(logger: logging.Logger) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:  # noqa: PTH123 -- a descriptor
        handler = attach(logger, stream, queue_lines=100)
        started = time.monotonic()
        for _ in range(3000):
            logger.info("x" * 100)
        assert time.monotonic() - started < 2.0
        assert handler.dropped > 0
        assert not handler.drain(timeout_s=0.05)

        received = bytearray()
        drained = threading.Thread(target=_read, args=(reader, received))
        drained.start()
        assert handler.drain(timeout_s=5)
        logger.removeHandler(handler)
        handler.close()
    drained.join(5)
    os.close(reader)
    assert b"log lines were dropped" in received


def _read(fd: int, received: bytearray) -> None:
    while chunk := os.read(fd, 65536):
        received += chunk


def test_a_wrong_format_does_not_break_the_caller(logger: logging.Logger) -> None:
    stream = io.StringIO()
    handler = attach(logger, stream)
    # Straight to the handler: pytest's own handler would raise on it.
    handler.handle(logging.LogRecord("x", logging.INFO, "f", 1, "%d engines", ("three",), None))
    assert handler.drain(timeout_s=5)
    assert "could not be formatted" in stream.getvalue()


def test_setup_replaces_all_handlers() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    try:
        handler = setup_logging("INFO", stream)
        assert root.handlers == [handler]
        logging.getLogger("supervisor.x").info("hello")
        logging.getLogger("aiohttp.access").info("quiet")
        assert handler.drain(timeout_s=5)
        assert stream.getvalue().endswith("INFO supervisor.x hello\n")
        handler.close()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
