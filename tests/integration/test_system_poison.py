"""A request that crashes every engine it meets ends after three; the streams beside it go on."""

import json
from typing import Any

import httpx
import pytest

from chaos.client import wait_until
from chaos.judge import check_streams
from chaos.streams import StreamFleet
from chaos.system import RunningSystem, SystemOptions
from tests.harness.rounds import Load

POISON = "drink me"
DEADLINE_S = 60.0
TOLD_S = 10.0  # gateways report once a second, and a whole group may be quicker


@pytest.fixture(scope="module")
def system_options() -> SystemOptions:
    return SystemOptions(
        extra_environment={"UNDERSTUDY_FAULTS": "1", "UNDERSTUDY_POISON": POISON},
        max_young_deaths=20,
    )


def ask(system: RunningSystem, *, stream: bool) -> httpx.Response:
    body = {
        "model": "chat",
        "prompt": "Alice read",
        "stop": [POISON],  # what every engine is told, also when it goes on with a stream
        "max_tokens": 1000,  # an engine dies a moment after it came: it must not be done by then
        "ignore_eos": True,
        "stream": stream,
    }
    return httpx.post(f"{system.base_url}/completions", json=body, timeout=DEADLINE_S)


def error_of(answer: httpx.Response) -> dict[str, str]:
    """From the body, or from the last event of a stream."""
    text = answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert "[DONE]" not in text
        text = text.strip().split("\n\n")[-1].removeprefix("data: ")
    found: dict[str, str] = json.loads(text)["error"]
    return found


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_third_crash_ends_it_and_nobody_else(system: RunningSystem, stream: bool) -> None:
    system.wait_whole()
    load = Load.of(system, streams=8, tokens=400)
    poisoned = system.admin.metric("understudy_gateway_poisoned_total", model="chat")
    crashes = system.admin.metric("understudy_engine_crashes_total", group="chat")
    with StreamFleet(system.base_url, load.requests) as fleet:
        fleet.wait_tokens(10)
        answer = ask(system, stream=stream)
        records = fleet.wait_done()
    assert error_of(answer)["code"] == "poison"
    assert answer.status_code == (200 if stream else 500)  # it had tokens before it crashed
    check_streams(records, load.texts)
    system.wait_whole()
    assert system.admin.metric("understudy_engine_crashes_total", group="chat") - crashes == 3
    wait_until(
        lambda: system.admin.metric("understudy_gateway_poisoned_total", model="chat") > poisoned,
        "the counter of the gateway", timeout_s=TOLD_S,
    )  # fmt: skip
    assert system.admin.metric("understudy_gateway_poisoned_total", model="chat") == poisoned + 1


def events_of(system: RunningSystem, kind: str) -> list[dict[str, Any]]:
    answer = system.admin.get("/v1/events")
    assert isinstance(answer, dict)
    return [event for event in answer["events"] if event["kind"] == kind]


def test_what_happened_is_told(system: RunningSystem) -> None:
    system.wait_whole()
    told = len(events_of(system, "poison_ended"))
    crashed = len(events_of(system, "engine_crashed"))
    ask(system, stream=False)
    system.wait_whole()
    wait_until(lambda: len(events_of(system, "poison_ended")) > told, "the event", timeout_s=TOLD_S)
    crashes = events_of(system, "engine_crashed")[crashed:]
    assert len(crashes) == 3
    assert all("was ended by SIGABRT" in event["text"] for event in crashes)
