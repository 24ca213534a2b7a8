"""SampleAttention, KeyDiff, SparQ, Loki and LessIsMore: each against its formula."""

from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Asked, Runner, Stack, Tokens, draw_tokens, spy
from torch import Tensor

from kvsift.methods.base import Method
from kvsift.methods.common.softmax_share import mean_shares
from kvsift.methods.keydiff import KeyDiff, unlike_mean
from kvsift.methods.less_is_more import LessIsMore
from kvsift.methods.loki import Loki, principal_axes
from kvsift.methods.sample_attention import SampleAttention, sampled
from kvsift.methods.sparq import SparQ
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule

BUDGET = Budget(tokens=30, sinks=4, window=6, dense_layers=())


def asked_of(method: Method, tokens: Tokens, budget: Budget = BUDGET) -> list[Asked]:
    asked = spy(method)
    Runner(Plan(prefill=Rule(method, budget))).feed(tokens)
    return asked


def check_best(asked: list[Asked], shares: Any) -> None:
    """``shares(question)`` [num_heads, num_keys] ranks as the method did."""
    assert len(asked) == 4
    for question in asked:
        best = shares(question)[:, question.candidates.tokens].topk(question.limit.units).indices
        assert torch.equal(question.selection.units, best.sort(-1).values + question.candidates.first)


def softmax_shares(queries: Tensor, tokens: Tokens, stop: int, scale: float | Tensor = SHAPE.scale) -> Tensor:
    """Mean over queries and heads of a group of softmax(scale * q.k) over the first keys, [num_kv_heads, stop]."""
    keys = tokens.keys[:, :stop].double().repeat_interleave(SHAPE.group_size, 0)
    weights = (queries.double() @ keys.mT * scale).softmax(-1).mean(1)
    return weights.unflatten(0, (SHAPE.num_kv_heads, -1)).mean(1)


def asking(tokens: Tokens, question: Asked) -> Tensor:
    return tokens.queries[:, question.start : question.start + question.num_queries]


def test_shares_do_not_depend_on_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = draw_tokens(60, 0)
    whole = mean_shares(SHAPE, tokens.queries, tokens.keys)
    monkeypatch.setattr("kvsift.methods.common.softmax_share.MAX_SCORES", 60 * 4 * 7)
    torch.testing.assert_close(mean_shares(SHAPE, tokens.queries, tokens.keys), whole)


def test_soft_capped_logits_make_soft_capped_shares() -> None:
    tokens, shape = draw_tokens(20, 0), SHAPE._replace(softcap=2.0)
    keys = tokens.keys.repeat_interleave(2, 0)
    logits = 2 * torch.tanh(tokens.queries @ keys.mT * SHAPE.scale / 2)
    torch.testing.assert_close(mean_shares(shape, tokens.queries, tokens.keys), logits.softmax(-1).mean(1))


def test_sample_attention_asks_evenly_spaced_queries_for_exact_shares() -> None:
    assert sampled(8, 2).tolist() == [3, 7]
    assert sampled(7, 3).tolist() == [1, 3, 6]
    assert sampled(2, 3).tolist() == [0, 1]
    tokens = draw_tokens(150, 1)
    asked = asked_of(SampleAttention(chunk=32, queries=4), tokens)
    rows = {32: [7, 15, 23, 31], 22: [4, 10, 15, 21]}
    check_best(asked, lambda q: softmax_shares(asking(tokens, q)[:, rows[q.num_queries]], tokens, q.start))


def test_the_paper_s_sample_attention_takes_as_few_tokens_per_head_as_reach_the_mass() -> None:
    method = SampleAttention(chunk=32, compat="paper")
    assert (method.heads, method.queries) == ("query", 2)  # 5 % of 32, rounded up
    assert method.budget_defaults == {"mass": 0.95}
    tokens = draw_tokens(150, 1)
    for question in asked_of(method, tokens, Budget(mass=0.6, sinks=4, window=6, dense_layers=())):
        rows = sampled(question.num_queries, 2)
        keys = tokens.keys[:, : question.start].repeat_interleave(2, 0)
        weights = (asking(tokens, question)[:, rows] @ keys.mT * SHAPE.scale).softmax(-1).mean(1)
        for head, units in zip(weights, question.selection.units):
            chosen = units[units >= 0]
            always = float(head[:4].sum() + head[question.candidates.stop :].sum())
            reached = always + float(head[chosen].sum())
            assert reached >= 0.6 - 1e-5
            if len(chosen):
                assert reached - float(head[chosen].min()) < 0.6 + 1e-5, "one token less would have done"


