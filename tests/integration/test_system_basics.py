"""A running system as its clients see it, and its memory as the kernel sees it."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from chaos.client import AdminRequestError
from chaos.judge import check_streams, reference_texts
from chaos.leftovers import Inode, marked_processes, memory_of
from chaos.memory import WEIGHTS, mapped_memory
from chaos.streams import StreamFleet, make_requests
from chaos.system import RunningSystem, SystemOptions

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionUserMessageParam


@pytest.fixture(scope="module")
def nvidia_smi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """First on PATH; a file `called` beside it tells that somebody has asked it."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ntouch {folder}/called\n")
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def system_options(nvidia_smi: Path) -> SystemOptions:
    path = f"{nvidia_smi.parent}{os.pathsep}{os.environ['PATH']}"
    return SystemOptions(batch=True, extra_environment={"PATH": path})


@pytest.fixture
def client(system: RunningSystem) -> openai.OpenAI:
    return openai.OpenAI(base_url=system.base_url, api_key="unused", max_retries=0, timeout=60)


def engine_pids(system: RunningSystem) -> list[int]:
    return [system.process(role).pid for role in ("primary", "standby", "batch")]


def weights_of(pid: int) -> frozenset[Inode]:
    return frozenset(inode for inode in memory_of(pid) if inode.name == WEIGHTS)


def test_nobody_asks_about_the_card_of_a_group_on_the_cpu(
    system: RunningSystem, nvidia_smi: Path
) -> None:
    status = system.admin.get("/v1/status")
    assert isinstance(status, dict)
    assert [group["device_memory"] for group in status["groups"]] == [[]]
    assert not nvidia_smi.with_name("called").exists()


def test_a_completion_answers_with_text_and_usage(client: openai.OpenAI) -> None:
    with client:
        answer = client.completions.create(
            model="chat", prompt="Once upon a time", max_tokens=12, temperature=0
        )
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_completion_is_the_same_text_as_the_whole_one(client: openai.OpenAI) -> None:
    with client:
        whole = client.completions.create(
            model="chat", prompt="The captain", max_tokens=24, temperature=1, seed=5
        )
        with client.completions.create(
            model="chat", prompt="The captain", max_tokens=24, temperature=1, seed=5, stream=True
        ) as stream:
            streamed = "".join(c.choices[0].text for c in stream if c.choices)
    assert streamed == whole.choices[0].text


def test_chat_answers_streamed_and_not(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionUserMessageParam] = [
        {"role": "user", "content": "What is the capital of France?"}
    ]
    with client:
        whole = client.chat.completions.create(
            model="chat",
            messages=messages,
            max_tokens=16,
            temperature=0,
        )
        with client.chat.completions.create(
            model="chat",
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
        ) as stream:
            chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.role == "assistant"
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    with client:
        free = client.completions.create(
            model="chat", prompt="She opened", max_tokens=40, temperature=0
        )
        stop = free.choices[0].text[8:11]
        stopped = client.completions.create(
            model="chat", prompt="She opened", max_tokens=40, temperature=0, stop=stop
        )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text[: free.choices[0].text.index(stop)]


def test_the_models_are_the_group_and_its_batch_engine(client: openai.OpenAI) -> None:
    with client:
        names = {model.id for model in client.models.list()}
        batch = client.completions.create(model="chat:batch", prompt="Once", max_tokens=4)
    assert names == {"chat", "chat:batch"}
    assert batch.usage is not None


def test_an_unknown_model_is_404_and_a_context_too_long_400(client: openai.OpenAI) -> None:
    with client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x", max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="chat", prompt="many words " * 4000, max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="chat", prompt="x", max_tokens=-3)


def test_sixteen_streams_through_the_official_client_repeat_exactly(system: RunningSystem) -> None:
    requests = make_requests(16, max_tokens=60)
    texts = reference_texts(system.base_url, requests)
    with StreamFleet(system.base_url, requests, transport="openai") as fleet:
        records = fleet.wait_done()
    check_streams(records, texts)
    assert len(set(texts.values())) > len(texts) // 2, "the streams hardly differ: a weak check"


def test_three_engines_hold_one_copy_of_the_weights(system: RunningSystem) -> None:
    pids = engine_pids(system)
    held = [weights_of(pid) for pid in pids]
    assert held[0]
    assert held[0] == held[1] == held[2]
    size_bytes = system.admin.status().group.cache[0].weights_bytes
    assert size_bytes > 1 << 20
    owners = [process.pid for process, _ in marked_processes(system.state_dir)]
    shares_bytes = sum(mapped_memory(pid).pss_bytes for pid in owners)
    assert 0 < shares_bytes <= size_bytes * 1.05 + 8192
    assert all(mapped_memory(pid).private_dirty_bytes == 0 for pid in pids)


def test_weights_cannot_be_written_from_outside_either(system: RunningSystem) -> None:
    pid = engine_pids(system)[1]
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mappings = [line.split() for line in lines if WEIGHTS in line]
    assert {fields[1] for fields in mappings} == {"r--s"}
    address = int(mappings[0][0].partition("-")[0], 16)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        before = memory.read(64)
        memory.seek(address)
        with pytest.raises(OSError, match=r"Input/output error|Bad address"):
            memory.write(bytes(64))
        memory.seek(address)
        assert memory.read(64) == before


def test_the_status_says_who_serves_and_who_stands_by(system: RunningSystem) -> None:
    status = system.wait_whole()
    group = status.group
    primary, standby = group.engine("primary"), group.engine("standby")
    assert primary is not None
    assert standby is not None
    assert group.primary == primary.name
    assert group.standby == [standby.name]
    assert status.supervisor.pid == system.supervisor.pid
    assert group.epoch >= 1
    assert system.admin.metric("understudy_epoch", group="chat") == group.epoch


def test_a_wrong_epoch_is_a_conflict_and_changes_nothing(system: RunningSystem) -> None:
    before = system.wait_whole().group
    with pytest.raises(AdminRequestError) as caught:
        system.admin.post("/v1/promote", expected_epoch=before.epoch + 7)
    assert caught.value.status == 409
    after = system.admin.status().group
    assert (after.epoch, after.primary) == (before.epoch, before.primary)


def test_a_client_that_leaves_gives_its_slot_back(system: RunningSystem) -> None:
    for _ in range(3):
        with StreamFleet(system.base_url, make_requests(16, max_tokens=1500)) as fleet:
            fleet.wait_tokens(2)
    started = time.monotonic()
    requests = make_requests(16, max_tokens=20)
    with StreamFleet(system.base_url, requests) as fleet:
        fleet.wait_done(timeout_s=60)
    assert time.monotonic() - started < 15, "sixteen abandoned streams still held their slots"
