"""Budgets by layer and by head: the arithmetic, and what is counted when they run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from contracts.checks import (
    a_rolled_back_sequence_answers_as_if_nothing_had_been,
    chunking_does_not_change_the_answer,
    forks_answer_as_if_each_had_always_been_alone,
    future_does_not_influence_the_past,
    interleaved_sequences_answer_as_alone,
    neighbours_and_padding_do_not_change_the_answer,
    placements_do_not_change_the_answer,
)
from contracts.harness import SHAPE, Case, Runner, cases, draw_tokens, revealing_tokens, small, spy, visible_tokens
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from kvsift.methods import catalogue, method_class
from kvsift.methods.base import Phase
from kvsift.methods.common.head_budgets import head_counts
from kvsift.methods.oracle import OracleTokens
from kvsift.methods.quest import Quest
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.plan.budget import Budget
from kvsift.plan.layer_budgets import LayerBudget, layer_plan, pyramid
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan

FAR = 10**6  # tokens: more than anybody may see


def test_a_pyramid_of_32_layers_worked_by_hand() -> None:
    """2000 tokens each: 2000 // 20 = 100 above, 3900 below, and (3900 - 100) // 31 = 122 fewer from layer to layer. 18
    of the 3800 are not divided, so that the layers get 2009 in the mean."""
    tokens = [pyramid(2000, FAR, FAR, rank, 32) for rank in range(32)]
    assert tokens[:3] == [3900, 3778, 3656]
    assert tokens[-1] == 3900 - 31 * 122 == 118
    assert sum(tokens) / 32 == 2009


def test_a_lowest_layer_that_would_get_more_than_there_is_gets_all_and_the_uppermost_the_rest() -> None:
    """4050 tokens, 250 of them always visible: 3800 for the lowest, 200 for the uppermost, steps 3600 // 31 = 116."""
    tokens = [pyramid(2000, 3800, 4050, rank, 32) for rank in range(32)]
    assert tokens[0] == 3800
    assert tokens[-1] == 3800 - 31 * 116
    assert 2000 <= sum(tokens) / 32 < 2015


def test_a_short_context_is_no_pyramid() -> None:
    assert {pyramid(2000, 3749, 3999, rank, 32) for rank in range(32)} == {2000}
    assert {pyramid(2000, 3750, 4000, rank, 32) for rank in (0, 31)} != {2000}
    assert pyramid(2000, FAR, FAR, 0, 1) == 2000, "and neither is a single layer"


@given(
    capacity=st.integers(1, 5000), always=st.integers(0, 600), context=st.integers(1, 50_000),
    num_layers=st.integers(1, 80), least=st.integers(1, 40),
)  # fmt: skip
def test_the_mean_is_the_budget_but_for_the_floor(
    capacity: int, always: int, context: int, num_layers: int, least: int
) -> None:
    capacity = max(capacity, least)
    tokens = [pyramid(capacity, context - always, context, rank, num_layers, least) for rank in range(num_layers)]
    assert tokens == sorted(tokens, reverse=True)
    assert min(tokens) >= least
    assert capacity <= sum(tokens) / num_layers <= capacity + max(num_layers / 2 - 1, 0)
    if context - always > capacity:
        assert max(tokens) <= context - always


LAYERS = (1, 2, 5, 6, 7)  # others are sliding, say


def in_layer(plan: Plan, layer: int) -> LayerBudget:
    rule = layer_plan(plan, SHAPE._replace(layer=layer, peers=LAYERS)).decode
    assert isinstance(rule.budget, LayerBudget)
    return rule.budget


