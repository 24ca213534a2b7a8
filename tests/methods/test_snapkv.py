"""SnapKV keeps the tokens that the last queries of the prompt vote for, and generated tokens while there is room."""

from methods.weighted import seen, weighted

from kvsift.methods.snapkv import SnapKV
from kvsift.plan.budget import Budget
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


def test_compat_brings_knobs_and_budget() -> None:
    code, paper = (parse_plan(f"snapkv:compat={compat}").decode for compat in ("code", "paper"))
    assert code.method == SnapKV(heads="query", compat="code")
    assert code.budget == Budget(tokens=321, sinks=0, window=65, dense_layers=())
    assert paper.method == SnapKV(queries=32, kernel=7, pooling="max", heads="query", compat="paper")
    assert paper.budget == Budget(tokens=4097, sinks=0, window=33, dense_layers=())
