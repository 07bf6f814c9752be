"""An engine that plays a script over the real generation socket.

`Story` is the text it tells: a pure function of the token ids, as a real engine's. A script gets
the connection and the `Generate` frame and does what it likes; `tell` is the script of a good
engine. As a process of its own: `python -m tests.unit.gateway.scripted SOCKET TOKENS DELAY_S`.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from cache.wire import FrameBuffer, encode_frame, listen_unix
from engines.contract import (
    Accepted,
    Cancel,
    Delta,
    End,
    EngineFrame,
    GatewayFrame,
    Generate,
    GenerateError,
    Usage,
)

_decoder = msgspec.json.Decoder(GatewayFrame)

PROMPT_IDS = [11, 12, 13]


class Story:
    """Token i has id 100 + i and says a word; every fourth says nothing by itself."""

    def __init__(self, tokens: int) -> None:
        self.ids = [100 + number for number in range(tokens)]

    def text(self, tokens: int) -> str:
        """The text of the first tokens."""
        shown = tokens if tokens % 4 else max(0, tokens - 1)
        if tokens == len(self.ids):
            shown = tokens
        return "".join(f"wörd{number}\n☃ " for number in range(shown))

    @property
    def whole(self) -> str:
        return self.text(len(self.ids))

    def delta(self, index: int, count: int, chars: int) -> Delta:
        """Tokens index..index+count, and the text behind `chars`."""
        text = self.text(index + count)
        return Delta(index, self.ids[index : index + count], text[chars:], max(chars, len(text)))

    @property
    def end(self) -> End:
        return End("length", Usage(len(PROMPT_IDS), len(self.ids)))


class Line:
    """One connection as the engine sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._buffer = FrameBuffer()
        self.got_cancel = False
        self.got_eof = asyncio.Event()

    async def receive(self) -> GatewayFrame | None:
        while (body := self._buffer.next_body()) is None:
            data = await self._reader.read(65536)
            if not data:
                return None
            self._buffer.feed(data)
        return _decoder.decode(body)

    async def watch(self) -> None:
        """Read until the gateway hangs up."""
        with contextlib.suppress(ConnectionError):
            while (frame := await self.receive()) is not None:
                if isinstance(frame, Cancel):
                    self.got_cancel = True
                    self.drop()
        self.got_eof.set()

    async def send(self, *frames: EngineFrame) -> None:
        self.writer.write(b"".join(encode_frame(frame) for frame in frames))
        await self.writer.drain()

    async def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def drop(self) -> None:
        """Die: no goodbye."""
        self.writer.transport.abort()


Script = Callable[["ScriptedEngine", Line, Generate], Awaitable[None]]


async def tell(engine: "ScriptedEngine", line: Line, request: Generate) -> None:
    """What a good engine does: accept, and tell the story from where the client is."""
    resume = request.resume
    source: Literal["fresh", "slot"] = "fresh" if resume is None else "slot"
    await line.send(Accepted(PROMPT_IDS, request.epoch, source, exact=True))
    index = 0 if resume is None else len(resume.token_ids)
    chars = 0 if resume is None else resume.chars
    while index < len(engine.story.ids):
        count = min(engine.burst, len(engine.story.ids) - index)
        delta = engine.story.delta(index, count, chars)
        await line.send(delta)
        index, chars = index + count, delta.chars
        await asyncio.sleep(engine.delay_s)
    await line.send(engine.story.end)


def refuse(error: GenerateError) -> Script:
    async def script(_engine: ScriptedEngine, line: Line, _request: Generate) -> None:
        await line.send(error)

    return script


def die_after(tokens: int, then: Script = tell) -> Script:
    """Tell so many tokens and break off; later connections play `then`."""

    async def script(engine: ScriptedEngine, line: Line, request: Generate) -> None:
        if len(engine.requests) > 1:
            await then(engine, line, request)
            return
        await line.send(Accepted(PROMPT_IDS, request.epoch, "fresh", exact=True))
        chars = 0
        for index in range(tokens):
            delta = engine.story.delta(index, 1, chars)
            chars = delta.chars
            await line.send(delta)
        await asyncio.sleep(0.02)
        line.drop()

    return script


class ScriptedEngine:
    """Listens at a generation socket and plays one script per connection."""

    def __init__(
        self, path: Path, story: Story, script: Script = tell, *, delay_s: float = 0.0
    ) -> None:
        self.path = path
        self.story = story
        self.script = script
        self.delay_s = delay_s
        self.burst = 1
        self.requests: list[Generate] = []
        self.lines: list[Line] = []
        self.was_asked = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ScriptedEngine":
        self._server = await asyncio.start_unix_server(self._accept, sock=listen_unix(self.path))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Close everything at once."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.path.unlink(missing_ok=True)
        for line in self.lines:
            line.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        watcher: asyncio.Task[None] | None = None
        try:
            request = await line.receive()
            if not isinstance(request, Generate):
                return
            self.requests.append(request)
            self.lines.append(line)
            self.was_asked.set()
            watcher = asyncio.create_task(line.watch())
            await self.script(self, line, request)
            await watcher
        except (ConnectionError, asyncio.CancelledError):
            line.got_eof.set()  # the gateway hung up, or the test ends
        finally:
            if watcher is not None:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _main(path: Path, tokens: int, delay_s: float) -> None:
    async with ScriptedEngine(path, Story(tokens), delay_s=delay_s):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