def test_dense_layers_and_those_of_others_are_no_part_of_the_pyramid() -> None:
    plan = Plan(decode=Rule(OracleTokens(), Budget(tokens=268, dense_layers=(0,), layer_budgets="pyramid")))
    budgets = [in_layer(plan, layer) for layer in LAYERS[1:]]
    assert [budget.pyramid_rank[:2] for budget in budgets] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [budget.limit(FAR) for budget in budgets] == [68 + 390, 68 + 264, 68 + 138, 68 + 12]  # of 200 each
    assert layer_plan(plan, SHAPE._replace(layer=1, peers=LAYERS)) == plan
    assert str(layer_plan(plan, SHAPE._replace(layer=5, peers=LAYERS))) == str(plan)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("tokens", [112, 200, 700])
def test_every_layer_selects_a_page_and_none_more_than_its_share(tokens: int, page_size: int) -> None:
    """With 112 tokens, a twentieth of what sinks and window leave is less than one page of 16."""
    plan = Plan(decode=Rule(Quest(page_size=page_size), Budget(tokens, dense_layers=(), layer_budgets="pyramid")))
    for start in range(20_000, 20_000 + page_size):
        seen = []
        for layer in LAYERS:
            budget = in_layer(plan, layer)
            sinks_stop, window_start = budget.always(start, page_size)
            assert budget.units(start, page_size) >= 1
            seen.append(sinks_stop + start + 1 - window_start + budget.units(start, page_size) * page_size)
            assert seen[-1] <= budget.limit(start + 1) < seen[-1] + page_size
        assert seen == sorted(seen, reverse=True)


def run_layers(plan: Plan, length: int, prompt: int) -> list[Runner]:
    runners = [Runner(plan, shape=SHAPE._replace(layer=layer, peers=LAYERS)) for layer in LAYERS]
    for runner in runners:
        runner.feed_all(draw_tokens(length, runner.shape.layer), prompt, range(prompt, length))
    return runners


def visible(runners: list[Runner], phase: Phase) -> list[float]:
    tallies = [runner.stats.phase(phase) for runner in runners]
    return [float(tally.visible_tokens) / tally.queries for tally in tallies]


@pytest.mark.parametrize("method", [OracleTokens(), StreamingLLM()], ids=str)
def test_counted_tokens_of_a_pyramid_are_the_budget_in_the_mean(method: Any) -> None:
    """40 tokens: 2 sinks, a window of 6, and 32 that differ. From 63 to 1 in steps of 15, not 15.5: 63, 48, 33, 18, 3,
    a token more in the mean. Without selection all but the sinks differ, 75 to 1 of 38 in steps of 18, not 18.5."""
    budget = Budget(40, sinks=2, window=6 if method.traits.selects else 64, dense_layers=(), layer_budgets="pyramid")
    counted = visible(run_layers(Plan(decode=Rule(method, budget)), 220, 216), "decode")
    assert counted == ([71, 56, 41, 26, 11] if method.traits.selects else [77, 59, 41, 23, 5])
    assert sum(counted) / 5 == 41


def test_a_ratio_makes_a_pyramid_for_every_length() -> None:
    plan = Plan(
        decode=Rule(OracleTokens(), Budget(ratio=0.25, sinks=0, window=5, dense_layers=(0,), layer_budgets="pyramid"))
    )
    budgets = [in_layer(replace(plan), layer) for layer in LAYERS[1:]]
    for context in (100, 101, 400, 9000):
        nominal = Budget(ratio=0.25).limit(context)
        assert nominal <= sum(budget.limit(context) for budget in budgets) / 4 <= nominal + 1


def test_where_the_layers_are_not_known_there_is_no_pyramid() -> None:
    plan = parse_plan("quest:layer_budgets=pyramid")
    with refused("unsupported_plan"):
        Runner(plan)
    Runner(plan, shape=SHAPE._replace(layer=1))  # dense: it does not matter


SPREAD = torch.tensor([[0.9, 0.05, 0.03, 0.02], [0.3, 0.3, 0.2, 0.2], [0.5, 0.3, 0.1, 0.1]])
ONE_SIDED = torch.tensor([[0.0], [1.0]]).expand(-1, 100)
FIRST_HAS_ONE = torch.tensor([[0.5] + [-torch.inf] * 29, [0.5] * 30])


