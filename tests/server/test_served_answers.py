"""Answers over HTTP are those of ``kvsift.LLM`` alone, whole and in pieces, whoever else asks."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from engine.tiny_directory import text_of
from pydantic import TypeAdapter
from server.serving import PLAN, Served, events, metric, texts, until

import kvsift
from kvsift.server.response_bodies import ChatCompletion, Completion, Error

LONG = text_of(700)


def complete(client: httpx.Client, **body: object) -> dict:
    response = client.post("/v1/completions", json={"max_tokens": 24, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_is_that_of_the_model_alone_with_its_numbers(client: httpx.Client, alone: kvsift.LLM) -> None:
    body, answer = complete(client, prompt=LONG), alone.generate(LONG, max_new_tokens=24)
    end = {"logprobs": None, "finish_reason": answer.finish_reason}
    assert body["choices"] == [{"index": 0, "text": answer.text, **end}]
    usage, sparsity, count = body["usage"], body["usage"]["sparsity"], len(answer.token_ids)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (701, count, 701 + count)
    assert sparsity["density"] == answer.decode("density") < 0.8
    assert sparsity["bytes_read"] == answer.decode("kv_bytes_read") < sparsity["bytes_dense"]
    assert sparsity["plan"] == answer.plan
    assert sparsity["visible_tokens"] == answer.decode("visible_tokens")
    assert sparsity["recovery"] == pytest.approx(answer.decode("recovery"), rel=1e-5)


def test_concurrent_requests_answer_as_alone(server: Served, alone: kvsift.LLM) -> None:
    prompts = [text_of(90 + 83 * number) for number in range(6)]
    plans = [PLAN, "dense", "quest:budget=128"] * 2
    bodies = [
        {"prompt": prompt, "sparsity": plan, "max_tokens": 30, "temperature": 0.9 * (number % 2), "seed": number}
        for number, (prompt, plan) in enumerate(zip(prompts, plans))
    ]

    def ask(body: dict) -> str:
        with server.client() as client:
            return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, bodies))
    for body, answer in zip(bodies, answers):
        sampling = kvsift.Sampling(body["temperature"], seed=body["seed"])
        whole = alone.generate(body["prompt"], plan=body["sparsity"], max_new_tokens=30, sampling=sampling)
        assert answer == whole.text


def test_a_prompt_that_was_read_is_reused_with_the_same_answer(client: httpx.Client) -> None:
    prompt = "Again. " + LONG
    first, second = complete(client, prompt=prompt), complete(client, prompt=prompt)
    assert first["choices"] == second["choices"]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, second)]
    assert cached == [0, 704]
    assert second["usage"]["sparsity"]["reuse"] == {"cached_tokens": 704, "why_not": None}


def test_three_samples_stream_side_by_side(client: httpx.Client, alone: kvsift.LLM) -> None:
    body = {"prompt": "Once", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 20, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = list(events(response))
    whole = alone.generate("Once", n=3, max_new_tokens=20, sampling=kvsift.Sampling(1.0, seed=7))
    assert texts(chunks, 3) == [answer.text for answer in whole]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]


def test_lists_and_token_ids_are_answered_in_their_order(client: httpx.Client, alone: kvsift.LLM) -> None:
    prompts = ["One.", "Two, longer."]
    ids = [alone.tokenizer(prompt)["input_ids"] for prompt in prompts]
    whole = [answer.text for answer in alone.generate(prompts, max_new_tokens=24)]
    for given in (prompts, ids):
        assert [choice["text"] for choice in complete(client, prompt=given)["choices"]] == whole
    assert complete(client, prompt=ids[1])["choices"][0]["text"] == whole[1]


def test_a_stop_that_spans_pieces_is_no_part_of_the_text(client: httpx.Client, alone: kvsift.LLM) -> None:
    text = alone.generate("Stop", max_new_tokens=40).text
    stop = text[11:15]
    before = text[: text.index(stop)]
    body = {"prompt": "Stop", "stop": ["never in it", stop], "max_tokens": 40, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        chunks = list(events(response))
    assert texts(chunks) == [before]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_pieces_never_split_a_character(client: httpx.Client, alone: kvsift.LLM) -> None:
    """The tiny model writes bytes, most of which are parts of characters."""
    body = {"prompt": "Grüße", "temperature": 1.0, "seed": 3, "max_tokens": 200, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        pieces = texts(list(events(response)))
    whole = alone.generate("Grüße", max_new_tokens=200, sampling=kvsift.Sampling(1.0, seed=3)).text
    assert pieces == [whole]
    assert any(ord(character) > 127 and character != "\ufffd" for character in whole)


def test_the_official_client_chats(server: Served, alone: kvsift.LLM) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny", "gpt-4o-mini"]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=16, logprobs=True, top_logprobs=2
    )
    prompt = alone.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, messages[1]], tokenize=False, add_generation_prompt=True
    )
    expected = alone.generate(prompt.removeprefix("<bos>"), max_new_tokens=16, logprobs=2)
    choice = whole.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    values = [token.logprob for token in choice.logprobs.content]
    assert values == pytest.approx([each.logprob for each in expected.logprobs])
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    again = [*messages, choice.message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=4).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="function is missing"):
        client.chat.completions.create(model="tiny", messages=messages, tools=[{"type": "function"}])


def test_logprobs_of_a_completion(client: httpx.Client, alone: kvsift.LLM) -> None:
    logprobs = complete(client, prompt="Count", logprobs=1, max_tokens=5)["choices"][0]["logprobs"]
    expected = alone.generate("Count", max_new_tokens=5, logprobs=1).logprobs
    assert logprobs["token_logprobs"] == pytest.approx([each.logprob for each in expected])
    assert all(len(each) == 1 for each in logprobs["top_logprobs"])
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 5


def test_stop_tokens_and_special_tokens_over_http(client: httpx.Client, alone: kvsift.LLM) -> None:
    expected = alone.generate("Count", max_new_tokens=5)
    last = next(token for token in reversed(expected.token_ids) if token != expected.token_ids[0])
    count = expected.token_ids.index(last)
    stopped = complete(client, prompt="Count", stop_token_ids=[last], skip_special_tokens=True)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == alone.generate("Count", max_new_tokens=count).text
    for body, code, given in (
        ({"stop": "<pad> then"}, "conflict", "'<pad>'"),
        ({"stop_token_ids": [5000]}, "invalid_value", "5000"),
        ({"stop_token_ids": ["<pad>"]}, "invalid_value", "stop_token_ids"),
        ({"skip_special_tokens": 1}, "invalid_value", "skip_special_tokens"),
    ):
        response = client.post("/v1/completions", json={"prompt": "Count", **body})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, code)
        assert given in error["message"]


def test_a_prompt_with_its_bos_is_fed_one_and_the_log_says_so(server: Served, client: httpx.Client) -> None:
    plain = complete(client, prompt="Twice")
    for _ in range(2):
        body = complete(client, prompt="<bos>Twice")
        assert body["choices"] == plain["choices"]
        assert body["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == 6
    assert server.log.read_text().count("the prompt begins with <bos>") == 1


def test_exact_answers_are_those_of_dense_attention(client: httpx.Client, alone: kvsift.LLM) -> None:
    body = {"prompt": "Exact. " + LONG, "max_tokens": 24, "temperature": 0.7, "seed": 5}
    dense = complete(client, **body, sparsity="dense")
    found = complete(client, **body, sparsity={"exact": True})
    assert found["choices"][0]["text"] == dense["choices"][0]["text"]
    [report] = found["usage"]["sparsity"]["exact"]
    assert sum(report["verified"].values()) > 0
    assert "exact" not in dense["usage"]["sparsity"]
    refused = client.post("/v1/completions", json={**body, "sparsity": {"exact": True, "min_recovery": 0.9}})
    assert refused.status_code == 400
    assert "exact" in refused.json()["error"]["message"]


def test_a_guarded_plan_is_made_from_an_allowed_one(client: httpx.Client) -> None:
    sparsity = {"plan": "quest : window=32 : budget=96", "min_recovery": 0.999}
    usage = complete(client, prompt=LONG, sparsity=sparsity, max_tokens=60)["usage"]["sparsity"]
    assert "min_recovery=0.999" in usage["plan"]
    assert usage["guard_events"] > 0


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"prompt": "a", "sparsity": "quest:budget=4096"}, 400, "is not one of this server's: quest:budget=96"),
        ({"prompt": "a", "sparsity": "loki:calibration=/etc/passwd"}, 400, "is not one of this server's"),
        ({"prompt": "a", "sparsity": {"plan": "dense", "min_recovery": 0.5}}, 400, "decodes densely"),
        ({"prompt": text_of(5000)}, 400, "has 5,001 tokens and up to 16 will be generated. To go on"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": [5, 4000]}, 400, "the prompt has token 4000, and the vocabulary 259"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "'gpt-5' is not served here; this server has 'tiny', 'gpt-4o-mini'."),
        ({"prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'"),
    ],
)
def test_what_is_refused_says_why(client: httpx.Client, body: dict, status: int, text: str) -> None:
    response = client.post("/v1/completions", json=body)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert text in response.json()["error"]["message"]
    assert client.post("/v1/completions", json={**body, "stream": True}).status_code == status  # and no stream begins


def test_a_model_is_served_by_all_of_its_names(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "gpt-4o-mini"]
    assert client.get("/v1/models/gpt-4o-mini").json() == listed[1]
    for name in ("tiny", "gpt-4o-mini", None):
        assert complete(client, prompt="a", model=name, max_tokens=1)["model"] == "tiny"


def test_an_overflow_is_worded_as_litellm_recognises_it(client: httpx.Client) -> None:
    """Its fallbacks to models with longer contexts look for this phrase in any case."""
    for prompt in (text_of(5000), "mill " * 2_000_000):
        error = client.post("/v1/completions", json={"prompt": prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")


def test_every_response_has_a_request_id(client: httpx.Client) -> None:
    for path in ("/health", "/v1/nothing", "/v1/models"):
        ids = {client.get(path).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
        assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
        assert client.get(path, headers={"x-request-id": "req_1-a:b"}).headers["x-request-id"] == "req_1-a:b"
        for odd in ("a b", "a" * 129, '"<', ""):
            assert client.get(path, headers={"x-request-id": odd}).headers["x-request-id"] != odd
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"
    assert client.get("/health", headers={"host": "evil.example"}).headers["x-request-id"]


def test_answers_have_the_form_that_the_openapi_document_gives_them(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 1}
    bodies = {
        Completion: complete(client, prompt="Count", logprobs=1, sparsity={"exact": True}),
        ChatCompletion: client.post("/v1/chat/completions", json=chat).json(),
        Error: client.post("/v1/completions", json={}).json(),
    }
    for form, body in bodies.items():
        TypeAdapter(form).validate_python(body)


def test_metrics_count_tokens_and_refusals(client: httpx.Client) -> None:
    before = client.get("/metrics").text
    complete(client, prompt="a b c", max_tokens=7)
    client.post("/v1/completions", json={"prompt": ""})
    after = client.get("/metrics").text
    grown = {name: metric(after, name) - metric(before, name) for name in (
        'kvsift_tokens_total{kind="prompt"}', 'kvsift_tokens_total{kind="generated"}',
        'kvsift_responses_total{route="/v1/completions",status="200"}',
        'kvsift_responses_total{route="/v1/completions",status="400"}', "kvsift_ttft_seconds_count",
    )}  # fmt: skip
    assert list(grown.values()) == [6, 7, 1, 1, 1]
    assert metric(after, "kvsift_requests_running") == metric(after, "kvsift_requests_waiting") == 0


def test_prompts_share_with_those_of_the_same_cache_key_alone(client: httpx.Client) -> None:
    prompt, cached = "Shared. " + LONG, []
    for key in ("a", "b", "a", None):
        usage = complete(client, prompt=prompt, prompt_cache_key=key, max_tokens=2)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 704, 0]


def test_users_behind_one_address_have_equal_shares(server: Served) -> None:
    """Ada asks for thirty answers before Bob asks for one, which is not the last."""
    ended: list[str] = []

    def ask(user: str) -> None:
        with server.client() as client:
            complete(client, prompt=text_of(300), user=user, max_tokens=400, prompt_cache_key=f"{user} {len(ended)}")
        ended.append(user)

    with ThreadPoolExecutor(31) as pool, server.client() as client:
        for _ in range(30):
            pool.submit(ask, "Ada")
        until(lambda: metric(client.get("/metrics").text, "kvsift_requests_waiting") > 10)
        pool.submit(ask, "Bob").result()
        waiting = metric(client.get("/metrics").text, "kvsift_requests_waiting")
    assert waiting > 0  # Bob would be last without a turn of his own
    assert sorted(ended) == ["Ada"] * 30 + ["Bob"]


def test_metrics_have_sequences_and_pages(client: httpx.Client) -> None:
    complete(client, prompt="Pages. " + LONG)

    def counts() -> tuple[float, ...]:
        text = client.get("/metrics").text
        pages = (f'kvsift_pages{{owner="{owner}"}}' for owner in ("unshared", "kept", "free"))
        return tuple(metric(text, kind) for kind in ("kvsift_sequences", *pages))

    until(lambda: counts()[:2] == (0, 0) and counts()[2] >= 704 // 16)
    assert counts()[3] > 0


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenised(client: httpx.Client) -> None:
    started = time.monotonic()
    chat = {"messages": [{"role": "user", "content": "mill " * 2_000_000}]}
    for route, body in (("completions", {"prompt": "mill " * 2_000_000}), ("chat/completions", chat)):
        response = client.post(f"/v1/{route}", json=body)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "characters" in response.json()["error"]["message"]
    assert time.monotonic() - started < 10


def test_other_routes_answer(client: httpx.Client) -> None:
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/health").json() == {"status": "ready"}
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 4096
    lost = client.get("/v1/nothing")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
    assert client.get("/v1/completions").status_code == 405
    assert client.options("/v1/documents").headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize("most", [0, 3])
def test_an_echo_scores_the_prompt_as_the_model_does(client: httpx.Client, alone: kvsift.LLM, most: int) -> None:
    """Beside a long prompt that shares chunks with it, and in pieces."""
    prompt = text_of(200) + " é?"
    asked = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": most, "sparsity": "dense"}
    complete(client, prompt=prompt, sparsity="dense")
    body = complete(client, **asked)
    [choice], ids = body["choices"], alone.encode(prompt)
    scores = choice["logprobs"]
    assert choice["text"] == prompt + alone.generate(prompt, plan="dense", max_new_tokens=most).text if most else prompt
    assert body["usage"]["completion_tokens"] == most
    assert len(scores["tokens"]) == len(ids) + most
    with torch.inference_mode():
        logits = alone.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = logits.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).flatten().tolist()
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
    assert [max(top.values()) for top in scores["top_logprobs"][1 : len(ids)]] == pytest.approx(
        logits.amax(-1).tolist(), abs=1e-3
    )
    texts_at = [choice["text"][offset:] for offset in scores["text_offset"]]
    assert all(found.startswith(token) for found, token in zip(texts_at, scores["tokens"]) if token.isascii() and
               not token.startswith(("bytes:", "<")))  # fmt: skip
    with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        assert texts(list(events(response)), 1) == [choice["text"]]


def test_an_answer_goes_on_with_the_last_message(client: httpx.Client, alone: kvsift.LLM) -> None:
    messages = [{"role": "user", "content": "Once?"}, {"role": "assistant", "content": "There was"}]
    asked = {"messages": messages, "max_tokens": 8, "continue_final_message": True, "add_generation_prompt": False}
    [choice] = client.post("/v1/chat/completions", json=asked).json()["choices"]
    text = alone.generate("[user] Once?\n[assistant] There was", max_new_tokens=8).text
    assert choice["message"]["content"] == text