def test_keydiff_takes_the_keys_least_like_the_mean_direction() -> None:
    """Three keys along x and one along y, of any length: the mean leans to x, so y is the most distinct."""
    tokens = draw_tokens(150, 2)
    unit = tokens.keys / tokens.keys.norm(dim=-1, keepdim=True)

    def unlike(question: Asked) -> Tensor:
        mean = unit[:, : question.start].mean(1, keepdim=True)
        return -torch.cosine_similarity(unit, mean, dim=-1)

    check_best(asked_of(KeyDiff(chunk=32), tokens), unlike)
    odd = tokens._replace(keys=torch.zeros_like(tokens.keys))
    odd.keys[..., 0] = torch.rand(150) + 0.1
    odd.keys[:, 20] = torch.tensor([0, 9.0, 0, 0, 0, 0, 0, 0])
    assert all(20 in row for question in asked_of(KeyDiff(chunk=32), odd) for row in question.selection.units.tolist())
    silent = odd._replace(queries=-odd.queries)
    for a, b in zip(asked_of(KeyDiff(chunk=32), odd), asked_of(KeyDiff(chunk=32), silent)):
        assert torch.equal(a.selection.units, b.selection.units), "KeyDiff asked a query"


def test_keydiff_adds_up_more_keys_than_float16_can_count() -> None:
    keys = torch.zeros(1, 90_000, 8, dtype=torch.float16)
    keys[..., 0] = 1.0
    keys[0, 70_000] = torch.tensor([0, 1.0, 0, 0, 0, 0, 0, 0])
    scores = unlike_mean(keys, torch.ones(1, 90_000))
    assert int(scores.argmax()) == 70_000
    assert scores[0, 0] == pytest.approx(-1, abs=1e-3)


def test_sparq_shares_channels_between_queries_and_heads_of_a_group() -> None:
    tokens = draw_tokens(150, 3)

    def shares(question: Asked) -> Tensor:
        queries = asking(tokens, question)
        size = queries.abs().sum(1).unflatten(0, (2, 2)).sum(1)  # [num_kv_heads, head_dim]
        mask = torch.zeros(2, 8).scatter(1, size.topk(3).indices, 1.0).repeat_interleave(2, 0).unsqueeze(1)
        kept = (queries * mask).abs().sum(-1, keepdim=True) / queries.abs().sum(-1, keepdim=True)
        return softmax_shares(queries * mask, tokens, question.start, SHAPE.scale / kept.double().sqrt())

    check_best(asked_of(SparQ(chunk=32, channels=3), tokens), shares)


def test_loki_s_axes_are_the_directions_in_which_keys_differ() -> None:
    """Keys far from the origin that differ along y most, then along x."""
    keys = torch.tensor([[[5.0, 8, 100], [5, -8, 100], [6, 0, 100], [4, 0, 100]]])
    assert torch.allclose(principal_axes(keys, 1).abs(), torch.tensor([[[0.0], [1], [0]]]), atol=1e-6)
    assert principal_axes(keys, 9).shape == (1, 3, 3)
    axes = principal_axes(torch.randn(2, 40, 8), 8)
    torch.testing.assert_close(axes @ axes.mT, torch.eye(8).expand(2, -1, -1), atol=1e-5, rtol=1e-5)


def test_loki_with_every_axis_is_exact_and_with_few_ranks_by_those() -> None:
    tokens = draw_tokens(150, 4)
    check_best(asked_of(Loki(chunk=32, rank=8), tokens), lambda q: softmax_shares(asking(tokens, q), tokens, q.start))

    def shares(question: Asked) -> Tensor:
        basis = tokens.keys[:, : 32 if question.start < 64 else 64 if question.start < 128 else 128]
        axes = principal_axes(basis, 3)
        flat = tokens._replace(keys=tokens.keys @ axes @ axes.mT)
        return softmax_shares(asking(tokens, question), flat, question.start)

    check_best(asked_of(Loki(chunk=32, rank=3), tokens), shares)


def test_layers_reuse_the_set_of_the_first_until_the_correction() -> None:
    method = LessIsMore(chunk=32, correction=5)
    asked = spy(method)
    stack = Stack(Plan(prefill=Rule(method, BUDGET)), layers=(2, 3, 5, 7))
    tokens = draw_tokens(96, 0)
    for start in (0, 32, 64):
        stack.feed(tokens.part(start, start + 32))
    for segment in (asked[:4], asked[4:]):
        sets = [question.selection.units for question in segment]
        assert sets[0].shape == (1, segment[0].limit.units)
        assert torch.equal(sets[0], sets[1])
        assert torch.equal(sets[2], sets[3])
        assert not torch.equal(sets[1], sets[2])
    assert len(asked) == 8
