"""Bodies of requests, plans by name, answers in OpenAI's form, and the door; without any process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from server.fake_worker import USAGE

from kvsift.errors import InputError
from kvsift.server.answers import AnswerForm, failure
from kvsift.server.api_errors import ApiError
from kvsift.server.app import build
from kvsift.server.door import host_name
from kvsift.server.jobs import ServerJob
from kvsift.server.openapi import description
from kvsift.server.plan_list import PlanList, spelling
from kvsift.server.schemas import ChatRequest, CompletionRequest, parse
from kvsift.server.settings import ServerSettings, check_exposure, read_keys

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
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", ""),
        ({"sparsity": "x" * 500}, "sparsity", "at most 400"),
    ],
)
def test_other_fields_are_refused_by_name(fields: dict, param: str | None, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert text in refused.value.message


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_are_texts_or_tokens(prompt: object, prompts: list) -> None:
    assert completion(prompt=prompt).message() == {"prompts": prompts, "max_tokens": 16}


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [1, "a"], [-1], [True], {"a": 1}, None, ["a"] * 65])
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ApiError, match=r"prompt|65 answers"):
        completion(prompt=prompt)


def test_plans_are_compared_as_texts() -> None:
    plans = PlanList(["quest:budget=96:window=32", "dense"], ["decode=quest:budget=96:sinks=4:window=32", "dense"])
    assert [plans.index(plan) for plan in (None, "quest:window=32:budget=96", " quest: budget=96:window=32 ")] == [
        0
    ] * 3
    assert plans.index("decode=quest:budget=96:sinks=4:window=32") == 0
    assert plans.index("dense") == 1
    for other in ("quest", "quest:budget=97:window=32", "loki:calibration=/etc/passwd", "", "dense,dense"):
        with pytest.raises(ApiError, match="is not one of this server's: quest:budget=96:window=32; dense"):
            plans.index(other)
    auto = PlanList(["auto", "dense"], ["quest:budget=96", "dense"])
    assert auto.names == ["quest:budget=96", "dense"]
    assert [auto.index(plan) for plan in ("auto", "quest:budget=96", None)] == [0] * 3
    with pytest.raises(ApiError, match="is not one of this server's"):
        plans.index("auto")
    assert spelling("decode=quest:b=2:a=1, prefill=dense") == spelling("prefill=dense,decode=quest:a=1:b=2")


def job_of() -> ServerJob:
    """A request that a step has begun and another has ended."""
    job = ServerJob(1, {}, 1)
    job.accept([3])
    job.add({"index": 0, "read": 3, "tokens": [[5, "Grüß", [["Grüß", list("Grüß".encode()), -0.5, 0, [GRUESS]]]]]})
    return job


GRUESS = ["Grüß", list("Grüß".encode()), -0.5, 5]
GOTT = [[" Gott", list(b" Gott"), -1.0, 4, [["!", [33], -0.9, 7], ["!", [33], -1.5, 8]]]]
END = {"index": 0, "tokens": [[6, " Gott", GOTT]], "finish": "length", "usage": USAGE}


def test_the_transcript_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.server.answers.time", lambda: 1_700_000_000)
    form = AnswerForm(chat(stream=True, stream_options={"include_usage": True}), "tiny")
    form._id = "chatcmpl-1"
    job = job_of()
    data = form.chunks(job)
    job.add(END)
    data += form.chunks(job) + form.last(job)
    head = (
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
        '"system_fingerprint":"kvsift-0.1.0","choices":['
    )
    assert data.decode() == (
        head + '{"index":0,"delta":{"role":"assistant","content":"Gr\\u00fc\\u00df"},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        + head + '{"index":0,"delta":{"content":" Gott"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        + head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
        + head + '],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":'
        '{"cached_tokens":0},"sparsity":{"plan":"dense","density":1.0,"visible_tokens":4.0,"recovery":null,'
        '"bytes_read":8,"bytes_dense":8,"guard_events":0,"reuse":{"cached_tokens":0,"why_not":null}}}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


def test_every_event_has_the_tokens_so_far_if_guidellm_asks_for_them() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    form, job = AnswerForm(completion(stream=True, stream_options=options), "tiny"), job_of()
    data = form.chunks(job)
    job.add(END)
    data += form.chunks(job) + form.last(job)
    usages = [json.loads(line[6:])["usage"] for line in data.decode().split("\n\n")[:-2]]
    counts = [(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) for usage in usages]
    assert counts == [(3, 1, 4), (3, 2, 5), (3, 2, 5), (3, 2, 5)]
    assert ["sparsity" in usage for usage in usages] == [False, False, False, True]


def test_the_transcript_of_two_samples_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has ended, the other has begun; no usage is asked for."""
    monkeypatch.setattr("kvsift.server.answers.time", lambda: 1_700_000_000)
    form, job = AnswerForm(completion(stream=True, n=2, temperature=1.0), "tiny"), ServerJob(1, {}, 2)
    form._id = "cmpl-1"
    job.accept([3])
    job.add({"index": 1, "read": 3, "tokens": [[5, "one", None]], "finish": "stop", "usage": USAGE})
    job.add({"index": 0, "tokens": [[6, "two", None]]})
    data = form.chunks(job)
    job.fail(ApiError(500, "lost.", "engine_lost"))
    assert job.error is not None
    data += form.chunks(job) + failure(job.error)
    head = (
        'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"tiny",'
        '"system_fingerprint":"kvsift-0.1.0","choices":['
    )
    assert data.decode() == (
        head + '{"index":0,"text":"two","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":1,"text":"one","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":1,"text":"","logprobs":null,"finish_reason":"stop"}]}\n\n'
        'data: {"error":{"message":"lost.","type":"server_error","param":null,"code":"engine_lost"}}\n\n'
    )  # fmt: skip