@pytest.mark.parametrize(
    ("shares", "k", "own", "counts"),
    [
        # Two of four units each, so eight of the twelve in all; a fifth of two is none for certain. The heads with
        # spread shares take most, and of equal ones the lower head's come first: 0.9, 0.5, 0.3, 0.3, 0.3, 0.2.
        (SPREAD, 2, 0, [1, 3, 2]),
        (torch.full((2, 4), 0.25), 3, 0, [4, 2]),
        (ONE_SIDED, 10, 0, [2, 18]),  # every head keeps a fifth
        (ONE_SIDED, 100, 0, [100, 100]),
        # Seven of ten are every head's own: a fifth of the other three is none, so the second head wins all six.
        (ONE_SIDED, 10, 7, [7, 13]),
        (ONE_SIDED, 10, 5, [6, 14]),
        (ONE_SIDED, 10, 12, [10, 10]),  # more of their own than they may select
        # The first head has one unit, less than a fifth of ten; then there are fewer than both may select.
        (FIRST_HAS_ONE, 10, 0, [1, 19]),
        (FIRST_HAS_ONE, 10, 4, [1, 19]),
        (FIRST_HAS_ONE, 20, 0, [1, 30]),
    ],
)
def test_shares_of_heads_worked_by_hand(shares: Tensor, k: int, own: int, counts: list[int]) -> None:
    assert head_counts(shares, k, own=own).tolist() == counts


@given(
    shares=st.lists(st.lists(st.integers(0, 9), min_size=12, max_size=12), min_size=1, max_size=5), k=st.integers(1, 12)
)
def test_heads_share_what_they_would_have_had(shares: list[list[int]], k: int) -> None:
    counts = head_counts(torch.tensor(shares, dtype=torch.float32), k).tolist()
    least = int(0.2 * k)
    assert sum(counts) == k * len(shares)
    kept = [sorted(row, reverse=True)[:count] for row, count in zip(shares, counts)]
    left = [sorted(row, reverse=True)[count:] for row, count in zip(shares, counts)]
    assert all(len(row) >= least for row in kept)
    lowest = min((row[-1] for row in kept if len(row) > least), default=9)
    assert all(row[0] <= lowest for row in left if row), "no head lacks a larger share than another took beyond its own"


ADAPTIVE = Budget(24, sinks=2, window=6, dense_layers=(), head_budgets="adaptive")


def best_shares(tokens: Any, question: Any) -> Tensor:
    """Exact shares of attention of the last query, [num_kv_heads, count], a mean over the heads of a group."""
    keys = tokens.keys[:, : question.start + 1].repeat_interleave(SHAPE.group_size, 0)
    weights = (tokens.queries[:, question.start : question.start + 1] @ keys.mT * SHAPE.scale).softmax(-1)
    return weights[:, 0].unflatten(0, (SHAPE.num_kv_heads, -1)).mean(1)[:, question.candidates.tokens]


def test_an_oracle_divides_its_tokens_by_exact_shares() -> None:
    method, tokens = OracleTokens(), draw_tokens(80, 6)
    asked = spy(method)
    Runner(Plan(decode=Rule(method, ADAPTIVE))).feed_all(tokens, 70, range(70, 80))
    lengths = set()
    for question in asked:
        shares = best_shares(tokens, question)
        counts = head_counts(shares, 16).tolist()
        for head, count in enumerate(counts):
            best = shares[head].topk(count).indices.sort().values + question.candidates.first
            chosen = question.selection.units[head]
            assert chosen[:count].tolist() == best.tolist()
            assert bool((chosen[count:] == -1).all())
        lengths.add(tuple(counts))
    assert any(first != second for first, second in lengths)


COMPARING = ["oracle_tokens", "oracle_pages", "quest", "sketch", "sparq", "loki", "sample_attention", "pqcache", "h2o",
             "snapkv"]  # fmt: skip
