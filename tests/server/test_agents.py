"""Tools, reasoning and the routes of other APIs, over HTTP, by an engine process that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import TypeAdapter
from server.serving import Served

import kvsift
from kvsift.server.app import build
from kvsift.server.response_bodies import ChatCompletion, MessageBody, ResponseObject
from kvsift.server.settings import ServerSettings

ASKED = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"name": "weather", "description": "Look it up."}
TOOL = {"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}
ARGUMENTS = {"city": "Paris", "days": 7}


@pytest.fixture
def client(scripted: Served) -> Iterator[httpx.Client]:
    with scripted.client() as client:
        yield client


@pytest.fixture
def official(scripted: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any], kind: Any = None) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if kind is not None:
        TypeAdapter(kind).validate_python(response.json())
    return response.json()


def typed_events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    response = client.post(path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = list[dict[str, Any]]()
    for lines in (each.split("\n") for each in response.text.split("\n\n") if each and not each.startswith(":")):
        [name, data] = lines
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_tool_is_called_and_its_result_answered(official: openai.OpenAI, client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": [TOOL]}
    [choice] = official.chat.completions.create(**body).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.model_extra == {"reasoning_content": "I need it."}
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    post(client, "/v1/chat/completions", body, ChatCompletion)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*ASKED, choice.message.model_dump(exclude_unset=True), result]
    answer = official.chat.completions.with_raw_response.create(**{**body, "messages": messages}, metadata={"a": "b"})
    assert answer.parse().choices[0].message.content == "The result of weather is rain."
    assert answer.headers["x-kvsift-ignored"] == "metadata"


def test_streamed_calls_are_those_of_the_whole_answer(official: openai.OpenAI) -> None:
    with official.chat.completions.stream(model="tiny", messages=ASKED, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert message.tool_calls[0].function.name == "weather"
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    chunks = official.chat.completions.create(
        model="tiny", messages=ASKED, tools=[TOOL], n=2, temperature=1, stream=True
    )
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    for index in range(2):
        own = [choice for choice in deltas if choice.index == index]
        assert "".join((each.delta.model_extra or {}).get("reasoning_content", "") for each in own) == "I need it."
        calls = [call for each in own for call in each.delta.tool_calls or ()]
        assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1)
        assert {call.index for call in calls} == {0}
        assert own[-1].finish_reason == "tool_calls"


def test_without_a_choice_no_tool_is_shown(official: openai.OpenAI) -> None:
    [choice] = official.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL], tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == ("Hello, 1.", None)
    assert choice.message.model_extra == {"reasoning_content": "Who is it?"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_forced_is_found_in_json(choice: Any, official: openai.OpenAI, client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "tool_choice": choice}
    [answer] = official.chat.completions.create(**body).choices
    [call] = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "weather")
    with official.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments == json.dumps(
            ARGUMENTS
        )
    tool = {**WEATHER, "input_schema": SCHEMA}
    found = post(client, "/v1/messages", {"messages": ASKED, "tools": [tool], "tool_choice": {"type": "any"}})
    assert found["content"][0]["input"] == ARGUMENTS
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    assert official.responses.create(model="tiny", input="?", text=text).output_text == '{"city": "Paris"}'


def test_calls_are_one_if_they_must_not_be_parallel(official: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": f"say {call}{call}"}]}
    [choice] = official.chat.completions.create(**body, tools=[TOOL]).choices
    assert len(choice.message.tool_calls) == 2
    [choice] = official.chat.completions.create(**body, tools=[TOOL], parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    [choice] = official.chat.completions.create(**body).choices
    assert (choice.message.content, choice.finish_reason) == (call * 2, "stop")


def test_anthropics_messages(client: httpx.Client) -> None:
    tool = {**WEATHER, "input_schema": SCHEMA}
    body = {"model": "tiny", "max_tokens": 100, "messages": ASKED, "tools": [tool], "system": "Be brief."}
    answer = post(client, "/v1/messages", body, MessageBody)
    thought, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "I need it.", "signature": ""}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ARGUMENTS)
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens"] == 2
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    messages = [*ASKED, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert post(client, "/v1/messages", {**body, "messages": messages})["content"] == [
        {"type": "text", "text": "The result of weather is rain."}
    ]
    assert post(client, "/v1/messages/count_tokens", {**body, "messages": messages})["input_tokens"] > 20
    cut = post(client, "/v1/messages", {**body, "max_tokens": 30})
    assert (cut["stop_reason"], cut["content"][1]["input"].keys()) == ("max_tokens", {"INVALID_JSON"})


def test_anthropics_messages_tell_what_stopped_them(client: httpx.Client) -> None:
    body = {"max_tokens": 100, "messages": [{"role": "user", "content": "say one two"}], "stop_sequences": ["x", "two"]}
    answer = post(client, "/v1/messages", body)
    assert answer["content"][0]["text"] == "one "
    stopped = {"stop_reason": "stop_sequence", "stop_sequence": "two"}
    assert answer.items() >= stopped.items()
    assert typed_events(client, "/v1/messages", body)[-2]["delta"] == stopped


def test_anthropics_events(client: httpx.Client) -> None:
    body = {"max_tokens": 100, "messages": ASKED, "tools": [{**WEATHER, "input_schema": SCHEMA}]}
    found = typed_events(client, "/v1/messages", body)
    kinds = [event["type"].removeprefix("content_block_") for event in found]
    assert list(dict.fromkeys(kinds)) == ["message_start", "start", "delta", "stop", "message_delta", "message_stop"]
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "tool_use"]
    parts = "".join(event["delta"].get("partial_json", "") for event in found if "index" in event and "delta" in event)
    assert json.loads(parts) == ARGUMENTS
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[0]["message"]["usage"]["input_tokens"] == 4


def test_errors_of_messages_have_anthropics_type(client: httpx.Client) -> None:
    for body, text in [
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no other parts are taken"),
        ({"messages": ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"messages": ASKED, "tool_choice": {"type": "any"}}, "tools have no such function"),
        ({"messages": ASKED, "max_token": 4}, "did you mean 'max_tokens'"),
    ]:
        response = client.post("/v1/messages", json=body)
        assert (response.status_code, response.json()["type"]) == (400, "error")
        assert text in response.json()["error"]["message"]


def test_responses_go_on_with_earlier_ones(official: openai.OpenAI, client: httpx.Client) -> None:
    tool: Any = {"type": "function", **WEATHER, "parameters": SCHEMA}
    first = official.responses.create(
        model="tiny", input="What is the weather?", tools=[tool], instructions="Be brief."
    )
    thought, call = first.output
    assert (first.status, thought.type, thought.content[0].text) == ("completed", "reasoning", "I need it.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ARGUMENTS)
    assert first.usage.total_tokens == 6
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given: dict[str, Any] = {"model": "tiny", "input": [result], "tools": [tool]}
    second = official.responses.create(**given, previous_response_id=first.id)
    assert second.output_text == "The result of weather is rain."
    items = [{"role": "user", "content": "What?"}, *(item.model_dump() for item in first.output), result]
    stateless = official.responses.create(**{**given, "input": items}, store=False)
    assert stateless.output_text == second.output_text
    third = official.responses.create(model="tiny", input="And you?", previous_response_id=second.id)
    assert third.output_text == "Hello, 5."  # a question, a call, its result, an answer, a question
    with pytest.raises(openai.NotFoundError, match="is not kept"):
        official.responses.create(model="tiny", input="?", previous_response_id=stateless.id)
    post(client, "/v1/responses", {"input": "Hello"}, ResponseObject)
    cut = official.responses.create(model="tiny", input="say abcdef", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "abc")


def test_events_of_a_response(official: openai.OpenAI, client: httpx.Client) -> None:
    tool: Any = {"type": "function", **WEATHER, "parameters": SCHEMA}
    with official.responses.stream(model="tiny", input="What?", tools=[tool]) as stream:
        found = list(stream)
        call = stream.get_final_response().output[1]
    assert json.loads(call.arguments) == ARGUMENTS
    assert [event.sequence_number for event in found] == list(range(len(found)))
    body = {"input": "say <think>Hm.</think>Yes!"}
    kinds = [event["type"].removeprefix("response.") for event in typed_events(client, "/v1/responses", body)]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "completed",
    ]  # fmt: skip


def test_texts_and_tokens(client: httpx.Client) -> None:
    found = post(client, "/tokenize", {"prompt": "abc"})
    assert found["count"] == len(found["tokens"]) == 7
    assert found["max_model_len"] == 64
    assert post(client, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": '["abc"]'}
    assert post(client, "/tokenize", {"messages": ASKED, "tools": [TOOL]})["count"] > 20
    for body in ({}, {"prompt": "a", "messages": ASKED}):
        assert "either a prompt or messages" in client.post("/tokenize", json=body).json()["error"]["message"]


def test_tokens_are_those_of_the_model(server: Served, alone: kvsift.LLM) -> None:
    with server.client() as client:
        found = post(client, "/tokenize", {"prompt": "Hällo", "return_token_strs": True})
        assert found["tokens"] == alone.encode("Hällo")
        assert found["token_strs"] == alone.tokenizer.convert_ids_to_tokens(found["tokens"])
        bare = post(client, "/tokenize", {"prompt": "Hällo", "add_special_tokens": False})
        assert found["tokens"][1:] == bare["tokens"]
        assert post(client, "/detokenize", {"tokens": bare["tokens"]}) == {"prompt": "Hällo"}
        answer = post(client, "/v1/chat/completions", {"messages": ASKED, "max_tokens": 1})
        assert post(client, "/tokenize", {"messages": ASKED})["count"] == answer["usage"]["prompt_tokens"]
        assert post(client, "/v1/messages/count_tokens", {"messages": ASKED})["input_tokens"] > 20
        strange = {"tags": ["a"], "é\n": 1, "": 2, " ": 3}
        answer = client.post("/v1/chat/completions", json={"messages": ASKED, "reasoning_effort": "low", **strange})
        assert answer.headers["x-kvsift-ignored"] == 'tags, "\\u00e9\\n", "", " ", reasoning_effort'
        for path, body, text in [
            ("/detokenize", {"tokens": [10**6]}, "the prompt has token 1000000"),
            ("/tokenize", {"prompt": "a", "model": "gpt-5"}, "is not served here"),
            ("/v1/chat/completions", {"messages": ASKED, "tools": [TOOL]}, "does not write tools"),
            ("/v1/chat/completions", {"messages": ASKED, "chat_template_kwargs": {"messages": 1}}, "'messages'"),
        ]:
            assert text in client.post(path, json=body).json()["error"]["message"]


def test_unknown_fields_are_refused_by_a_strict_server() -> None:
    async def ask(is_strict: bool) -> httpx.Response:
        app, supervisor = build(ServerSettings(is_strict=is_strict))
        supervisor.names, supervisor.check_open = ["tiny"], lambda: None  # type: ignore[method-assign]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/chat/completions", json={"messages": ASKED, "model": "a", "priority": 1})

    assert asyncio.run(ask(True)).json()["error"]["param"] == "priority"
    assert asyncio.run(ask(False)).json()["error"]["code"] == "model_not_found"


def test_other_routes_are_refused_in_a_sentence(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server answers with text, and has no embeddings"):
        official.embeddings.create(model="tiny", input="a")
