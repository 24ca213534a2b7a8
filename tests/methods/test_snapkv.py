"""SnapKV keeps the tokens that the last queries of the prompt vote for, and generated tokens while there is room."""

from __future__ import annotations

import pytest
import torch
from contracts.checks import masked_attention
from contracts.harness import SHAPE, Runner, Tokens, draw_tokens
from methods.weighted import seen, softmax_over, weighted
from refusals import refused
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvsift.methods.snapkv import SnapKV
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan

# A prompt of six tokens whose last two queries vote on the first four.
QUIET = [[1] * (i + 1) for i in range(4)]
FIRST = [*QUIET, [0.4, 0.1, 0.1, 0.2, 0.2], [0.2, 0.1, 0.3, 0.1, 0.1, 0.2]]
OTHER = [*QUIET, [0.1, 0.1, 0.1, 0.5, 0.2], [0.1, 0.1, 0.1, 0.3, 0.2, 0.2]]
GENERATED = [[1] * i for i in range(7, 11)]


def first_step(knobs: str) -> list[list[int]]:
    """What each head sees of the prompt at the first step, with room for two of the first four tokens."""
    shape, tokens = weighted([[*FIRST, *GENERATED[:1]], [*OTHER, *GENERATED[:1]]], num_kv_heads=1)
    plan = parse_plan(f"decode=snapkv:queries=2:budget=5:sinks=0:window=3:dense_layers=none:{knobs}")
    return [head[0] for head in seen(plan, shape, tokens, 6)]


def test_votes_are_summed_pooled_and_averaged_over_the_group() -> None:
    """By hand. Sums over the two queries: 0.6, 0.2, 0.4, 0.3 and 0.2, 0.2, 0.2, 0.8; means 0.4, 0.2, 0.3, 0.55. Pooled
    over three with zeros beyond the ends: 0.2, 0.3, 0.35, 0.283."""
    assert first_step("kernel=3") == [[1, 2, 4, 5, 6]] * 2
    assert first_step("kernel=1") == [[0, 3, 4, 5, 6]] * 2
    assert first_step("kernel=3:pooling=max") == [[2, 3, 4, 5, 6]] * 2  # 0.4, 0.4, 0.55, 0.55


def test_each_query_head_may_vote_for_itself() -> None:
    """Pooled 0.267, 0.4, 0.3, 0.233 and 0.133, 0.2, 0.4, 0.333."""
    assert first_step("kernel=3:heads=query") == [[1, 2, 4, 5, 6], [2, 3, 4, 5, 6]]


def test_generated_tokens_take_the_place_of_the_fewest_votes() -> None:
    """Of 1 (0.3) and 2 (0.35), 1 makes room for 4 as it leaves the window, then 2 for 5, then 4, the oldest, for 6."""
    shape, tokens = weighted([[*FIRST, *GENERATED], [*OTHER, *GENERATED]], num_kv_heads=1)
    plan = parse_plan("decode=snapkv:queries=2:kernel=3:budget=5:sinks=0:window=3:dense_layers=none")
    expected = [[1, 2, 4, 5, 6], [2, 4, 5, 6, 7], [4, 5, 6, 7, 8], [5, 6, 7, 8, 9]]
    assert seen(plan, shape, tokens, 6) == [expected] * 2


def test_another_prompt_votes_anew_over_what_is_left() -> None:
    """Five tokens see prompt, generated tokens and prompt again; the votes of the second one's queries decide, and what
    was dropped before stays so."""
    method = SnapKV(queries=4, kernel=3)
    budget = Budget(tokens=30, sinks=2, window=5, dense_layers=())
    tokens, shape = draw_tokens(140, 4), SHAPE
    runner = Runner(Plan(decode=Rule(method, budget)))
    runner.feed_all(tokens.part(0, 70), 60, range(60, 70))
    dropped_first = ~left_of(runner, 70)
    runner.feed(tokens.part(70, 139))
    answer = runner.feed(tokens.part(139), decode_tokens=1)[0]
    left = ~torch.nn.functional.pad(dropped_first, (0, 70))
    kept = vote(tokens, 139, left & (torch.arange(140) < 139), method, budget)
    mask = (kept | (torch.arange(140) == 139)).repeat_interleave(shape.group_size, 0).unsqueeze(1)
    torch.testing.assert_close(answer, masked_attention(tokens, mask), rtol=1e-4, atol=2e-5)


