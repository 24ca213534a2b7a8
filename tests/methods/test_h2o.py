"""H2O keeps the tokens with the largest sum of weights over past queries, by KV head, and drops the lowest for good."""

import math

import pytest
import torch
from contracts.checks import masked_attention
from contracts.harness import SHAPE, Runner, draw_tokens
from methods.weighted import seen, softmax_over, weighted
from torch import Tensor

from kvsift.methods import h2o
from kvsift.methods.h2o import H2O
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule


def plan_of(method: H2O, tokens: int, sinks: int = 0, window: int = 1, phase: str = "decode") -> Plan:
    rule = Rule(method, Budget(tokens=tokens, sinks=sinks, window=window, dense_layers=()))
    return Plan(decode=rule) if phase == "decode" else Plan(prefill=rule)


# Weights of queries 0 to 4 over the tokens up to themselves; the last two are generated, and see three tokens each.
FIRST = [[1], [1 / 2, 1 / 2], [1 / 2, 1 / 4, 1 / 4], [1, 1, 1, 16], [1, 1, 1, 1, 1]]
OTHER = [[1], [1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3], [1, 1, 1, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("method", "heads", "expected"),
    [
        # Sums after the prompt: 1 + 1/2 + 1/2 = 2, 1/2 + 1/4 = 3/4, 1/4: token 2 goes. Query 3 gives 0, 1 and 3 the
        # weights 1/18, 1/18, 16/18: sums 2.06, 0.81, 0.89, and token 1 goes, although query 3 saw it.
        (H2O(recent=0), [FIRST], [[0, 1, 3], [0, 3, 4]]),
        # The other head adds 1 + 1/2 + 1/3, 1/2 + 1/3 and 1/3, then a third to each of 0, 1 and 3: sums 4.22, 1.97 and
        # 1.22, and token 3 goes, for both.
        (H2O(recent=0), [FIRST, OTHER], [[0, 1, 3], [0, 1, 4]]),
        # Half of two tokens to select are for the newest one: 2, then 3. The best other is 0.
        (H2O(recent=0.5), [FIRST, OTHER], [[0, 2, 3], [0, 3, 4]]),
        # Token 3 was generated: it stays, and token 1 with 0.75 makes room.
        (H2O(mode="oneshot", recent=0), [[*FIRST, [1] * 6]], [[0, 1, 3], [0, 3, 4], [3, 4, 5]]),
        # Query 3 stands in for those before it and keeps 0 and 2; what it then sees, 0, 2 and 3, is all that is
        # counted: 2/19, 1/19 and 16/19, so that 2 goes.
        (H2O(mode="decode_only", recent=0), [[*FIRST[:3], [2, 0.5, 1, 16], [1] * 5]], [[0, 2, 3], [0, 3, 4]]),
    ],
    ids=["lowest sum", "heads of a group are summed", "recent", "oneshot", "decode_only"],
)
def test_what_is_dropped_by_hand(method: H2O, heads: list[list[list[float]]], expected: list[list[int]]) -> None:
    shape, tokens = weighted(heads, num_kv_heads=1)
    assert seen(plan_of(method, 3), shape, tokens, 3) == [expected] * len(heads)


def test_in_prefill_a_segment_drops_for_the_tokens_before_it() -> None:
    """The third segment of 256 sees, beside its window, what the sums of all queries before say, those of the second
    one over what that one saw."""
    method, tokens = H2O(recent=0), draw_tokens(700, 3)
    budget = Budget(tokens=60, sinks=2, window=5, dense_layers=())
    answer = Runner(Plan(prefill=Rule(method, budget))).feed_all(tokens, 700)
    left = torch.ones(SHAPE.num_kv_heads, 700, dtype=torch.bool)
    sums = torch.zeros(SHAPE.num_kv_heads, 700, dtype=torch.float64)
    seen_by = torch.zeros(SHAPE.num_query_heads, 700, 700, dtype=torch.bool)
    for query in range(700):
        if query % 256 == 0 and query:
            _, stop = budget.always(query, 1)
            for head in range(SHAPE.num_kv_heads):
                others = [j for j in range(2, stop) if left[head, j]]
                others.sort(key=lambda j: (-float(sums[head, j]), j))
                left[head, others[budget.units(query, 1) :]] = False
        visible = (left & (torch.arange(700) <= query)).repeat_interleave(SHAPE.group_size, 0)
        seen_by[:, query] = visible
        weights = softmax_over(tokens, query, visible, SHAPE)
        sums += weights.unflatten(0, (SHAPE.num_kv_heads, SHAPE.group_size)).sum(1)
    torch.testing.assert_close(answer, masked_attention(tokens, seen_by), rtol=1e-4, atol=2e-5)


def test_column_sums_are_those_of_all_queries_at_once() -> None:
    """Over a prompt of several blocks, bit for bit the same whatever the chunks."""
    tokens = draw_tokens(334, 1)
    mask = torch.ones(334, 334, dtype=torch.bool).tril()
    keys = tokens.keys.double().repeat_interleave(SHAPE.group_size, 0)
    logits = (tokens.queries.double() @ keys.mT * SHAPE.scale).masked_fill(~mask, -torch.inf)
    expected = logits.softmax(-1).sum(1).unflatten(0, (SHAPE.num_kv_heads, -1)).sum(1)
    scores = []
    for cuts in ([333], [1, 40, 64, 200, 321, 333]):
        runner = Runner(plan_of(H2O(), 1000))
        runner.feed_all(tokens, 333, cuts)
        sums = runner.state().sums
        assert (sums.position, sums.counted) == (334, 334)
        scores.append(sums.scores[:, :334])
    torch.testing.assert_close(scores[0], expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores[0], scores[1]), "chunks changed the sums"


@pytest.mark.parametrize(("mode", "counted"), [("online", 75), ("oneshot", 70), ("decode_only", 5)])
def test_each_mode_counts_its_own_queries_while_all_is_visible_too(mode: str, counted: int) -> None:
    """A block of queries does not join prompt and generated tokens, not even when it is counted again."""
    runner = Runner(plan_of(H2O(mode=mode), 1000))  # type: ignore[arg-type]
    tokens = draw_tokens(80, 0)
    runner.feed_all(tokens, 70, range(70, 80))
    runner.crop(0, 74)
    runner.feed(tokens.part(74, 75), decode_tokens=1)
    assert runner.state().sums.counted == counted


def test_memory_grows_with_the_context_and_not_with_its_square() -> None:
    """No more weights than ``MAX_WEIGHTS`` are ever there at once."""
    most = 0
    counted = h2o.attention_weights

    def spied(*given: object) -> Tensor:
        nonlocal most
        weights = counted(*given)  # type: ignore[arg-type]
        most = max(most, weights.numel())
        return weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h2o, "attention_weights", spied)
        patch.setattr(h2o, "MAX_WEIGHTS", 4 * 500 * 7)
        Runner(plan_of(H2O(), 50)).feed_all(draw_tokens(501, 0), 500, [500])
    assert math.isclose(most, 4 * 500 * 7, rel_tol=0.2)
