"""What requests are taken, what is refused, and by which name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.gateway.errors import ApiError
from supervisor.gateway.openai_api import (
    Kind,
    ParsedRequest,
    decode_object,
    model_of,
    parse_request,
)

USER: Any = {"role": "user", "content": "hi"}


def parse(kind: Kind, **fields: object) -> ParsedRequest:
    given: dict[str, object] = {"model": "chat", **fields}
    if kind == "chat":
        given.setdefault("messages", [USER])
    else:
        given.setdefault("prompt", "hi")
    return parse_request(kind, decode_object(json.dumps(given).encode()), max_length=2048)


def refusal(kind: Kind, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, **fields)
    assert caught.value.status == 400
    return caught.value


def test_a_plain_completion_has_openais_defaults() -> None:
    parsed = parse("completion")

    assert (parsed.body.prompt, parsed.body.messages, parsed.body.max_tokens) == ("hi", None, None)
    assert (parsed.body.temperature, parsed.body.top_p, parsed.body.top_k) == (1.0, 1.0, 0)
    assert not parsed.stream
    assert 0 <= parsed.seed < 1 << 63


def test_all_supported_fields_reach_the_engine() -> None:
    parsed = parse(
        "chat",
        max_completion_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=40,
        stop=["a", "b"],
        seed=5,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )

    body = parsed.body
    assert (body.max_tokens, body.temperature, body.top_p, body.top_k) == (9, 0.0, 0.5, 40)
    assert (body.stop, body.ignore_eos, parsed.seed) == (["a", "b"], True, 5)
    assert (parsed.stream, parsed.include_usage) == (True, True)
    assert body.messages == [USER]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", "a"),
        (["a"], "a"),
        ([1, 2], [1, 2]),
        ([[1, 2]], [1, 2]),
    ],
)
def test_one_prompt_in_any_shape(prompt: object, expected: object) -> None:
    assert parse("completion", prompt=prompt).body.prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [[], ["a", "b"], [[1], [2]], [1, "a"], [1, 2.5], [-1], [1 << 32], [True], 5, {}, [None], [[]]],
)
def test_other_prompts_are_refused(prompt: object) -> None:
    assert refusal("completion", prompt=prompt).param == "prompt"


def test_a_prompt_that_cannot_fit_is_refused_before_any_engine_sees_it() -> None:
    assert refusal("completion", prompt=[1] * 2048).api_code == "context_length_exceeded"
    assert parse("completion", prompt=[1] * 2047)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"n": 2}, "n"),
        ("completion", {"n": 2}, "n"),
        ("completion", {"best_of": 2}, "best_of"),
        ("completion", {"logprobs": 0}, "logprobs"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"functions": [{}]}, "functions"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completion", {"echo": True}, "echo"),
        ("completion", {"suffix": "x"}, "suffix"),
        ("chat", {"logit_bias": {"1": 5}}, "logit_bias"),
        ("chat", {"presence_penalty": 0.5}, "presence_penalty"),
        ("completion", {"frequency_penalty": -1}, "frequency_penalty"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"audio": {"voice": "x"}}, "audio"),
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_no_engine_can_do_is_refused_by_name(
    kind: Kind, fields: dict[str, object], param: str
) -> None:
    error = refusal(kind, **fields)

    assert (error.param, error.api_code) == (param, "unsupported_parameter")
    assert param in error.message


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            "chat",
            {"n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"},
        ),
        ("chat", {"response_format": {"type": "text"}, "logit_bias": {}, "modalities": ["text"]}),
        ("chat", {"presence_penalty": 0, "frequency_penalty": 0.0}),
        ("completion", {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}}),
        ("chat", {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}),
        ("completion", {"user": "u"}),
        ("chat", {"tools": None, "n": None, "temperature": None, "stop": None, "seed": None}),
    ],
)
def test_values_that_change_nothing_are_taken(kind: Kind, fields: dict[str, object]) -> None:
    assert parse(kind, **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completion", {"max_tokens": "5"}, "max_tokens"),
        ("completion", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_completion_tokens": -1}, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens"),
        ("chat", {"temperature": 2.1}, "temperature"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"temperature": True}, "temperature"),
        ("chat", {"top_p": -0.1}, "top_p"),
        ("chat", {"top_k": 1.5}, "top_k"),
        ("chat", {"seed": 1 << 63}, "seed"),
        ("chat", {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ("chat", {"stop": ""}, "stop"),
        ("chat", {"stop": [1]}, "stop[0]"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"stream": True, "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": ["hi"]}, "messages[0]"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat", {"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("chat", {"messages": [USER | {"colour": "red"}]}, "messages[0].colour"),
        ("completion", {"ignore_eos": "no"}, "ignore_eos"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(
    kind: Kind, fields: dict[str, object], param: str
) -> None:
    error = refusal(kind, **fields)

    assert error.param == param
    assert error.message


@pytest.mark.parametrize(("kind", "missing"), [("completion", "prompt"), ("chat", "messages")])
def test_missing_fields_are_named(kind: Kind, missing: str) -> None:
    error = refusal(kind, **{missing: None})

    assert (error.param, error.api_code) == (missing, "missing_required_parameter")


def test_a_misspelt_field_is_refused_with_the_nearest_name() -> None:
    error = refusal("chat", temprature=0.5)

    assert (error.param, error.api_code) == ("temprature", "unknown_parameter")
    assert "did you mean temperature?" in error.message


def test_text_parts_are_joined_and_others_refused() -> None:
    text = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    parsed = parse("chat", messages=[{"role": "user", "content": text}])
    assert parsed.body.messages == [{"role": "user", "content": "a b"}]

    image = [*text, {"type": "image_url", "image_url": {"url": "data:"}}]
    error = refusal("chat", messages=[USER, {"role": "user", "content": image}])
    assert error.param == "messages[1].content[2].type"


def test_what_an_answer_carries_may_be_sent_back_as_history() -> None:
    answer: dict[str, object] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    parsed = parse("chat", messages=[USER, answer, USER])

    assert parsed.body.messages == [USER, {"role": "assistant", "content": "hello"}, USER]


def test_developer_is_the_new_name_of_system() -> None:
    parsed = parse("chat", messages=[{"role": "developer", "content": "be kind"}, USER])

    assert parsed.body.messages is not None
    assert parsed.body.messages[0] == {"role": "system", "content": "be kind"}


def test_a_nucleus_of_nothing_is_greedy() -> None:
    body = parse("chat", top_p=0).body

    assert (body.temperature, body.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"5", b'{"model": "\xff"}', b"[" * 100_000, b'{"a": NaN}',
        b'{"prompt": "\\ud800"}', b"{}{}", b"null",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_object(data)

    assert (caught.value.status, caught.value.api_code) == (400, "invalid_json")


@pytest.mark.parametrize("fields", [{}, {"model": 5}, {"model": None}])
def test_a_model_must_be_named(fields: dict[str, object]) -> None:
    with pytest.raises(ApiError) as caught:
        model_of(fields)

    assert caught.value.param == "model"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
_names = st.sampled_from(
    ["prompt", "messages", "max_tokens", "stop", "seed", "stream", "n", "top_p", "tools", "extra"]
)


@settings(deadline=None)
@given(
    fields=st.dictionaries(_names, _json, max_size=5), kind=st.sampled_from(["chat", "completion"])
)
def test_whatever_comes_is_parsed_or_refused_with_a_400(fields: dict[str, Any], kind: Kind) -> None:
    def outcome() -> int:
        try:
            parse_request(kind, {"model": "chat", **fields}, max_length=64)
        except ApiError as error:
            return error.status if json.dumps(error.body) else 0
        return 200

    assert outcome() in (200, 400)
