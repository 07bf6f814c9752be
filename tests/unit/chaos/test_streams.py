"""The fleet against a server of canned events: what arrives is recorded, chunk by chunk."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from cache.errors import DeadlineExceededError
from chaos.judge import check_streams, interruptions, reference_texts
from chaos.streams import BrokenStreamError, StreamFleet, Transport, make_requests


def event(**choice: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "chat",
        "choices": [{"index": 0, "text": "", "finish_reason": None, "logprobs": None, **choice}],
    }


async def complete(request: web.Request) -> web.StreamResponse:
    """Counts up to max_tokens; the bytes of two events are sometimes cut in the middle."""
    body = await request.json()
    if body["prompt"].startswith("refuse"):
        return web.json_response({"error": {"message": "no"}}, status=429)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    total = body["max_tokens"]
    events = [event(text=f"{n} ") for n in range(total)]
    events.append(event(finish_reason="length"))
    usage = {"prompt_tokens": 1, "completion_tokens": total, "total_tokens": total + 1}
    events.append({**event(), "choices": [], "usage": usage})
    for payload in [*(json.dumps(e) for e in events), "[DONE]"]:
        data = f"data: {payload}\n\n".encode()
        await response.write(data[:9])
        await asyncio.sleep(0.001)
        await response.write(data[9:])
        if body["prompt"].startswith("stall") and total > 3:
            await asyncio.sleep(60)
    return response


class Server:
    """An aiohttp server in a thread, as the fleet has a loop of its own."""

    def __init__(self) -> None:
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()
        stalled = asyncio.all_tasks() - {asyncio.current_task()}
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server()
    yield server.url
    server.close()


@pytest.mark.parametrize("transport", ["sse", "openai"])
def test_every_chunk_is_recorded_in_order_and_with_its_moment(
    url: str, transport: Transport
) -> None:
    requests = make_requests(4, max_tokens=5)
    with StreamFleet(url, requests, transport=transport) as fleet:
        fleet.wait_tokens(2)
        records = fleet.wait_done(timeout_s=20)
    check_streams(records, {r.name: "0 1 2 3 4 " for r in requests})
    for record in records:
        assert record.arrivals_ns == sorted(record.arrivals_ns)
        assert len(record.arrivals_ns) == 5
    assert len(interruptions(records, records[0].arrivals_ns[2])) >= 1


def test_a_reference_run_returns_the_texts_by_name(url: str) -> None:
    requests = make_requests(3, max_tokens=2)
    assert reference_texts(url, requests) == {r.name: "0 1 " for r in requests}


@pytest.mark.parametrize("transport", ["sse", "openai"])
def test_a_refused_request_ends_its_record_with_the_error(url: str, transport: Transport) -> None:
    request = make_requests(1, max_tokens=2)[0]
    refused = type(request)("refused", "refuse", 2, 0.0, 1)
    with StreamFleet(url, [refused], transport=transport) as fleet:
        with pytest.raises(BrokenStreamError, match="refused"):
            fleet.wait_tokens(1)
        (record,) = fleet.wait_done(timeout_s=20)
    assert record.error is not None
    assert "429" in record.error


def test_a_fleet_that_is_left_early_ends_its_streams(url: str) -> None:
    request = make_requests(1, max_tokens=9)[0]
    stalled = type(request)("stalled", "stall", 9, 0.0, 1)
    with StreamFleet(url, [stalled]) as fleet, pytest.raises(DeadlineExceededError):
        fleet.wait_done(timeout_s=0.2)
    assert fleet.is_done