def left_of(runner: Runner, length: int) -> Tensor:
    drops = runner.state().drops
    return torch.zeros(SHAPE.num_kv_heads, length, dtype=torch.bool).scatter_(
        1, drops.left(length, torch.device("cpu")), True
    )


def vote(tokens: Tokens, start: int, left: Tensor, method: SnapKV, budget: Budget) -> Tensor:
    """What is left for the query at ``start``, the slow way: bool [num_kv_heads, num_tokens]; left the same."""
    first = start - method.queries
    group, total = SHAPE.group_size, torch.zeros(SHAPE.num_query_heads, tokens.length, dtype=torch.float64)
    for query in range(first, start):
        visible = (left & (torch.arange(tokens.length) <= query)).repeat_interleave(group, 0)
        total += softmax_over(tokens, query, visible, SHAPE)
    total = total.unflatten(0, (-1, group)).mean(1)
    kept = left.clone()
    for head in range(len(left)):
        before = left[head, :first].nonzero().flatten()
        numbers = total[head, before]
        padded = torch.nn.functional.pad(numbers, (method.kernel // 2,) * 2)
        pooled = padded.unfold(0, method.kernel, 1).mean(-1)
        if method.pooling == "max":
            pooled = max_pool1d(numbers[None], method.kernel, 1, method.kernel // 2)[0]
        ranks = dict(zip(before.tolist(), pooled.tolist()))
        _, stop = budget.always(start, 1)
        others = [j for j in range(budget.sinks, stop) if left[head, j]]
        others.sort(key=lambda j: (-ranks.get(j, 1e9 + j), j))
        kept[head, others[budget.units(start, 1) :]] = False
    return kept


@pytest.mark.parametrize("knobs", [{}, {"pooling": "max", "kernel": 7}, {"kernel": 1, "queries": 70}])
def test_it_sees_what_the_formula_says(knobs: dict[str, object]) -> None:
    method = SnapKV(**{"queries": 12, **knobs})  # type: ignore[arg-type]
    budget, tokens = Budget(tokens=30, sinks=3, window=6, dense_layers=()), draw_tokens(91, 5)
    answer = Runner(Plan(decode=Rule(method, budget))).feed_all(tokens, 90, [17, 85, 90])
    kept = vote(tokens, 90, (torch.arange(91) < 90).expand(SHAPE.num_kv_heads, -1), method, budget)
    mask = (kept | (torch.arange(91) == 90)).repeat_interleave(SHAPE.group_size, 0).unsqueeze(1)
    torch.testing.assert_close(answer[:, 90:], masked_attention(tokens, mask), rtol=1e-4, atol=2e-5)


def test_compat_brings_knobs_and_budget() -> None:
    code, paper = (parse_plan(f"snapkv:compat={compat}").decode for compat in ("code", "paper"))
    assert code is not None
    assert paper is not None
    assert code.method == SnapKV(heads="query", compat="code")
    assert code.budget == Budget(tokens=321, sinks=0, window=65, dense_layers=())
    assert paper.method == SnapKV(queries=32, kernel=7, pooling="max", heads="query", compat="paper")
    assert paper.budget == Budget(tokens=4097, sinks=0, window=33, dense_layers=())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("snapkv:kernel=4", "invalid_value"),
        ("snapkv:queries=0", "invalid_value: 1 or more"),
        ("snapkv:pooling=sum", "invalid_value: 'avg' or 'max'"),
        ("snapkv:heads=layer", "invalid_value: 'kv' or 'query'"),
        ("snapkv:compat=both", "invalid_value: 'paper', 'code' or left out"),
        ("snapkv:evict=true:heads=query", "conflict"),
        ("snapkv:evict=true:compat=code", "conflict"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(spec: str, words: str) -> None:
    with refused(words):
        parse_plan(spec)
