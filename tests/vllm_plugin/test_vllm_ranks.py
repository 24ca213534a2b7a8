"""Tensor parallelism: ranks that share the heads give the tokens of one, on one machine and on two nodes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from vllm_plugin.serving import free_port, process, serving
from vllm_plugin.test_vllm_tokens import COUNT, PLANS

RANKS = ["--tensor-parallel-size", "2"]


@pytest.mark.vllm
def test_two_ranks_give_the_tokens_of_one(run, model, texts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    rounds = [[[prompt, PLANS[(row + turn) % 4], COUNT] for row, prompt in enumerate(ids)] for turn in range(2)]
    settings = {"plan": PLANS[0], "plans": PLANS[1:]}
    one, two = (run(settings, rounds, tensor_parallel_size=size) for size in (1, 2))
    for first, second in zip(one, two):
        for row, (answer, other) in enumerate(zip(first, second)):
            assert answer["tokens"] == other["tokens"], row
            assert answer["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3), row
    assert [answer["tokens"] for answer in one[0]] != [answer["tokens"] for answer in one[1]]  # plans matter


@pytest.mark.vllm
def test_two_nodes_serve_the_tokens_of_the_engine(model, texts, tmp_path):
    import openai

    from kvsift import LLM

    llm = LLM(model, PLANS[0], dtype="float32", device="cpu", probe_every=0)
    nodes = [*RANKS, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    options = ["--plan", PLANS[0], "--allow-plan", "dense", *nodes]
    with ExitStack() as stack:
        stack.enter_context(process(model, tmp_path / "node", [*options, "--node-rank", "1", "--headless"]))
        server = stack.enter_context(serving(model, tmp_path / "log", [*options, "--node-rank", "0"]))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for plan in (PLANS[0], "dense"):
            answer = client.completions.create(
                model="embedded", prompt=texts[2], max_tokens=COUNT, temperature=0, extra_body={
                    "vllm_xargs": {"kvsift": plan}
                },
            )  # fmt: skip
            assert answer.choices[0].text == llm.generate(texts[2], plan=plan, max_new_tokens=COUNT).text
        client.completions.create(model="embedded", prompt=texts[0], max_tokens=2, temperature=0)  # exports the others
        values = server.metrics()
    assert values["decode_queries_total"] == 2 * (COUNT - 1) * 5  # of the first rank alone: 5 layers, no first tokens
    assert 0 < values["decode_visible_tokens_total"] < values["decode_context_tokens_total"]
