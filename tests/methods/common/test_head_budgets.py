"""Heads of methods that drop, sharing what they keep in all: the rule the slow way, and what must not show."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from contracts.harness import SHAPE, Runner, Tokens, assert_same_answer, draw_tokens, spy
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.weighted import compare, kept_by_rule, seen, simulate, softmax_over, weighted
from torch import Tensor

from kvsift.methods.common.dropped_tokens import DroppedTokens, as_they_are, select_remaining_shared
from kvsift.methods.h2o import H2O
from kvsift.methods.snapkv import SnapKV
from kvsift.plan.budget import Budget
from kvsift.plan.syntax import parse_plan
from kvsift.types import Candidates, Limit

BUDGET = Budget(tokens=30, sinks=3, window=6, dense_layers=(), head_budgets="adaptive")
BUDGETS = [BUDGET, replace(BUDGET, head_budgets="equal")]


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_the_worth_and_the_limit_the_rule_is_kept(data: st.DataObject) -> None:
    """Limits that fall and rise, so that heads may have fewer left than is safe, ties, roll-backs and forks."""
    num_rows, first = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    drops, position = DroppedTokens(num_rows), first + 2
    history = [(-1, [set[int]() for _ in range(num_rows)])]  # what was gone after the query at a position
    for _ in range(data.draw(st.integers(1, 6))):
        position += data.draw(st.integers(1, 6))
        stop = position - data.draw(st.integers(0, 1)) if data.draw(st.booleans()) else position + 1
        gone = history[-1][1]
        left = [[token for token in range(first, stop) if token not in row] for row in gone]
        numbers = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=9))).float()
        worth = numbers.repeat(num_rows * stop)[: num_rows * stop].view(num_rows, stop)
        worth[:, position:] = math.inf  # the query's own token, if it is a candidate
        k, own = data.draw(st.integers(1, stop - first)), data.draw(st.integers(0, 4))

        def of(tokens: Tensor, worth: Tensor = worth, before: int = position) -> Tensor:
            """Of what is left before the query; pads get what is to be ignored."""
            assert tokens.shape[1] == 0 or int(tokens.max()) < before
            padded = torch.nn.functional.pad(worth, (0, max(before - worth.shape[1], 0)))
            return padded.gather(1, tokens.clamp_min(0)).masked_fill(tokens < 0, 99.0)

        limit, candidates = Limit(k, adaptive=True), Candidates(first, stop - first, 1)
        chosen = select_remaining_shared(
            drops, candidates, limit, position, torch.device("cpu"), of, as_they_are, lambda own=own: own
        )
        worths = [{token: float(worth[row, token]) for token in tokens} for row, tokens in enumerate(left)]
        expected = kept_by_rule(worths, k, own)
        if sum(map(len, left)) <= k * num_rows:
            expected = [set(tokens) for tokens in left]
        longest = max(map(len, expected))
        assert chosen.units.tolist() == [sorted(row) + [-1] * (longest - len(row)) for row in expected]
        history.append((position, [set(range(first, stop)) - row for row in expected]))
        if data.draw(st.booleans()):
            drops = drops.fork()
        if data.draw(st.integers(0, 3)) == 0:
            position = data.draw(st.integers(first + 2, position))
            drops.crop(position)
            history = [entry for entry in history if entry[0] < position]


def test_a_head_that_has_less_than_its_fifth_leaves_the_rest_to_others() -> None:
    """The first head keeps one of twenty at first; when every head may have ten, the others cannot give it back."""
    drops, cpu = DroppedTokens(2), torch.device("cpu")

    def select(k: int, stop: int) -> list[int]:
        worth = torch.stack([torch.zeros(stop), torch.ones(stop)])

        def of(tokens: Tensor) -> Tensor:
            return worth.gather(1, tokens.clamp_min(0))

        limit, candidates = Limit(k, adaptive=True), Candidates(0, stop, 1)
        chosen = select_remaining_shared(drops, candidates, limit, stop, cpu, of, as_they_are, lambda: 0)
        return (chosen.units >= 0).sum(1).tolist()

    assert select(5, 20) == [1, 9]
    assert select(10, 23) == [4, 12]  # of 4 and 12
    assert select(7, 23) == [2, 12]
    assert drops.num_dropped == [21, 11]


def uneven_tokens(length: int, seed: int) -> Tokens:
    """Tokens to which the heads of the first group attend evenly; those of the other want the same few all the time,
    and so have no more than what is safe."""
    tokens, group = draw_tokens(length, seed), SHAPE.group_size
    mild, same = 0.3 * tokens.queries, tokens.queries[:, :1]
    return tokens._replace(queries=torch.cat([mild[:group], same[group:] + mild[group:]]))


def weights(tokens: Tokens, query: int, left: Tensor) -> Tensor:
    """Of one query for what is left by KV head, summed over a group's heads: float64 [num_kv_heads, num_tokens]."""
    visible = (left & (torch.arange(tokens.length) <= query)).repeat_interleave(SHAPE.group_size, 0)
    return softmax_over(tokens, query, visible, SHAPE).unflatten(0, (-1, SHAPE.group_size)).sum(1)


