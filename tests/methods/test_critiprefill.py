"""CritiPrefill: its estimators, its fusion over layers, and the summaries that it shares with Quest."""

from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Asked, Runner, Tokens, draw_tokens, spy
from torch import Tensor

from kvsift.kernels.extremes import extremes
from kvsift.layer.layer_messages import LayerMessages
from kvsift.methods.critiprefill import CritiPrefill, averaged, block_rows, block_shares
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule

ESTIMATORS: list[Any] = ["code", "paper", "bound"]
SMALL: dict[str, Any] = {"segment": 32, "block": 8, "page_size": 4}
BUDGET = Budget(tokens=48, sinks=4, window=4, dense_layers=())


def first_of(a: float, b: float) -> float:
    """Share of the first of two logits."""
    return 1 / (1 + exp(b - a))


def test_the_worked_example() -> None:
    """One channel: queries between -1 and 2; keys between 1 and 3 in one block, between -2 and -1 in the other."""
    pooled, rows = torch.tensor([[[2.0, -1.0]]]), torch.tensor([[[3.0, 1.0], [-1.0, -2.0]]])
    top = (first_of(6, -2) + first_of(-3, 1)) / 2, (first_of(-2, 6) + first_of(1, -3)) / 2
    bottom = (first_of(2, -4) + first_of(-1, 2)) / 2, (first_of(-4, 2) + first_of(2, -1)) / 2
    expected = {
        "code": [first_of(1.5, -0.5), first_of(-0.5, 1.5)],  # the middle of the queries is 0.5
        "paper": [max(top[0], bottom[0]), max(top[1], bottom[1])],
        "bound": [first_of(6, 2), first_of(2, 6)],  # 2 * 3 and -1 * -2
    }
    for estimator in ESTIMATORS:
        shares = block_shares(pooled, rows, estimator)
        torch.testing.assert_close(shares, torch.tensor([[expected[estimator]]]), msg=estimator)


def test_query_heads_of_a_group_are_averaged_before_the_softmax_or_after_it() -> None:
    pooled = torch.tensor([[[2.0, 2.0]], [[-1.0, -1.0]]])  # a single query each: both extremes are itself
    rows = torch.tensor([[[3.0, 3.0], [0.0, 0.0]]])
    for estimator in ("code", "bound"):
        torch.testing.assert_close(block_shares(pooled, rows, estimator)[0, 0, 0].item(), first_of(1.5, 0))  # type: ignore[arg-type]
    paper = (first_of(6, 0) + first_of(-3, 0)) / 2
    torch.testing.assert_close(block_shares(pooled, rows, "paper")[0, 0, 0].item(), paper)


@pytest.mark.parametrize("seed", range(5))
def test_a_bound_is_never_below_the_largest_logit_of_segment_and_block(seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvsift.methods.critiprefill.MAX_PRODUCTS", 300)  # several tiles
    monkeypatch.setattr("kvsift.methods.critiprefill._softmax", lambda logits, hidden: logits)
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(2, 48, 8, generator=generator) for _ in range(2))
    rows = torch.cat([(blocks := keys.unflatten(1, (-1, 8))).amax(2), blocks.amin(2)], -1)
    bounds = block_shares(extremes(queries, 16), rows, "bound")
    largest = (queries @ keys.mT).unflatten(2, (-1, 8)).unflatten(1, (-1, 16)).amax((2, 4))
    assert bounds.shape == largest.shape == (2, 3, 6)
    assert bool((bounds >= largest - 1e-5).all())
    one = block_shares(extremes(queries[:, :1], 1), torch.cat([keys[:, :6]] * 2, -1), "bound")
    torch.testing.assert_close(one, queries[:, :1] @ keys[:, :6].mT)  # of a single query and key it is the logit


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_segments_at_once_have_the_shares_of_each_alone_and_the_future_has_none(estimator: Any) -> None:
    queries, rows = torch.randn(4, 80, 8), torch.randn(2, 12, 16).sort(-1, descending=True).values
    pooled, visible = extremes(queries, 32), torch.tensor([0, 4, 8])
    assert pooled.shape == (4, 3, 16)
    together = block_shares(pooled, rows, estimator, visible)
    assert not together.isnan().any()
    assert not together[:, 0].any()
    for segment, count in ((1, 4), (2, 8)):
        own = extremes(queries[:, 32 * segment : 32 * segment + 32], 32)
        alone = block_shares(own, rows[:, :count], estimator)
        torch.testing.assert_close(together[:, segment, :count], alone[:, 0])
        assert not together[:, segment, count:].any()


def test_blocks_of_pages_are_summarised_as_one_page_of_their_keys() -> None:
    tokens = draw_tokens(64, 0)
    small = Runner(Plan(prefill=Rule(CritiPrefill(**SMALL), BUDGET)))
    large = Runner(Plan(decode=Rule(Quest(page_size=8), BUDGET)))
    for runner in (small, large):
        runner.feed(tokens)
    assert torch.equal(block_rows(small.summaries()["minmax"], 2), large.summaries()["minmax"])


def test_quest_decodes_from_the_summaries_that_prefill_chose_by() -> None:
    plan = Plan(Rule(CritiPrefill()), Rule(Quest()))
    assert plan.page_size == 16
    assert plan.summaries == ("minmax",)
    runner = Runner(plan)
    runner.feed(draw_tokens(40, 0))
    assert list(runner.store.summaries) == ["minmax"]
    assert Plan(Rule(CritiPrefill(block=64, page_size=32)), Rule(Quest(page_size=32))).page_size == 32