def test_logprobs_in_both_forms() -> None:
    job = job_of()
    job.add(END)
    [choice] = AnswerForm(completion(logprobs=1), "tiny").whole(job)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Grüß", " Gott"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"Grüß": -0.5}, {"!": -0.9, "token_id:8": -1.5}],
        "text_offset": [0, 4],
    }
    job = job_of()
    job.add(END)
    [choice] = AnswerForm(chat(logprobs=True, top_logprobs=1), "tiny").whole(job)["choices"]
    assert choice["logprobs"]["content"][1] == {
        "token": " Gott", "logprob": -1.0, "bytes": list(b" Gott"),
        "top_logprobs": [{"token": "!", "logprob": value, "bytes": [33]} for value in (-0.9, -1.5)],
    }  # fmt: skip


def test_text_that_nobody_takes_is_one_piece() -> None:
    job = job_of()
    for token in range(1000):
        job.add({"index": 0, "tokens": [[token, "x", None]]})
    [piece] = job.take()
    assert piece.text == "Grüß" + "x" * 1000
    assert job.take() == []


def test_a_job_is_submitted_again_with_what_was_sent() -> None:
    job = ServerJob(7, {"n": 2}, 2)
    job.add({"index": 0, "tokens": [[5, "a", None], [None, "", None]], "finish": "stop", "usage": USAGE})
    job.add({"index": 1, "tokens": [[6, "b", None]]})
    assert job.message() == {"op": "submit", "id": 7, "n": 2, "sent": {0: [5], 1: [6]}, "ended": [0]}


@pytest.mark.parametrize(
    ("host", "name"), [("[::1]:80", "::1"), ("LocalHost:80", "localhost"), ("10.0.0.1", "10.0.0.1"), ("", ""),
     ("localhost:80@evil.com", ""), ("[::1]evil", ""), ("[::1", ""), ("a b", ""), ("localhost:", "localhost")],
)  # fmt: skip
def test_names_of_hosts(host: str, name: str) -> None:
    assert host_name(host) == name


def answers(settings: ServerSettings, *requests: tuple[str, str, dict]) -> list[httpx.Response]:
    """Responses of a server whose engine is not started."""
    app, _ = build(settings)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [await client.request(method, path, headers=headers) for method, path, headers in requests]

    return asyncio.run(ask())


