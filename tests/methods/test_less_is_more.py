"""LessIsMore and TidalDecode: who chooses, who reuses, and what layers that choose see."""

from typing import Any

import pytest
import torch
from contracts.checks import messages_between_layers_stay_in_their_sequence_and_pass as pass_alone
from contracts.harness import SHAPE, Asked, Runner, Stack, Tokens, draw_tokens, spy
from torch import Tensor

from kvsift.methods.base import Method, Phase
from kvsift.methods.less_is_more import LessIsMore, merged_ranking
from kvsift.methods.tidal_decode import TidalDecode
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule

BUDGET = Budget(tokens=30, sinks=4, window=6, dense_layers=(0, 1))
LAYERS = (0, 1, 2, 3, 5, 7)
PROMPT = 90


def decoded(method: Method, layers: tuple[int, ...] = LAYERS, budget: Budget = BUDGET) -> tuple[Stack, list[Asked]]:
    """Three tokens through a stack of layers, and what each was asked in turn."""
    asked = spy(method)
    stack, tokens = Stack(Plan(decode=Rule(method, budget)), layers=layers), draw_tokens(PROMPT + 3, 0)
    stack.feed(tokens.part(0, PROMPT))
    for step in range(PROMPT, PROMPT + 3):
        stack.feed(tokens.part(step, step + 1), decode_tokens=1)
    return stack, asked


def test_rankings_are_merged_first_choices_first_and_no_token_twice() -> None:
    """First choices 3 and 3, second 0 and 1, third 1 and 2."""
    scores = torch.tensor([[3.0, 2, 1, 4], [1, 3, 2, 4]])
    assert [merged_ranking(scores, k).tolist() for k in (1, 3, 4)] == [[[3]], [[3, 0, 1]], [[3, 0, 1, 2]]]


@pytest.mark.parametrize("method", [LessIsMore, TidalDecode])
def test_layers_that_choose_see_everything_and_the_others_their_choice(method: type[LessIsMore]) -> None:
    stack, asked = decoded(method(correction=5))
    seen = [float(layer.stats.phase("decode").visible_tokens) / 3 for layer in stack.layers]
    everything = PROMPT + 2  # the mean of three steps
    assert seen == [everything, everything, everything, 30, everything, 30]
    sparse = [layer.stats.phase("decode").sparse_queries for layer in stack.layers]
    assert sparse == [0, 0, 0, 3, 0, 3]
    for step in range(3):
        two, three, five, seven = (question.selection.units for question in asked[4 * step : 4 * step + 4])
        assert torch.equal(two, three)
        assert torch.equal(five, seven)
        assert not torch.equal(three, five)


@pytest.mark.parametrize("placement", ["device", "split"])
def test_answers_of_layers_that_choose_are_dense_ones(placement: Any) -> None:
    tokens, answers = draw_tokens(PROMPT + 1, 0), []
    for plan, place in ((Plan(decode=Rule(LessIsMore(), BUDGET)), placement), (Plan(), "device")):
        runner = Runner(plan, placement=place)
        runner.feed(tokens.part(0, PROMPT))
        answers.append(runner.feed(tokens.part(PROMPT), decode_tokens=1)[0])
        assert runner.stats.phase("decode").sparse_queries == 0
    assert torch.allclose(*answers, rtol=1e-5, atol=1e-6 * (placement != "device"))


def logits_of(tokens: Tokens, position: int) -> Tensor:
    """Softmax of every head at a position, [num_query_heads, position + 1]."""
    keys = tokens.keys[:, : position + 1].double().repeat_interleave(SHAPE.group_size, 0)
    return (tokens.queries[:, position, None].double() @ keys.mT * SHAPE.scale).softmax(-1)[:, 0]