ESTIMATES = {"sparq": {"mean_value": False}, "sketch": {"rest": False}}  # which show in the answer without being tokens


@pytest.mark.parametrize("name", COMPARING)
def test_heads_see_different_numbers_of_tokens_and_the_budget_in_the_mean(name: str) -> None:
    make = small(name, **ESTIMATES.get(name, {}))
    for phase in make().phases:
        budget = Budget(4 + 9 + 3 + 24, sinks=4, window=9, dense_layers=(), head_budgets="adaptive")
        case = Case(*((2 * make().segment_size + 60, 0) if phase == "prefill" else (90, 6)), budget, 2)
        rule = Rule(make(), budget)
        plan = Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule)
        seen, runner = visible_tokens(plan, case, phase)
        tally = runner.stats.phase(phase)
        by_head = seen.sum(-1)  # [num_query_heads, num_queries]
        assert float(tally.visible_tokens) == pytest.approx(float(by_head.double().mean(0).sum()))
        equal = Rule(make(), replace(budget, head_budgets="equal"))
        plain, other = visible_tokens(Plan(prefill=equal) if phase == "prefill" else Plan(decode=equal), case, phase)
        assert float(other.stats.phase(phase).visible_tokens) == pytest.approx(float(tally.visible_tokens))
        assert bool((by_head != by_head[0]).any())
        assert bool((plain.sum(-1) == plain.sum(-1)[0]).all())


def test_every_method_that_compares_heads_is_tested_here() -> None:
    able = {name for name in catalogue() if method_class(name)().traits.compares_heads}
    assert able == set(COMPARING)


def adaptive_cases(method: Any, phase: Phase) -> Any:
    drawn = cases(method, phase, ("tokens", "ratio"))
    return drawn.map(lambda case: replace(case, budget=replace(case.budget, head_budgets="adaptive")))


DROPPING_CHECKS = [
    forks_answer_as_if_each_had_always_been_alone,
    interleaved_sequences_answer_as_alone,
    neighbours_and_padding_do_not_change_the_answer,
    placements_do_not_change_the_answer,
]
CHECKS = [
    chunking_does_not_change_the_answer,
    future_does_not_influence_the_past,
    a_rolled_back_sequence_answers_as_if_nothing_had_been,
]


@pytest.mark.parametrize(
    ("name", "phase", "check"),
    [(name, "decode", check) for name in ("oracle_tokens", "quest", "h2o", "snapkv") for check in CHECKS]
    + [(*case, check) for case in (("h2o", "decode"), ("h2o", "prefill"), ("snapkv", "decode"))
       for check in DROPPING_CHECKS],
)  # fmt: skip
@pytest.mark.usefixtures("fewer_examples")
def test_contracts_hold_for_adaptive_budgets(
    name: str, phase: Phase, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where heads that drop remember different numbers of tokens."""
    monkeypatch.setattr("contracts.checks.cases", adaptive_cases)
    check(small(name), phase)


def test_weights_show_that_pads_are_not_attended() -> None:
    shape, tokens = revealing_tokens(60, 3)
    runner = Runner(Plan(decode=Rule(OracleTokens(), ADAPTIVE)), shape=shape)
    weights = runner.feed_all(tokens, 59, [59])[:, -1]
    assert (weights > 0).sum(1).unflatten(0, (2, 2))[:, 0].sum() == 2 * 24
    torch.testing.assert_close(weights.sum(1), torch.ones(4))


def test_plans_spell_them() -> None:
    plan = parse_plan("quest:budget=2048:layer_budgets=pyramid:head_budgets=adaptive")
    assert (plan.decode.budget.layer_budgets, plan.decode.budget.head_budgets) == ("pyramid", "adaptive")
    assert str(plan) == "quest:budget=2048:layer_budgets=pyramid:head_budgets=adaptive"
    assert parse_plan(str(plan)) == plan
