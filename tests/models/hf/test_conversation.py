"""A cache that is kept between turns: what it holds is what the same tokens leave, however they came in."""

from itertools import pairwise

import pytest
import torch
from models.tiny import CACHED, SPARSE, VERSION, assert_sparse, empty_cache, fed, greedy, logits, prompt, tiny

import kvsift
from kvsift.methods.base import Phase
from kvsift.models.hf.sparse import feeding

families = pytest.mark.parametrize("family", CACHED)
QUESTION = prompt(25, seed=4)


@families
def test_an_explicit_cache_gives_the_tokens_and_counts_of_the_context_manager(family: str) -> None:
    model = tiny(family)
    with kvsift.sparse(model, SPARSE) as run:
        expected = greedy(model, prompt())
    cache = kvsift.make_cache(model, SPARSE)
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)
    counts = [
        [(row["layer"], row["phase"], row["queries"], row["visible_tokens"]) for row in report["layers"]]
        for report in (run.report(), cache.run.report())
    ]
    assert counts[0] == counts[1]
    assert_sparse(cache.run)


@families
@pytest.mark.parametrize("kept_by", ["make_cache", "sparse"])
def test_a_second_turn_continues_from_what_the_first_one_left(family: str, kept_by: str) -> None:
    model = tiny(family)
    if kept_by == "make_cache":
        cache = kvsift.make_cache(model, SPARSE)
        reply = greedy(model, prompt(), past_key_values=cache)
        full = torch.cat([prompt(), reply, QUESTION], 1)
        answer = greedy(model, full, past_key_values=cache)
    else:
        with kvsift.sparse(model, SPARSE):
            cache = empty_cache(model)
            reply = greedy(model, prompt(), past_key_values=cache)
            full = torch.cat([prompt(), reply, QUESTION], 1)
            answer = greedy(model, full, past_key_values=cache)
    # by hand: the prompt, every generated token but the last, which no forward pass has seen, then it and the question
    # but for its last two tokens: one alone would count as generated
    by_hand = fed(model, prompt(), *reply[:, :-1].split(1, dim=1), full[:, 159:-2])
    assert torch.equal(greedy(model, full, past_key_values=by_hand), answer)


@pytest.mark.skipif(VERSION < (5, 21), reason="until 5.21 transformers prefills everything again; we refuse")
@families
def test_chunked_prefill_of_a_second_turn_changes_no_token(family: str) -> None:
    model = tiny(family)
    text = torch.cat([prompt(), QUESTION], 1)
    with kvsift.sparse(model, SPARSE):
        answers = []
        for options in ({}, {"prefill_chunk_size": 8}, {"prefill_chunk_size": 24}):  # 24 leaves one token
            cache = empty_cache(model)
            logits(model, prompt(), past_key_values=cache)
            answers.append(greedy(model, text, past_key_values=cache, **options))
            assert cache.get_seq_length() == 175 + 9
    assert torch.equal(answers[1], answers[0])
    assert torch.equal(answers[2], answers[0])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@families
def test_what_a_token_counts_as_can_be_said_and_does_not_depend_on_how_many_come_at_once(
    family: str, phase: Phase
) -> None:
    model = tiny(family)
    answers = []
    for sizes in ([20], [1] * 20):
        cache = fed(model, prompt()[:, :130])
        cache.stats.clear()
        with feeding(cache, phase):
            pieces = prompt()[:, 130:].split(sizes, dim=1)
            answers.append(torch.cat([logits(model, piece, past_key_values=cache) for piece in pieces], 1))
        assert {row["phase"] for row in cache.run.report()["layers"]} == {phase}
    torch.testing.assert_close(*answers, atol=2e-5, rtol=1e-4)


def test_a_cache_crosses_between_inference_mode_and_no_grad() -> None:
    model = tiny()
    expected, cache = kvsift.make_cache(model, SPARSE), kvsift.make_cache(model, SPARSE)
    texts = [prompt()]
    for _ in range(3):
        texts.append(torch.cat([texts[-1], greedy(model, texts[-1], past_key_values=expected), QUESTION], 1))
    for turn, (text, following) in enumerate(pairwise(texts)):
        with torch.inference_mode(turn % 2 == 1):
            tokens = greedy(model, text, past_key_values=cache)
        assert torch.equal(tokens, following[:, text.shape[1] : -25])


def test_conversations_that_take_turns_do_not_hear_each_other() -> None:
    model = tiny()
    caches = [kvsift.make_cache(model, SPARSE), kvsift.make_cache(model, "streaming_llm:budget=40:dense_layers=none")]
    texts = [prompt(150, seed=row) for row in range(2)]
    for _ in range(3):
        for row in range(2):
            texts[row] = torch.cat([texts[row], greedy(model, texts[row], past_key_values=caches[row])], 1)
    for row, plan in enumerate([SPARSE, "streaming_llm:budget=40:dense_layers=none"]):
        cache, text = kvsift.make_cache(model, plan), prompt(150, seed=row)
        for _ in range(3):
            text = torch.cat([text, greedy(model, text, past_key_values=cache)], 1)
        assert torch.equal(text, texts[row])
