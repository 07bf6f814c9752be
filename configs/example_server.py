"""A small OpenAI-compatible server that needs nothing but Python: the example of `command.yaml`.

It stands for a real one (vLLM, SGLang, llama.cpp): it says the words of its prompt over and over,
one every 20 ms, so that there is a stream to look at while a server is killed. What Understudy
needs of a server is here in full: /health, /metrics with counters that move with every token,
/v1/models, /v1/completions and /v1/chat/completions, the last two also as streams.
"""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MODEL: Final = "parrot"
STEP_S: Final = 0.02
_LONGEST_TOKENS: Final = 4096
_lock: Final = threading.Lock()
_counters: Final = {"tokens": 0, "running": 0}


def _count(name: str, change: int) -> None:
    with _lock:
        _counters[name] += change


def tokens(body: dict[str, Any]) -> Iterator[str]:
    """The answer, a word at a time."""
    prompt = body.get("prompt") or (body.get("messages") or [{}])[-1].get("content") or "word"
    wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    _count("running", 1)
    try:
        for word in itertools.islice(itertools.cycle(str(prompt).split() or ["word"]),
                                     min(int(wanted), _LONGEST_TOKENS)):  # fmt: skip
            time.sleep(STEP_S)
            _count("tokens", 1)
            yield word + " "
    finally:
        _count("running", -1)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Health, metrics and the list of models."""
        if self.path == "/health":
            self._send(b"")
        elif self.path == "/metrics":
            text = (
                f"vllm:generation_tokens_total {_counters['tokens']}\n"
                f"vllm:num_requests_running {_counters['running']}\n"
                "vllm:num_requests_waiting 0\n"
            )
            self._send(text.encode())
        elif self.path == "/v1/models":
            self._send(json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())
        else:
            self._send(b'{"error": {"message": "there is nothing here"}}', status=404)

    def do_POST(self) -> None:
        """Completions."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._send(b'{"error": {"message": "there is nothing here"}}', status=404)
            return
        is_chat = self.path.endswith("chat/completions")
        if body.get("stream"):
            self._stream(body, is_chat=is_chat)
            return
        words = list(tokens(body))
        text = "".join(words)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": 1, "completion_tokens": len(words)}
        choice = {"index": 0, **said, "finish_reason": "length"}
        self._send(json.dumps({"model": MODEL, "choices": [choice], "usage": usage}).encode())

    def _stream(self, body: dict[str, Any], *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        count = 0
        for word in tokens(body):
            count += 1
            self._event(word, None, is_chat=is_chat)
        self._event("", "length", is_chat=is_chat)
        usage = {"prompt_tokens": 1, "completion_tokens": count}
        self._write({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, text: str, finish: str | None, *, is_chat: bool) -> None:
        said = {"delta": {"content": text}} if is_chat else {"text": text}
        self._write({"choices": [{"index": 0, **said, "finish_reason": finish}]})

    def _write(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send(self, body: bytes, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing about single requests."""


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True

    def handle_error(self, *_arguments: object) -> None:
        """A client that went away is nothing to report."""


def main() -> None:
    """Serve until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    Server(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()


if __name__ == "__main__":
    main()
