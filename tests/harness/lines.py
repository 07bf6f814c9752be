"""Lines from a child process that answers one line at a time, with a deadline."""

import os
import select
import time
from typing import IO


def read_line(stream: IO[str] | IO[bytes], *, timeout_s: float) -> str:
    """The next line, past the buffer of the stream: nobody else may have read from it."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no line in {timeout_s} s, only {line!r}"
        chunk = os.read(stream.fileno(), 4096)
        assert chunk, f"the process ended after {line!r}"
        line += chunk
    return line.decode().strip()
