"""Bodies of requests: what is accepted, and how the rest is refused."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvsift.server.api_errors import ApiError
from kvsift.server.messages_api import MessagesRequest
from kvsift.server.responses_api import ResponsesRequest
from kvsift.server.schemas import ChatRequest, CompletionRequest, ignored_fields, parse
from kvsift.server.tool_calls import PLAIN, Dialect

CONTENT = "the content of a message is text"
JSON_OBJECT = {"type": "json_object"}
HELLO = [{"role": "user", "content": "Hello"}]


TOOL = {"type": "function", "function": {"name": "f"}}
BAD_CALL = {"id": "a", "function": {"name": "f", "arguments": "{"}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}]}


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Hello", **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}, "logit_bias": {}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "parallel_tool_calls": True, "store": False},
        {
            "tools": None,
            "stop": None,
            "n": None,
            "seed": None,
            "stream": None,
            "sparsity": None,
            "min_tokens": 0,
        },
        {"temperature": 0, "top_p": 1, "max_tokens": 5, "max_completion_tokens": 5, "user": "me"},
    ],
)
def test_neutral_values_are_accepted(fields: dict) -> None:
    request = chat(**fields)
    assert request.samples == 1
    assert set(ignored_fields(request)) <= {"store", "min_tokens"}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": JSON_OBJECT}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}},
         "json_schema", '{"const": 1}'),
        ({"structured_outputs": {"json": {"const": 1}}}, "json_schema", '{"const": 1}'),
        ({"structured_outputs": {"json": '{"const":1}'}}, "json_schema", '{"const":1}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"response_format": JSON_OBJECT, "tools": [TOOL], "tool_choice": "none"}, "json_schema", '{"type": "object"}'),
    ],
)  # fmt: skip
def test_what_an_answer_must_be_is_given_as_openai_and_vllm_do(fields: dict, kind: str, text: str) -> None:
    request = chat(**fields)
    assert request.grammar == {"kind": kind, "text": text}
    assert not list(ignored_fields(request))


def test_sampling_has_what_was_given() -> None:
    given = {"temperature": 0.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "min_p": 0.1}
    assert chat(**given, top_k=-1).sampling == {**given, "top_k": 0}
    assert chat(logit_bias={"7": -100}, top_k=3).sampling == {"logit_bias": [[7, -100.0]], "top_k": 3}


@pytest.mark.parametrize(
    ("schema", "asked", "fields"),
    [
        (ResponsesRequest, {"input": "Hello"}, {"max_tokens": 4}),
        (ResponsesRequest, {"input": "Hello"}, {"structured_outputs": {"regex": "a"}}),
        (MessagesRequest, {"messages": HELLO}, {"stop": ["a"]}),
        (MessagesRequest, {"messages": HELLO}, {"seed": 0}),
        (MessagesRequest, {"messages": HELLO}, {"n": 2}),
        (CompletionRequest, {"prompt": "Hello"}, {"max_completion_tokens": 4}),
        (ChatRequest, {"messages": HELLO}, {"echo": True}),
    ],
)
def test_fields_of_other_routes_are_refused_where_they_would_change_the_answer(
    schema: type[Any], asked: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(ApiError, match="unknown field"):
        list(ignored_fields(parse(schema, json.dumps({**asked, **fields}).encode())))
    neutral = {
        "n": 1,
        "logprobs": False,
        "min_p": 0.0,
        "best_of": 1,
        "repetition_penalty": 1.0,
        "stop": [],
        "seed": None,
    }
    if schema in (ResponsesRequest, MessagesRequest):
        assert list(ignored_fields(parse(schema, json.dumps({**asked, **neutral}).encode())))


def test_unknown_fields_without_effect_are_ignored_by_name() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    said = {"role": "assistant", "refusal": None, "annotations": [], "tool_calls": [call]}
    parts = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}, "more": 1}]
    request = chat(
        messages=[{"role": "user", "content": parts}, said, {"role": "tool", "content": "4", "tool_call_id": "a"}],
        metadata={"a": "b"}, priority=3, service_tier="flex", verbosity="low", prompt_cache_retention="24h",
        stream=True, stream_options={"include_obfuscation": False, "fast": True},
    )  # fmt: skip
    ignored = {
        "messages.content.more", "metadata", "priority", "service_tier", "verbosity", "prompt_cache_retention",
        "stream_options.fast",
    }  # fmt: skip
    assert set(ignored_fields(request)) == ignored
    with pytest.raises(ApiError, match="unknown field"):
        list(ignored_fields(request, is_strict=True))
    parsed = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}  # by OpenAI's client
    assert not list(ignored_fields(chat(response_format=parsed), is_strict=True))
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    body = parse(ResponsesRequest, json.dumps({"input": "Hello", "tools": [tool]}).encode())
    assert not list(ignored_fields(body, is_strict=True))


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "include_usge", "did you mean 'include_usage'"),
        ({"sparsity": {"plan": "dense", "budget": 5}}, "budget", "Known: exact, min_recovery, passages, plan"),
        ({"messages": [{**HELLO[0], "rol": 1}]}, "rol", "did you mean 'role'"),
        ({"min_tokens": 3}, "min_tokens", "did you mean 'max_tokens'"),
        ({"plan": "quest:budget=512"}, "plan", 'is a field of sparsity; give {"sparsity": {"plan": ...}}'),
        ({"exact": True}, "exact", "is a field of sparsity"),
        ({"guided_regex": "a+"}, "guided_regex", "unknown field"),
        ({"max_output_tokens": 9}, "max_output_tokens", "unknown field"),
        ({"modalities": ["text", "audio"]}, "modalities", "is not supported by this server; leave it out unless it is"),
        ({"functions": [{"name": "f"}]}, "functions", "is not supported by this server; leave it out unless it is []"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tool_choice": "required"}, None, "tool_choice asks for a call, and tools have no such function"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, None, "no such function"),
        ({"continue_final_message": True}, None, "a text of the assistant"),
        ({"add_generation_prompt": False}, None, "is the opposite of continue_final_message"),
        ({"chat_template_kwargs": {"tools": 1}}, None, "are a field of their own"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs", "valid"),
        ({"messages": [{**CALLED, "role": "user", "content": ""}]}, "messages.0", "are those of an assistant"),
        ({"messages": [{**CALLED, "tool_calls": [BAD_CALL]}]}, "messages.0.tool_calls", "arguments of the call of 'f'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema="),
        ({"response_format": {"type": "xml"}}, "response_format", "'text', 'json_object' or 'json_schema'"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of json, json_object, regex, choice"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp", "did you mean 'regex'"),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON_OBJECT}, None, "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TOOL]}, None, "give tool_choice='none'"),
        ({"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
        ({"logit_bias": {"a": 3}}, "logit_bias", "pattern"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "less than or equal to 100"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
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
        ({"messages": [{"role": "robot", "content": "4"}]}, "messages.0.role", "'user', 'assistant' or 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages.0", "only that of an assistant may be null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", CONTENT),
        ({"messages": [{"role": "user", "content": [1] * 1000}]}, "messages.0.content", CONTENT),
        ({"sparsity": {"min_recovery": 0}}, "sparsity", "greater than 0"),
        ({"sparsity": "x" * 500}, "sparsity", "at most 400"),
    ],
)
def test_other_fields_are_refused_by_name(fields: dict, param: str | None, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        list(ignored_fields(chat(**fields)))
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


def test_messages_are_as_chat_templates_read_them() -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": "4"}
    request = chat(messages=[*HELLO, {**CALLED, "content": None, "reasoning_content": "hm"}, result], tools=[TOOL])
    function = {"name": "f", "arguments": {"x": 1}}
    assert request.plain_messages() == [
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "hm",
         "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {**result, "name": "f"},
    ]  # fmt: skip
    plain = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert request.template_variables(PLAIN) == {"tools": [{"type": "function", "function": plain}]}
    assert chat(tools=[TOOL], tool_choice="none").template_variables(PLAIN) == {}
    with pytest.raises(ApiError, match="--tool-parser"):
        request.template_variables(Dialect(has_tools=True))


def test_effort_is_given_to_templates_that_read_it() -> None:
    both = Dialect(variables=["reasoning_effort", "enable_thinking"])
    assert chat(reasoning_effort="low").template_variables(PLAIN) == {}
    assert chat(reasoning_effort="none").template_variables(both) == {
        "reasoning_effort": "none", "enable_thinking": False,
    }  # fmt: skip
    given = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert given.template_variables(Dialect(variables=["enable_thinking"])) == {"enable_thinking": True}


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
