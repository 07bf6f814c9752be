"""An OpenAI-compatible HTTP engine as a process of its own, with vLLM's names on `/metrics`.

Not a model: it makes a token every few milliseconds while it has requests. What it does wrong is
told on its standard input, one word a line: `stall`, `mute` (its HTTP hangs too), `wrong`, `full`,
`well`.
"""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from aiohttp import web

from tests.harness.lines import read_line

ROOT = Path(__file__).parents[2]
_STEP_S = 0.005
_LINE_S = 30.0


class Engine:
    """The server's side."""

    def __init__(self) -> None:
        self.mode = "well"
        self.generated = 0
        self.running = 0

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.mode == "full":
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        self.running += 1
        words = []
        try:
            for number in range(int(body["max_tokens"])):
                await asyncio.sleep(_STEP_S)
                await self._while("stall", "mute")
                self.generated += 1
                words.append(f"{'x' if self.mode == 'wrong' else 'w'}{number}")
        finally:
            self.running -= 1
        return web.json_response({"choices": [{"text": " ".join(words)}]})

    async def health(self, _: web.Request) -> web.Response:
        await self._while("mute")
        return web.Response(text="")

    async def metrics(self, _: web.Request) -> web.Response:
        await self._while("mute")
        labels = '{engine="0",model_name="a {b} \\"c\\""}'
        return web.Response(
            text=f"# TYPE vllm:generation_tokens counter\n"
            f"vllm:generation_tokens_total{labels} {self.generated}.0\n"
            f"vllm:prompt_tokens_total{labels} 7.0\n"
            f"vllm:num_requests_running{labels} {self.running}.0\n"
            f"vllm:num_requests_waiting{labels} 0.0\n"
        )

    async def _while(self, *modes: str) -> None:
        while self.mode in modes:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(_STEP_S)


async def main() -> None:
    """Serve on a free port, which is the first line of the output."""
    engine = Engine()
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/metrics", engine.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def listen() -> None:
        for line in sys.stdin:
            engine.mode = line.strip()
            sys.stdout.write("done\n")
            sys.stdout.flush()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()


class HttpEngineProcess:
    """The test's side. A context manager."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.http_engine"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.url = f"http://127.0.0.1:{self._line()}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end()

    def _end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def be(self, mode: str) -> None:
        """Change what it does; it does so on return."""
        assert self.process.stdin is not None
        self.process.stdin.write(mode + "\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return read_line(self.process.stdout, timeout_s=_LINE_S)


if __name__ == "__main__":
    asyncio.run(main())
