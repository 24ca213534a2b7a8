"""StreamingLLM is attention under a lambda-shaped mask: the first tokens and the last ones, for every query alike."""

from __future__ import annotations

import torch
from contracts.checks import masked_attention
from contracts.harness import Runner, draw_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.runtime.budget import Budget
from kvsift.runtime.plan import Plan, Rule


def lambda_mask(length: int, sinks: int, tokens: int) -> Tensor:
    """bool [length, length]: query i sees the first ``sinks`` tokens and the last ``tokens - sinks`` up to itself."""
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    return (key <= query) & ((key < sinks) | (key > query - (tokens - sinks)))


def run(phase: str, budget: Budget, length: int, cuts: list[int], seed: int) -> tuple[Tensor, Runner]:
    rule = Rule(StreamingLLM(), budget)
    runner = Runner(Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule))
    prompt = length if phase == "prefill" else 0
    return runner.feed_all(draw_tokens(length, seed), prompt, cuts), runner


@settings(max_examples=40)
@given(
    length=st.integers(1, 700), tokens=st.integers(5, 400), sinks=st.integers(0, 4),
    cuts=st.lists(st.integers(1, 700), max_size=6), seed=st.integers(0, 99),
)  # fmt: skip
def test_prefill_sees_a_lambda_shaped_mask_however_it_is_chunked(
    length: int, tokens: int, sinks: int, cuts: list[int], seed: int
) -> None:
    answer, runner = run("prefill", Budget(tokens=tokens, sinks=sinks, dense_layers=()), length, cuts, seed)
    mask = lambda_mask(length, sinks, tokens)
    torch.testing.assert_close(answer, masked_attention(draw_tokens(length, seed), mask), rtol=1e-4, atol=2e-5)
    assert float(runner.stats.phase("prefill").visible_tokens) == int(mask.sum())


@settings(max_examples=15)
@given(length=st.integers(1, 90), tokens=st.integers(5, 80), sinks=st.integers(0, 4), seed=st.integers(0, 99))
def test_decode_sees_the_same_mask(length: int, tokens: int, sinks: int, seed: int) -> None:
    answer, runner = run("decode", Budget(tokens=tokens, sinks=sinks, dense_layers=()), length, [], seed)
    mask = lambda_mask(length, sinks, tokens)
    torch.testing.assert_close(answer, masked_attention(draw_tokens(length, seed), mask), rtol=1e-4, atol=2e-5)
    assert float(runner.stats.phase("decode").visible_tokens) == int(mask.sum())


def test_a_ratio_moves_the_window_along_with_the_context() -> None:
    answer, _ = run("decode", Budget(ratio=0.3, sinks=2, dense_layers=()), 60, [], 0)
    for position in (9, 30, 59):
        mask = lambda_mask(position + 1, 2, -(-3 * (position + 1) // 10))[-1:]
        expected = masked_attention(draw_tokens(60, 0).part(0, position + 1), mask)
        torch.testing.assert_close(answer[:, position : position + 1], expected, rtol=1e-4, atol=2e-5)
