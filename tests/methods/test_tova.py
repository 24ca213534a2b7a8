"""TOVA keeps the tokens that the query before weighs most, by the mean of all heads, and drops the others for good."""

import pytest
from contracts.harness import SHAPE, draw_tokens
from methods.weighted import compare, seen, simulate, softmax_over, weighted
from torch import Tensor

from kvsift.methods.tova import TOVA
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

# Weights of queries 0 to 4, of two KV heads; 3 and 4 are generated. Query 3 sees no token 1, whatever its weight.
FIRST = [[1], [1, 1], [0.50, 0.25, 0.25], [2, 9, 1, 1], [1] * 5]
OTHER = [[1], [1, 1], [0.10, 0.30, 0.60], [5, 9, 4, 1], [1] * 5]


def plan_of(spec: str) -> Plan:
    return parse_plan(f"decode={spec}")


@pytest.mark.parametrize(
    ("compat", "expected"),
    [
        # Query 2: means 0.3, 0.275, 0.425, so token 1 goes. Query 3 over 0, 2 and 3: (0.5 + 0.5) / 2,
        # (0.25 + 0.4) / 2, (0.25 + 0.1) / 2 = 0.5, 0.325, 0.175, so the newest goes, token 3.
        ("paper", [[0, 2, 3], [0, 2, 4]]),
        # With one token to select beside the newest and the query's own: 0 with 0.3, then 0 with 0.5.
        ("code", [[0, 2, 3], [0, 3, 4]]),
    ],
)
def test_the_mean_over_heads_decides_for_all_of_them(compat: str, expected: list[list[int]]) -> None:
    shape, tokens = weighted([FIRST, OTHER], num_kv_heads=2)
    assert seen(plan_of(f"tova:compat={compat}:budget=3"), shape, tokens, 3) == [expected] * 2


def test_compat_brings_its_budget() -> None:
    for compat, window in (("paper", 1), ("code", 2)):
        rule = parse_plan(f"tova:compat={compat}").decode
        assert rule.budget == Budget(tokens=513, sinks=0, window=window, dense_layers=())


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (0, 2), (3, 6)])
def test_it_sees_what_the_formula_says(sinks: int, window: int) -> None:
    budget, tokens = Budget(tokens=30, sinks=sinks, window=window, dense_layers=()), draw_tokens(95, 5)

    def worths_of(query: int, left: Tensor) -> tuple[Tensor, int]:
        return softmax_over(tokens, query - 1, left.expand(SHAPE.num_query_heads, -1), SHAPE).mean(0, keepdim=True), 0

    compare(TOVA(), budget, tokens, [(80, 95)], simulate(tokens, [(80, 95)], 1, budget, worths_of))