RUNS = [[(80, 95)], [(60, 70), (110, 120)], [(33, 38), (50, 55)]]
NAMES = ["one prompt", "two prompts", "hardly more than the budget"]  # so that a head has everything at first


@pytest.mark.parametrize("runs", RUNS, ids=NAMES)
@pytest.mark.parametrize("mode", ["online", "oneshot", "decode_only"])
@pytest.mark.parametrize("recent", [0.0, 0.3])
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.head_budgets)
def test_h2o_keeps_the_largest_sums_of_all_heads_or_of_each(
    budget: Budget, recent: float, mode: str, runs: list[tuple[int, int]]
) -> None:
    method, tokens = H2O(recent=recent, mode=mode), uneven_tokens(runs[-1][1], 7)  # type: ignore[arg-type]
    sums, counted = torch.zeros(SHAPE.num_kv_heads, tokens.length, dtype=torch.float64), 0

    def worths_of(query: int, left: Tensor) -> tuple[Tensor, int]:
        nonlocal counted
        while counted < query:  # nothing was dropped since
            generated = any(start <= counted < stop for start, stop in runs)
            if mode == "online" or generated == (mode == "decode_only"):
                sums.add_(weights(tokens, counted, left))
            counted += 1
        nobody = mode == "decode_only" and query == runs[0][0]
        worths = weights(tokens, query, left) if nobody else sums.clone()
        stop, own = BUDGET.always(query, 1)[1], int(recent * BUDGET.units(query, 1))
        if mode == "oneshot":
            made = [j for start, end in runs for j in range(start, min(end, stop - own))]
            worths[:, made] = 1e6 + torch.tensor(made, dtype=torch.float64)
            own += len(made)
        worths[:, stop - int(recent * BUDGET.units(query, 1)) :] = math.inf
        return worths, own

    compare(method, budget, tokens, runs, simulate(tokens, runs, SHAPE.num_kv_heads, budget, worths_of))


@pytest.mark.parametrize(("mode", "later"), [("online", 2), ("oneshot", 1)])
def test_a_fifth_of_what_heads_do_not_keep_in_any_case_is_safe(mode: str, later: int) -> None:
    """By hand. Of 20 to select 10 are the most recent, and 2 of the other 10 are safe to a head that looks at nothing
    but the sink. Two tokens that were generated and are not recent any more are its own too where nobody counts for
    them, and of 8 one is safe."""
    nowhere = [[1, *(1e-6 * j for j in range(1, i + 1))] for i in range(73)]
    shape, tokens = weighted([nowhere, [[1] * (i + 1) for i in range(73)]], num_kv_heads=2)
    plan = parse_plan(f"h2o:mode={mode}:budget=22:sinks=1:window=1:dense_layers=none:head_budgets=adaptive")
    narrow, wide = seen(plan, shape, tokens, 60)
    assert (len(narrow[0]), len(wide[0])) == (1 + 10 + 2 + 1, 1 + 28 + 1)
    own = range(62 if mode == "online" else 60, 73)
    assert narrow[12] == [0, *narrow[12][1 : 1 + later], *own]
    assert len(narrow[12]) + len(wide[12]) == 2 * 22


@pytest.mark.parametrize("runs", [[(80, 90)], [(33, 43)]])
def test_h2o_whose_prompt_nobody_knows_goes_by_the_query_that_asks(runs: list[tuple[int, int]]) -> None:
    """In every step, as nobody counts for ``oneshot`` but the prompt's queries."""
    method, tokens = H2O(mode="oneshot", recent=0.3), draw_tokens(runs[-1][1], 7)
    tokens.queries[: SHAPE.group_size] *= 0.5

    def worths_of(query: int, left: Tensor) -> tuple[Tensor, int]:
        stop, own = BUDGET.always(query, 1)[1], int(0.3 * BUDGET.units(query, 1))
        worths = weights(tokens, query, left & (torch.arange(tokens.length) < query))
        worths[:, stop - own :] = math.inf
        return worths, own

    visible = simulate(tokens, runs, SHAPE.num_kv_heads, BUDGET, worths_of)
    compare(method, BUDGET, tokens, runs, visible, joins=True)


