"""Answers whose form is given, and penalties, over HTTP and by OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from server.serving import Served, events

import kvsift
from kvsift.server.answers import parser_of
from kvsift.server.frames import AnswerRequest
from kvsift.server.jobs import ServerJob
from kvsift.server.schemas import ChatRequest, parse
from kvsift.server.tool_calls import PLAIN, AnswerParser, blocks

HELLO = [{"role": "user", "content": "Where?"}]
DRAWN = {"temperature": 1.0, "seed": 5}


class Place(BaseModel):
    name: str = Field(max_length=8)
    kind: str = Field(pattern="^(town|river)$")


class Tour(BaseModel):
    places: list[Place] = Field(max_length=2)


@pytest.fixture
def openai_client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_of_openai_parses_what_it_asks_for(openai_client: openai.OpenAI) -> None:
    found = openai_client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Tour, max_tokens=300, **DRAWN
    )  # type: ignore[call-overload]
    assert isinstance(found.choices[0].message.parsed, Tour)
    assert found.choices[0].finish_reason == "stop"


def test_the_client_of_openai_streams_what_it_asks_for(openai_client: openai.OpenAI) -> None:
    with openai_client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Tour, max_tokens=300, **DRAWN
    ) as stream:  # type: ignore[call-overload]
        stream.until_done()
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Tour)


def test_json_mode_is_an_object_in_every_sample(openai_client: openai.OpenAI) -> None:
    found = openai_client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        response_format={"type": "json_object"},
        max_tokens=400,
        n=3,
        temperature=1.0,
        seed=1,
    )  # type: ignore[call-overload]
    for choice in found.choices:
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"[a-f]{4}-\d\d"}, r"[a-f]{4}-\d\d"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "a" [0-9] [0-9]'}, r"a\d\d"),
        ({"json": {"enum": [True, 12]}}, "true|12"),
    ],
)
def test_other_forms_are_given_as_of_vllm(client: httpx.Client, outputs: dict, pattern: str) -> None:
    asked = {"structured_outputs": outputs, **DRAWN}
    for route, prompt in (("completions", {"prompt": "Once"}), ("chat/completions", {"messages": HELLO})):
        response = client.post(f"/v1/{route}", json={**prompt, **asked, "max_tokens": 20, "sparsity": "dense"})
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_required_calls_have_arguments_of_their_schemas(alone: kvsift.LLM, choice: object) -> None:
    """With references within the schema of a tool."""
    find = {"type": "function", "function": {"name": "find", "parameters": Tour.model_json_schema()}}
    stop = {"type": "function", "function": {"name": "stop"}}
    body = {"messages": HELLO, "tools": [find, stop], "tool_choice": choice, "parallel_tool_calls": False}
    request = parse(ChatRequest, json.dumps(body).encode())
    names = set()
    for seed in range(12):
        grammar, sampling = kvsift.Grammar(**(request.grammar or {})), kvsift.Sampling(1.0, seed=seed)
        answer = alone.generate("Once", grammar=grammar, sampling=sampling, max_new_tokens=400)
        if answer.finish_reason == "stop":
            calls = blocks(parser_of(request, PLAIN, ServerJob(1, AnswerRequest())).feed(answer.text, True))
            assert {call.kind for call in calls} == {"call"}
            assert len(calls) == 1
            assert all(Tour.model_validate_json(call.text) for call in calls if call.name == "find")
            names |= {call.name for call in calls}
    assert names == ({"find", "stop"} if choice == "required" else {"find"})


def test_beside_tools_an_answer_is_calls_or_json_of_its_schema(alone: kvsift.LLM) -> None:
    """Both come, streamed in pieces too; the schema of each has references within."""
    find = {"type": "function", "function": {"name": "find", "parameters": Tour.model_json_schema()}}
    named = {"type": "json_schema", "json_schema": {"name": "tour", "schema": Tour.model_json_schema()}}
    request = parse(ChatRequest, json.dumps({"messages": HELLO, "tools": [find], "response_format": named}).encode())
    kinds = set()
    for seed in range(16):
        grammar, sampling = kvsift.Grammar(**(request.grammar or {})), kvsift.Sampling(1.0, seed=seed)
        answer = alone.generate("Once", grammar=grammar, sampling=sampling, max_new_tokens=400)
        if answer.finish_reason != "stop":
            continue
        whole, pieces = (parser_of(request, PLAIN, ServerJob(1, AnswerRequest())) for _ in range(2))
        found = blocks(whole.feed(answer.text, True))
        parts = [part for place, text in enumerate(answer.text) for part in pieces.feed(text, False)]
        assert blocks(parts + pieces.feed("", True)) == found
        for block in found:
            assert Tour.model_validate_json(block.text)
        kinds |= {(block.kind, block.name) for block in found}
    assert kinds == {("call", "find"), ("content", "")}


def test_a_list_that_looks_like_calls_is_an_answer_unless_it_names_a_tool() -> None:
    def kinds(text: str) -> list[tuple[str, str]]:
        return [
            (block.kind, block.text) for block in blocks(AnswerParser(PLAIN, "json-list", {"f": {}}).feed(text, True))
        ]

    for text in ('[{"name": "g", "arguments": {}}]', '[{"name": "f"}]', '{"name": "f", "arguments": {}}', "[]", "[1]"):
        assert kinds(text) == [("content", text)]
    assert kinds('[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]') == [
        ("call", '{"a": 1}'),
        ("call", "{}"),
    ]


def test_tools_beside_other_formats_are_refused(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields, said in (
        ({"structured_outputs": {"regex": "a"}}, "of no other format"),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "asks for a call"),
    ):
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "tools": tools, **fields})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


def test_a_schema_that_cannot_be_compiled_is_refused_by_its_keyword(client: httpx.Client) -> None:
    outputs = {"json": {"type": "array", "uniqueItems": True}}
    response = client.post("/v1/completions", json={"prompt": "Once", "structured_outputs": outputs})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_prompt"
    assert "uniqueItems" in response.json()["error"]["message"]


def test_an_answer_under_a_grammar_streams_beside_others(client: httpx.Client) -> None:
    asked = {"prompt": "Once", "structured_outputs": {"regex": "[a-d]{30}"}, "max_tokens": 40, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as response:
        text = "".join(choice["text"] for chunk in events(response) for choice in chunk["choices"])
    assert re.fullmatch("[a-d]{30}", text)


def test_penalties_bias_and_top_k_change_an_answer(client: httpx.Client) -> None:
    def tokens(**fields: object) -> list[str]:
        asked = {"prompt": "Once", "max_tokens": 24, "logprobs": 0, **fields}
        response = client.post("/v1/completions", json=asked)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["logprobs"]["tokens"]

    assert tokens(logit_bias={"70": 100}) == tokens(logit_bias={"70": 100}, repetition_penalty=1.0)
    assert len(set(tokens(logit_bias={"70": 100}))) == 1
    assert len(set(tokens(frequency_penalty=2, presence_penalty=2))) > len(set(tokens()))
    assert tokens(temperature=5, top_k=1) == tokens(temperature=5, min_p=1.0) == tokens()
