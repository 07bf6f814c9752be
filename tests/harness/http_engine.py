"""An OpenAI-compatible HTTP engine as a process of its own, with vLLM's names on `/metrics`.

Not a model: it makes a token every few milliseconds while it has requests. What it does wrong is
one word: `stall` (decode stands still), `mute` (its HTTP hangs too), `wrong`, `full` (429), `jam`
(stands still, and takes nothing more: 429), `sick` (503, also on `/health`), `leave` (exit status
1), `refuse` (400), `broken` (500), `deaf` (listens no more), `churn` (needs a CPU for each token),
`well`. The prompt `poison` ends it.

Who starts it as a test's own child tells it on its standard input, one word a line. With
`--orders FILE` it looks there instead, for a line `PID WORD` with its own pid.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from tests.harness.lines import read_line

ROOT = Path(__file__).parents[2]
STEP_S = 0.005
CHURN_S = 0.2
_LINE_S = 30.0


class Engine:
    """The server's side."""

    def __init__(self, orders: Path | None = None) -> None:
        self.mode = "well"
        self.generated = 0
        self.running = 0
        self.site: web.BaseSite | None = None
        self._orders = orders

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_chat = request.path.endswith("chat/completions")
        if body.get("prompt") == "poison":
            os._exit(3)
        if self.mode in {"full", "jam"}:
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        if self.mode == "broken":
            return web.json_response({"error": {"message": "cuda error"}}, status=500)
        if self.mode == "sick":
            return web.json_response({"error": {"message": "overloaded"}}, status=503)
        if self.mode == "refuse":
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        if not body.get("stream"):
            words = [word async for word in self._words(body)]
            return web.json_response({"choices": [{"text": "".join(words)}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        async for word in self._words(body):
            count += 1
            await response.write(_event(_choice(word, None, is_chat=is_chat)))
        await response.write(_event(_choice("", "length", is_chat=is_chat)))
        usage = {"prompt_tokens": 7, "completion_tokens": count}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def _words(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        try:
            for number in range(int(body.get("max_tokens") or 16)):
                await asyncio.sleep(STEP_S)
                await self._while("stall", "mute", "jam")
                if self.mode == "churn":
                    _burn(CHURN_S)
                self.generated += 1
                yield f"{' ' if number else ''}{'x' if self.mode == 'wrong' else 'w'}{number}"
        finally:
            self.running -= 1

    async def health(self, _: web.Request) -> web.Response:
        await self._while("mute")
        return web.Response(text="", status=503 if self.mode == "sick" else 200)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

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

    async def obey(self) -> None:
        """Look at the orders again and again."""
        assert self._orders is not None
        while True:
            await asyncio.sleep(STEP_S)
            try:
                pid, mode = self._orders.read_text().split()
            except (FileNotFoundError, ValueError):
                continue
            if int(pid) == os.getpid():
                self.mode = mode
            if self.mode == "leave":
                os._exit(1)
            if self.mode == "deaf" and self.site is not None:
                await self.site.stop()
                self.site = None

    async def _while(self, *modes: str) -> None:
        while self.mode in modes:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(STEP_S)


def _burn(cpu_s: float) -> None:
    """Compute, as a model does on a CPU; nothing else runs meanwhile."""
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        pass


def _event(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _choice(text: str, finish: str | None, *, is_chat: bool) -> dict[str, Any]:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"choices": [{"index": 0, **said, "finish_reason": finish}]}


async def main() -> None:
    """Serve at the address that was ordered, else on a free port: the first line of the output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds", default="")
    parser.add_argument("--orders", type=Path)
    parser.add_argument("--escape", action="store_true", help="leave the session first")
    options = parser.parse_args()
    if options.escape:
        os.setsid()
    engine = Engine(options.orders)
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_post("/v1/chat/completions", engine.complete)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/metrics", engine.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = (
        web.UnixSite(runner, options.uds)
        if options.uds
        else web.TCPSite(runner, "127.0.0.1", options.port)
    )
    await site.start()
    engine.site = site
    if options.orders is not None:
        await engine.obey()
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