@pytest.mark.parametrize("runs", RUNS, ids=NAMES)
@pytest.mark.parametrize("heads", ["kv", "query"])
@pytest.mark.parametrize(
    ("knobs", "budget"),
    [
        *product([{}, {"pooling": "max", "kernel": 7}, {"queries": 4}], BUDGETS),
        ({"kernel": 1, "queries": 70}, BUDGETS[1]),
    ],
)
def test_snapkv_keeps_the_most_votes_of_all_heads_or_of_each(
    budget: Budget, knobs: dict[str, object], heads: str, runs: list[tuple[int, int]]
) -> None:
    method = SnapKV(**{"queries": 12, "heads": heads, **knobs})  # type: ignore[arg-type]
    tokens, num_rows = uneven_tokens(runs[-1][1], 1), method.num_rows(SHAPE)
    first, votes = 0, torch.empty(0)

    def worths_of(query: int, left: Tensor) -> tuple[Tensor, int]:
        nonlocal first, votes
        if query in [start for start, _ in runs]:
            first = max(query - method.queries, 0)
            votes = vote(tokens, method, first, query, left)
        stop = BUDGET.always(query, 1)[1]
        return votes, max(stop - first, 0)

    compare(method, budget, tokens, runs, simulate(tokens, runs, num_rows, budget, worths_of))


def vote(tokens: Tokens, method: SnapKV, first: int, stop: int, left: Tensor) -> Tensor:
    """Of the queries first to stop for tokens that are left, bool [num_rows, num_tokens]: float64, alike. What nobody
    voted on is worth more, the newest most."""
    group = SHAPE.num_query_heads // len(left)
    total = torch.zeros(len(left), tokens.length, dtype=torch.float64)
    for query in range(first, stop):
        visible = (left & (torch.arange(tokens.length) <= query)).repeat_interleave(group, 0)
        total += softmax_over(tokens, query, visible, SHAPE).unflatten(0, (-1, group)).mean(1)
    votes = 1e6 + torch.arange(tokens.length, dtype=torch.float64).repeat(len(left), 1)
    for row, of_head in enumerate(left if first else []):
        before = of_head[:first].nonzero().flatten()
        near = torch.nn.functional.pad(total[row, before], (method.kernel // 2,) * 2).unfold(0, method.kernel, 1)
        votes[row, before] = near.mean(-1) if method.pooling == "avg" else near.amax(-1)
    return votes


@pytest.mark.parametrize("spec", ["h2o", "snapkv:queries=8", "snapkv:queries=8:heads=query"])
def test_heads_that_are_alike_share_alike(spec: str) -> None:
    drawn = draw_tokens(130, 0)
    tokens = Tokens(*(tensor[:1].expand_as(tensor) for tensor in drawn))
    outputs, selections = [], []
    for how in ("equal", "adaptive"):
        plan = parse_plan(f"decode={spec}:budget=30:sinks=2:window=6:dense_layers=none:head_budgets={how}")
        asked = spy(plan.decode.method)
        outputs.append(Runner(plan).feed_all(tokens, 90, range(90, 130)))
        selections.append([question.selection.units.tolist() for question in asked])
    assert selections[0] == selections[1]
    assert_same_answer(outputs[1], outputs[0], "heads that are alike differ")


@pytest.mark.parametrize("spec", ["h2o", "h2o:recent=0", "snapkv:queries=8"])
def test_going_back_behind_what_heads_dropped_is_as_if_nothing_had_been(spec: str) -> None:
    """To the prompt, of which nothing is gone, and to the midst of an answer, where heads have different numbers."""
    plan = parse_plan(f"decode={spec}:budget=30:sinks=2:window=6:dense_layers=none:head_budgets=adaptive")
    tokens, runner = uneven_tokens(112, 0), Runner(plan)
    runner.feed(tokens.part(0, 100))
    first = runner.feed(tokens.part(100), decode_tokens=30)[0]
    dropped = runner.attention.describe()[0]
    assert dropped["dropped_by_head"][0] != dropped["dropped_by_head"][1]
    assert sum(dropped["dropped_by_head"]) == 2 * dropped["dropped_tokens"] == 2 * (112 - 30)
    for length in (107, 100):
        runner.crop(0, length)
        said = runner.attention.describe()[0]
        assert said["dropped_tokens"] == (77 if length == 107 else 0)
        assert ("dropped_by_head" in said) == (length == 107)
        runner.feed(draw_tokens(9, 5), decode_tokens=9)
        runner.crop(0, length)
        again = runner.feed(tokens.part(length), decode_tokens=112 - length)[0]
        assert_same_answer(again, first[:, length - 100 :], "the way there left a trace")