@pytest.mark.parametrize(("fraction", "recent"), [(0.0, 0), (0.25, 1), (0.5, 7), (1.0, 20)])
def test_a_fraction_of_the_budget_is_recent(fraction: float, recent: int) -> None:
    """30 tokens, 4 of them sinks and 6 the window: of the 26 others 0.25 are 6.5, so one more than the window; 0.5 are
    13, seven more; all are the 20 newest before the window."""
    method = LessIsMore(recent_fraction=fraction)
    tokens = draw_tokens(PROMPT + 3, 0)
    units = set(decoded(method, (2, 3))[1][0].selection.units[0].tolist())
    stop = PROMPT + 1 - 6
    newest = set(range(stop - recent, stop))
    shares = logits_of(tokens, PROMPT)[:, 4 : stop - recent].float()
    ranked = set((merged_ranking(shares, 20 - recent) + 4)[0].tolist())
    assert units == newest | ranked


def test_tidal_decode_chooses_for_each_head() -> None:
    tokens = draw_tokens(PROMPT + 3, 0)
    shares = logits_of(tokens, PROMPT)[:, 4 : PROMPT + 1 - 6]
    for heads, by_list in (("query", shares), ("kv", shares.unflatten(0, (2, 2)).mean(1))):
        _, asked = decoded(TidalDecode(heads=heads), (2, 3))  # type: ignore[arg-type]
        best = by_list.topk(20).indices.sort(-1).values + 4
        assert torch.equal(asked[0].selection.units, best)
        assert torch.equal(asked[1].selection.units, best)


def test_a_layer_with_a_smaller_budget_takes_the_best_of_the_choice() -> None:
    """As when lower layers may see more than upper ones."""
    method = TidalDecode(heads="query", full_choice=False)
    asked = spy(method)
    tokens = draw_tokens(PROMPT + 1, 0)
    stack = Stack(Plan(decode=Rule(method, BUDGET)), layers=(2, 3, 5))
    for number, layer in enumerate(stack.layers):
        layer.attention.plan = Plan(decode=Rule(method, Budget(tokens=30 - 5 * number, window=6, dense_layers=())))
    stack.feed(tokens.part(0, PROMPT))
    stack.feed(tokens.part(PROMPT), decode_tokens=1)
    first, second, third = (set(question.selection.units[0].tolist()) for question in asked)
    assert (len(first), len(second), len(third)) == (20, 15, 10)
    assert third < second < first


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("cls", [LessIsMore, TidalDecode])
def test_passes_stay_apart_where_layers_that_choose_see_everything(cls: type[LessIsMore], phase: Phase) -> None:
    pass_alone(lambda: cls(chunk=32, correction=5), phase)


@pytest.mark.parametrize(
    ("layers", "less_is_more", "tidal_decode"),
    [
        (range(32), 12, 13),  # the published ones
        (range(5), 3, 3),
        (range(36), 13, 14),
        (range(1), 0, 0),
        (range(5, 34, 6), 11, 17),  # those between are sliding ones
    ],
    ids=str,
)
def test_the_correction_layer_goes_by_the_depth_of_the_model(
    layers: range, less_is_more: int, tidal_decode: int
) -> None:
    assert LessIsMore().corrects_at(layers) == less_is_more
    assert TidalDecode().corrects_at(layers) == tidal_decode


@pytest.mark.parametrize(("correction", "choosing"), [("auto", {2, 3}), (3, {2, 3}), ("none", {2}), (4, {2, 4})])
def test_a_shallow_model_corrects_its_choice_by_default(correction: Any, choosing: set[int]) -> None:
    """The default was layer 12 or 13 of any model, so that the first choice stood in all of five layers."""
    method = LessIsMore(correction=correction)
    plan, tokens = Plan(decode=Rule(method, BUDGET)), draw_tokens(PROMPT + 1, 0)
    stack = Stack(plan, layers=range(5), peers=range(5))
    stack.feed(tokens.part(0, PROMPT))
    stack.feed(tokens.part(PROMPT), decode_tokens=1)
    seen = [float(layer.stats.phase("decode").visible_tokens) for layer in stack.layers]
    assert {layer for layer in range(2, 5) if seen[layer] > 30} == choosing