def test_a_server_that_loads_says_so() -> None:
    health, models, text, page = answers(
        ServerSettings(),
        ("GET", "/health", {}),
        ("GET", "/v1/models", {}),
        ("POST", "/v1/completions", {}),
        ("GET", "/", {}),
    )
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    for response in (models, text):
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["code"] == "server_loading"
    assert page.status_code == 200  # it waits by itself


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LOCALHOST:80", 200), ("192.168.0.7:80", 200), ("[fe80::1]", 200), ("mine.example", 200),
     ("localhost:80@evil.com", 403), ("[::1]evil", 403), ("evil.example", 403),
     ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403)],
)  # fmt: skip
def test_host_headers(host: str, status: int) -> None:
    [response] = answers(ServerSettings(hosts=["Mine.example"]), ("GET", "/metrics", {"host": host}))
    assert response.status_code == status


def test_browsers_elsewhere_are_let_in_by_name() -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    wanted = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"  # OpenAI's client
    preflight = ("OPTIONS", "/v1/completions", {**asked, "access-control-request-headers": wanted})
    [closed] = answers(ServerSettings(), preflight)
    foreign = (*preflight[:2], {**preflight[2], "origin": "https://x.y"})
    opened, used, other, refused = answers(
        ServerSettings(origins=["https://app.example"], keys=["k"]),
        preflight,
        ("GET", "/metrics", {"origin": "https://app.example"}),
        ("GET", "/metrics", {"origin": "https://x.y"}),
        foreign,
    )
    assert "access-control-allow-origin" not in closed.headers
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-origin"] == "https://app.example"
    assert opened.headers["access-control-allow-headers"] == wanted
    assert used.headers["access-control-expose-headers"] == "retry-after, x-request-id"
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    assert other.status_code == 401
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(("host", "keys", "is_open", "is_refused"), [
    ("127.0.0.1", [], False, False), ("::1", [], False, False), ("localhost", [], False, False),
    ("0.0.0.0", [], False, True), ("", [], False, True), ("example.org", [], False, True),
    ("0.0.0.0", ["k"], False, False), ("0.0.0.0", [], True, False),
])  # fmt: skip
def test_other_machines_need_a_key(host: str, keys: list, is_open: bool, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(InputError, match="there is no API key"):
            check_exposure(host, keys, is_open)
    else:
        check_exposure(host, keys, is_open)


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
    assert chat(messages=messages).message()["messages"] == [*HELLO, said, *HELLO]


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], [1] * 1000, None])
def test_content_that_is_no_text_is_refused_as_such(content: object) -> None:
    with pytest.raises(ApiError, match="the content of a message is text"):
        chat(messages=[{"role": "user", "content": content}])


def test_a_wrong_field_of_sparsity_is_named() -> None:
    with pytest.raises(ApiError, match="greater than 0"):
        chat(sparsity={"min_recovery": 0})


def test_keys_of_a_file_with_a_mark_and_any_letters_let_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufefffirst\r\n\n# of Anna\n  #x\n \nschlüssel#1\n".encode())
    settings = ServerSettings(keys=read_keys(file, {}))
    keys = "first", "schlüssel#1", "x", "# of Anna", "#x", "#"
    asked = [("GET", "/v1/models", {"authorization": f"Bearer {key}".encode()}) for key in keys]
    statuses = [response.status_code for response in answers(settings, *asked)]
    assert statuses == [503, 503, 401, 401, 401, 401]  # nothing is loaded


def test_a_key_file_of_comments_alone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n\n")
    with pytest.raises(InputError, match="has no key"):
        read_keys(file, {})


def test_the_description_names_every_field_of_a_request() -> None:
    schemas = description()["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
    references = set(json.dumps(description()).split('"#/components/schemas/')[1:])
    assert {reference.partition('"')[0] for reference in references} <= set(schemas)


def test_the_server_process_loads_neither_torch_nor_transformers() -> None:
    code = "import kvsift.server.run, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_sample_is_that_of_the_embedded_model() -> None:
    asked = "GET", "/v1/sample", {}
    [embedded] = answers(ServerSettings(), asked)
    assert embedded.status_code == 200
    assert set(embedded.json()) == {"name", "text", "questions", "about"}
    [other] = answers(ServerSettings(model={"model": "elsewhere"}), asked)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "no_sample")
