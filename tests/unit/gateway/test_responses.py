"""The bytes of answers, checked against the models of the real OpenAI client."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engines.contract import End, Usage
from supervisor.gateway.errors import ApiError
from supervisor.gateway.openai_api import Kind
from supervisor.gateway.responses import DONE, Answer, model_list
from supervisor.gateway.routes import ServedModel

END = End("stop", Usage(3, 2))


def payloads(data: bytes) -> list[Any]:
    events = data.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") for event in events)
    bodies = [event.removeprefix(b"data: ") for event in events]
    return [body if body == b"[DONE]" else json.loads(body) for body in bodies]


def answer(kind: Kind, *, include_usage: bool = False) -> Answer:
    return Answer(kind, model="chat", created=1700000000, include_usage=include_usage)


def test_a_streamed_chat_has_the_shape_of_openais() -> None:
    chat = answer("chat", include_usage=True)
    data = chat.opening() + chat.text("hé") + chat.text('"llo\n') + chat.closing(END)
    *bodies, done = payloads(data)

    assert done == b"[DONE]"
    chunks = [ChatCompletionChunk.model_validate(body, strict=True) for body in bodies]
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "hé", '"llo\n', None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(body["usage"] is None for body in bodies[:-1])
    assert (bodies[-1]["choices"], bodies[-1]["usage"]["total_tokens"]) == ([], 5)
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1


def test_a_streamed_completion_has_the_shape_of_openais() -> None:
    plain = answer("completion")
    *bodies, _ = payloads(plain.opening() + plain.text("a") + plain.closing(END))

    chunks = [Completion.construct(**body) for body in bodies]
    assert [chunk.choices[0].text for chunk in chunks] == ["a", ""]
    assert [body["choices"][0]["finish_reason"] for body in bodies] == [None, "stop"]
    assert "usage" not in bodies[0]


def test_whole_answers_have_the_shape_of_openais() -> None:
    chat = ChatCompletion.model_validate_json(answer("chat").whole("hi", END))
    plain = Completion.model_validate_json(answer("completion").whole("hi", END))

    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("hi", "stop")
    assert (plain.choices[0].text, plain.object) == ("hi", "text_completion")
    assert chat.usage is not None
    assert chat.usage.total_tokens == 5


@settings(deadline=None)
@given(text=st.text(min_size=1), kind=st.sampled_from(["chat", "completion"]))
def test_any_text_survives_in_one_event(text: str, kind: Kind) -> None:
    (body,) = payloads(answer(kind).text(text))

    choice = body["choices"][0]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text


def test_the_list_of_models_has_the_shape_of_openais() -> None:
    listed = model_list([ServedModel("chat", "chat", "primary", 2048, 5, None)])

    assert listed["object"] == "list"
    assert Model.model_validate(listed["data"][0], strict=True).id == "chat"


def test_the_end_mark_is_openais() -> None:
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_errors_have_openais_body(status: int, kind: str) -> None:
    error = ApiError(status, "some_code", "words", param="n", retry_after_s=0.2)

    assert error.body == {
        "error": {"message": "words", "type": kind, "param": "n", "code": "some_code"}
    }
    assert error.headers == {"Retry-After": "1"}