def test_layer_0_alone_is_dense_and_the_weight_follows_the_estimator() -> None:
    assert CritiPrefill().budget_defaults == {"dense_layers": (0,)}
    assert [CritiPrefill(estimator=each).weight for each in ESTIMATORS] == [0.75, 0.25, 0.75]
    assert CritiPrefill(estimator="paper", weight_current=0.5).weight == 0.5
    below = torch.tensor([[0.2, 0.8]])
    torch.testing.assert_close(averaged(torch.tensor([[1.0, 0.0]]), below, 0.75), torch.tensor([[0.8, 0.2]]))
    assert torch.equal(averaged(below, None, 0.75), below)


def stack(
    method: CritiPrefill, layers: list[int], tokens: list[Tokens], budget: Budget = BUDGET, chunk: int = 64
) -> list[list[Asked]]:
    """What each layer was asked, in a model whose layers share a relay and have tokens of their own."""
    relay, asked = LayerMessages(), []
    runners = []
    for layer in layers:
        own = replace(method)
        asked.append(spy(own))
        runners.append(Runner(Plan(prefill=Rule(own, budget)), shape=SHAPE._replace(layer=layer), messages=relay))
    for start in range(0, tokens[0].length, chunk):
        for runner, of in zip(runners, tokens):
            runner.feed(of.part(start, start + chunk))
    return asked


def expected_shares(method: CritiPrefill, tokens: Tokens, asked: Asked) -> Tensor:
    """Of the candidates, from the tokens themselves."""
    queries = tokens.queries[:, asked.start : asked.start + asked.num_queries]
    keys = tokens.keys[:, asked.candidates.tokens].unflatten(1, (-1, method.block))
    rows = torch.cat([keys.amax(2), keys.amin(2)], -1)
    scale = SHAPE.scale if method.scaled else 1.0
    return block_shares(extremes(queries, method.segment) * scale, rows, method.estimator)[:, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("chunk", [32, 64, 256])
def test_layers_fuse_their_shares_with_what_the_layer_below_fused(estimator: Any, scaled: bool, chunk: int) -> None:
    method = CritiPrefill(estimator=estimator, scaled=scaled, **SMALL)
    tokens = [draw_tokens(256, seed) for seed in range(3)]
    asked = stack(method, [1, 2, 5], tokens, chunk=chunk)
    assert [len(each) for each in asked] == [6, 6, 6]
    changed = False
    for questions in zip(*asked):
        below = None
        for of, question in zip(tokens, questions):
            own = expected_shares(method, of, question)
            below = own if below is None else method.weight * own + (1 - method.weight) * below
            best = below.topk(question.limit.units).indices.sort(-1).values + question.candidates.first
            assert torch.equal(question.selection.units, best)
            alone = own.topk(question.limit.units).indices.sort(-1).values + question.candidates.first
            changed |= not torch.equal(alone, best)
    assert changed, "fusing changed no selection: this test shows nothing"


def test_a_dense_layer_between_passes_the_shares_by() -> None:
    method, tokens = CritiPrefill(**SMALL), [draw_tokens(256, seed) for seed in range(3)]
    between = stack(method, [1, 2, 5], tokens, Budget(tokens=48, sinks=4, window=4, dense_layers=(2,)))
    without = stack(method, [1, 5], [tokens[0], tokens[2]])
    assert between[1] == []
    for layer, other in ((0, 0), (2, 1)):
        assert all(torch.equal(a.selection.units, b.selection.units) for a, b in zip(between[layer], without[other]))


def test_a_needle_block_is_found() -> None:
    tokens = draw_tokens(256, 0)
    tokens.queries[:, 224:] = tokens.queries[:, 224:225]
    tokens.keys[:, 96:104] = 2 * tokens.queries[::2, 224:225]
    for estimator in ESTIMATORS:
        asked = stack(CritiPrefill(estimator=estimator, **SMALL), [1], [tokens])[0]
        assert bool((asked[-1].selection.units == 12).any(1).all()), estimator


@pytest.mark.parametrize("segment", [32, 64, 128])
def test_a_short_last_segment_is_pooled_over_the_queries_it_has(segment: int) -> None:
    tokens = draw_tokens(200, 0)
    method = CritiPrefill(segment=segment, block=8, page_size=4)
    asked = stack(method, [1], [tokens], chunk=200)[0][-1]
    assert asked.num_queries == 200 % segment
    best = expected_shares(method, tokens, asked).topk(asked.limit.units).indices.sort(-1).values
    assert torch.equal(asked.selection.units, best + asked.candidates.first)


def test_the_rest_is_estimated_well_where_the_tokens_of_a_block_are_alike() -> None:
    drawn = draw_tokens(256, 3)
    alike = [part[:, ::8].repeat_interleave(8, 1) for part in (drawn.keys, drawn.values)]
    tokens = Tokens(drawn.queries, *alike)
    dense = Runner(Plan()).feed(tokens)[0]
    errors = []
    for rest in (False, True):
        runner = Runner(Plan(prefill=Rule(CritiPrefill(rest=rest, **SMALL), BUDGET)))
        errors.append(float((runner.feed(tokens)[0] - dense).square().mean() / dense.square().mean()))
    assert errors[1] < 1e-2 < 0.1 < errors[0], errors  # means are kept in 4 bits
    assert runner.stats.report()["phases"]["prefill"]["estimated_share"] > 0.1
