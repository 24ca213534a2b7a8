"""Bodies of requests: what is accepted, and how the rest is refused."""

import json

import pytest
from pydantic import ValidationError

from kvsift.server.api_errors import ApiError
from kvsift.server.schemas import ChatRequest, CompletionRequest, parse

CONTENT = "the content of a message is text"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Hello", **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "parallel_tool_calls": True, "store": False},
        {
            "tools": None,
            "stop": None,
            "n": None,
            "seed": None,
            "stream": None,
            "sparsity": None,
            "metadata": {"a": "b"},
        },
        {"temperature": 0, "top_p": 1, "max_tokens": 5, "max_completion_tokens": 5, "user": "me"},
    ],
)
def test_neutral_values_are_accepted(fields: dict) -> None:
    assert chat(**fields).samples == 1


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "include_usge", "did you mean 'include_usage'"),
        ({"sparsity": {"plan": "dense", "budget": 5}}, "budget", "Known: exact, min_recovery, passages, plan"),
        ({"messages": [{**HELLO[0], "rol": 1}]}, "rol", "did you mean 'role'"),
        ({"tools": [{"type": "function"}]}, "tools", "is not supported by this server; leave it out unless it is []"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "is not supported"),
        ({"store": 0}, "store", "is not supported"),
        ({"n": 17, "temperature": 1}, "n", "less than or equal to 16"),
        ({"n": 2}, None, "n=2 greedy answers are the same one"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "differ"),
        ({"top_logprobs": 3}, None, "need logprobs=true"),
        ({"stream_options": {}}, None, "need stream=true"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, None, "needs include_usage=true"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages.0.role", "'system', 'developer', 'user' or"),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "4"}]}, "messages.0.role", "calls no tools"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
            "messages.0.tool_calls",
            "is not supported",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0", "only that of an assistant may be null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", CONTENT),
        ({"messages": [{"role": "user", "content": [1] * 1000}]}, "messages.0.content", CONTENT),
        ({"sparsity": {"min_recovery": 0}}, "sparsity", "greater than 0"),
        ({"sparsity": "x" * 500}, "sparsity", "at most 400"),
    ],
)
def test_other_fields_are_refused_by_name(fields: dict, param: str | None, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert text in refused.value.message


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts_are_texts_or_tokens(prompt: object, prompts: list) -> None:
    assert completion(prompt=prompt).prompt_fields() == {"prompts": prompts, "max_tokens": 16}


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [1, "a"], [-1], [True], {"a": 1}, None, ["a"] * 65])
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ApiError, match=r"prompt|65 answers"):
        completion(prompt=prompt)


@pytest.mark.parametrize("fields", [
    {"prompt": [-1] * 1000}, {"prompt": [[-1]] * 1000}, {"prompt": [None] * 1000}, {"stop": [1] * 1000},
])  # fmt: skip
def test_long_lists_that_are_wrong_have_few_errors(fields: dict) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "Hello", **fields})
    assert caught.value.error_count() < 10


def test_objects_of_very_many_fields_are_refused() -> None:
    for fields in ({str(n): n for n in range(200)}, {"metadata": {str(n): n for n in range(200)}}):
        with pytest.raises(ApiError, match="fields, and may have 100"):
            chat(**fields)


def test_bodies_of_very_many_values_are_refused() -> None:
    """They would take seconds to check, in which nobody is answered."""
    for body in (b"[1," * 10 + b"1" + b"]" * 10, b"[" + b"1," * 1_000_001 + b"1]", b"[" + b"[]," * 200_000 + b"[]]"):
        with pytest.raises(ApiError) as refused:
            parse(CompletionRequest, b'{"prompt": ' + body + b"}")
        assert refused.value.status == 400


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": [], "refusal": None}])
def test_an_assistant_without_content_is_accepted_as_clients_repeat_it(message: dict) -> None:
    messages = [*HELLO, {"role": "assistant", **message}, *HELLO]
    said = {"role": "assistant", "content": ""}
    assert chat(messages=messages).prompt_fields()["messages"] == [*HELLO, said, *HELLO]
