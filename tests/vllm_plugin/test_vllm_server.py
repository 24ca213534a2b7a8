"""kvsift serve --engine vllm, by the official client: many requests, plans of their own, a conversation, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_plugin.serving import Server, serving

PLANS = ["quest:budget=112:dense_layers=none", "sketch:budget=72:dense_layers=none"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REQUESTS, AT_ONCE, COUNT = 200, 8, 8


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    (directory / "template.jinja").write_text(TEMPLATE)
    options = ["--plan", PLANS[0], "--allow-plan", PLANS[1], "--chat-template", str(directory / "template.jinja")]
    with serving(model, directory / "log", options) as running:
        yield running


@pytest.mark.vllm
def test_200_requests_with_plans_of_their_own(server, model, texts):
    import openai

    from kvsift import LLM

    llm = LLM(model, "dense", dtype="float32", device="cpu", probe_every=0)
    plans = [None, PLANS[1], "dense"]
    expected = {
        plan: [answer.text for answer in llm.generate(texts, plan=plan or PLANS[0], max_new_tokens=COUNT)]
        for plan in plans
    }

    async def ask(client: Any, gate: asyncio.Semaphore, number: int) -> tuple[str, str]:
        plan, text = plans[number % 3], number % len(texts)
        extra = {"vllm_xargs": {"kvsift": plan}} if plan else {}
        options = {"model": "embedded", "prompt": texts[text], "max_tokens": COUNT, "temperature": 0}
        async with gate:
            if number % 2:
                answer = await client.completions.create(**options, extra_body=extra)
                return answer.choices[0].text, expected[plan][text]
            stream = await client.completions.create(**options, extra_body=extra, stream=True)
            return "".join([piece.choices[0].text async for piece in stream]), expected[plan][text]

    async def ask_all() -> list[tuple[str, str]]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, gate, number) for number in range(REQUESTS)))

    pairs = asyncio.run(ask_all())
    assert len(pairs) == REQUESTS
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


@pytest.mark.vllm
def test_a_plan_the_server_was_not_started_for_is_a_bad_request(server):
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for plan, message in (("quest:page_size=32", "not started with them"), ("qest", "did you mean 'quest'")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model="embedded", prompt="a", extra_body={"vllm_xargs": {"kvsift": plan}})


@pytest.mark.vllm
def test_a_conversation_is_the_engine_on_the_rendered_prompts(server, model, texts):
    import openai

    from kvsift import LLM

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    llm = LLM(model, PLANS[0], dtype="float32", device="cpu", probe_every=0)
    messages: list[dict[str, str]] = []
    for turn in (texts[3], texts[1], texts[3]):  # the first is asked again in the third
        messages.append({"role": "user", "content": turn})
        extra = {"add_special_tokens": True}
        answer = client.chat.completions.create(
            model="embedded", messages=messages, max_tokens=24, temperature=0, extra_body=extra
        )
        prompt = "".join(message["content"] for message in messages)
        assert answer.choices[0].message.content == llm.generate(prompt, max_new_tokens=24).text
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


@pytest.mark.vllm
def test_metrics_and_log_tell_what_was_seen(server):
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client.completions.create(model="embedded", prompt="The mill. " * 200, max_tokens=16, temperature=0)
    values = server.metrics()
    assert 0 < values["decode_visible_tokens_total"] < values["decode_context_tokens_total"]
    assert values["probes_total"] > 2  # one of 64 steps
    assert 0.3 < values["recovery_total"] / values["probes_total"] < 1
    assert "GiB of page summaries beside" in server.log.read_text()
