"""Tokens of vLLM with the plugin, against kvsift's own engine and against vLLM without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsift.checkpoint import embedding_sample
from kvsift.methods.common.anchors import AnchorMap, Reuse, write

NAME = "Qwen3ForCausalLM, 5 layers, 4 heads, (4096, 512) embeddings"  # the embedded model
PLANS = ["quest:budget=112:dense_layers=none", "sketch:budget=72:dense_layers=none", "sketch:budget=96:bits=2", "dense"]
COUNT = 24  # tokens of an answer


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.mark.vllm
def test_a_small_budget_gives_the_tokens_of_the_engine(run, model, texts):
    from kvsift import LLM

    llm = LLM(model, "dense", dtype="float32", device="cpu", probe_every=0)
    expected = {
        plan: [answer.token_ids for answer in llm.generate(texts, plan=plan, max_new_tokens=COUNT)] for plan in PLANS
    }
    assert len({str(answers) for answers in expected.values()}) > 2  # budgets so small change answers
    ids = [llm.tokenizer(text)["input_ids"] for text in texts]
    batch = [[[prompt, plan, COUNT] for prompt in ids] for plan in PLANS]
    alone = [[[prompt, plan, COUNT]] for plan in PLANS[:2] for prompt in ids]
    mixed = [[prompt, PLANS[row % 4], COUNT] for row, prompt in enumerate(ids)]
    default = [[prompt, None, COUNT] for prompt in ids]
    settings = {"plan": PLANS[0], "plans": PLANS[1:]}
    answers = run(settings, [*batch, *alone, mixed, default], max_num_batched_tokens=256)
    for plan, found in zip(PLANS, answers):
        assert tokens_of(found) == expected[plan], plan
    assert [answer["cached"] for answer in answers[0]] == [0] * 8
    assert all(answer["cached"] for answer in answers[1])
    assert [tokens_of(found)[0] for found in answers[4:20]] == [*expected[PLANS[0]], *expected[PLANS[1]]]
    assert tokens_of(answers[20]) == [expected[PLANS[row % 4]][row] for row in range(8)]
    assert tokens_of(answers[21]) == expected[PLANS[0]]


@pytest.fixture(scope="module")
def anchors(model, tmp_path_factory) -> dict[str, Path]:
    """Anchor files by name: of the embedded model, and of others."""
    sample, folder = embedding_sample(model), tmp_path_factory.mktemp("anchors")
    reuse = {2: Reuse(0, (1, 0), 1.0), 4: Reuse(3, (1, 1), 1.0)}
    files = {
        "own": ((0, 1, 3), reuse, sample),
        "of_other_weights": ((0, 1, 3), reuse, [-number for number in sample]),
        "too_deep": ((0, 1, 3, 5, 6), reuse, sample),
        "of_more_heads": ((0, 1, 3), {2: Reuse(0, (1, 0, 2, 3), 1.0)}, sample),
    }
    for name, (layers, reused, numbers) in files.items():
        dense = () if name != "of_more_heads" else (4,)
        write(folder / f"{name}.json", AnchorMap((NAME, numbers), layers, reused, dense, {}))
    return {name: folder / f"{name}.json" for name in files}


@pytest.mark.vllm
def test_layers_reuse_selections_as_in_the_engine(run, model, texts, anchors):
    from kvsift import LLM

    llm = LLM(model, "dense", dtype="float32", device="cpu", probe_every=0)
    own, wider = (f"sketch:budget={n}:dense_layers=none:anchors={anchors['own']}" for n in (72, 96))
    plans = [own, wider, PLANS[0], "dense"]
    expected = [[answer.token_ids for answer in llm.generate(texts, plan=p, max_new_tokens=COUNT)] for p in plans]
    unanchored = [a.token_ids for a in llm.generate(texts, plan=PLANS[1], max_new_tokens=COUNT)]
    assert expected[0] != unanchored  # what is reused changes answers
    ids = [llm.tokenizer(text)["input_ids"] for text in texts]
    batch = [[prompt, own, COUNT] for prompt in ids]
    mixed = [[prompt, plans[(row + turn) % 4], COUNT] for turn in range(4) for row, prompt in enumerate(ids)]
    alone = [[ids[0], own, COUNT]]
    other = [[ids[0], plan, COUNT] for plan in (PLANS[1], f"sketch:dense_layers=none:anchors={anchors['too_deep']}")]
    settings = {"plan": own, "plans": [PLANS[0]], "probe_every": 1}
    answers = run(settings, [batch, mixed, alone, *([each] for each in other)], max_num_batched_tokens=256)
    assert tokens_of(answers[0]) == expected[0]
    assert tokens_of(answers[1]) == [expected[(row + turn) % 4][row] for turn in range(4) for row in range(8)]
    assert tokens_of(answers[2]) == expected[0][:1]
    for [refused] in answers[3:]:
        assert "selects in other layers than the plans that this server was started with" in refused["error"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "engine", "message"),
    [
        ("of_other_weights", {}, "is for another model"),
        ("too_deep", {}, "is for a model with layers 5, 6"),
        ("of_more_heads", {}, "maps 4 KV heads, and layers here have 2"),
        ("own", {"pipeline_parallel_size": 2}, "take pipeline_parallel_size=1"),
    ],
)
def test_anchors_that_do_not_fit_are_refused_at_the_start(run, anchors, name, engine, message):
    with pytest.raises(AssertionError, match=message):
        run({"plan": f"sketch:dense_layers=none:anchors={anchors[name]}"}, [[[[5, 6, 7], None, 1]]], **engine)


@pytest.mark.vllm
@pytest.mark.parametrize("chunk", [1024, 192], ids=["whole", "chunked"])
def test_a_covering_budget_is_stock_vllm(run, model, texts, chunk):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    cold = [[prompt, None, COUNT] for prompt in ids]
    staggered = [[prompt, None, 4 + 7 * row] for row, prompt in enumerate(reversed(ids))]  # prefill beside decode
    rounds = [cold, cold, staggered, cold[:1]]
    stock = run(None, rounds, max_num_batched_tokens=chunk)
    assert run({"plan": "sketch:budget=4096"}, rounds, max_num_batched_tokens=chunk) == stock
    assert run({"plan": "quest:budget=4096"}, rounds, max_num_batched_tokens=chunk) == stock


@pytest.mark.vllm
def test_a_plan_the_server_was_not_started_for_is_refused(run):
    short = list(range(20, 60))
    rounds = [[[short, plan, 2]] for plan in ("qest:budget=3", "quest:page_size=32", "prefill=quoka", "quest", "dense")]
    *refused, quest, dense = run({"plan": "quest:budget=256"}, rounds)
    assert "did you mean 'quest'" in refused[0][0]["error"]
    assert "not started with them" in refused[1][0]["error"]
    assert "On a CPU vLLM reads prompts densely" in refused[2][0]["error"]
    assert quest == dense


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        ({"plan": "quest", "bugdet": 3}, {}, "unknown key of kvsift 'bugdet'"),
        ({"plan": "quest:page_size=64"}, {"block_size": 32}, "Take page_size=16"),
        ({"plan": "quest"}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
        ({"plan": "magicpig"}, {}, "cannot run under vLLM"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(run, settings, engine, message):
    with pytest.raises(AssertionError, match=message):
        run(settings, [[[[5, 6, 7], None, 1]]], **engine)
