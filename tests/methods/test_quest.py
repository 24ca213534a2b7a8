"""Quest against an independent reading of the paper and of its public code, a page and a head at a time."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contracts.harness import Runner, Tokens, draw_tokens, spy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.errors import Conflict
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import make_rule
from kvsift.types import Candidates, LayerShape

MHA = LayerShape(layer=2, num_query_heads=4, num_kv_heads=4, head_dim=8, scale=8**-0.5)
GQA = MHA._replace(num_kv_heads=2)


def reference(tokens: Tokens, shape: LayerShape, page_size: int, num_pages: int, current_is_forced: bool) -> Tensor:
    """One decode step of Quest for the last token: each query head keeps ``num_pages`` pages by the sum over channels
    of max(q_c * min_c, q_c * max_c). In the paper every page competes, the partial last one too; in the public kernels
    the page being written is always kept, counts, and is never scored."""
    outputs = []
    for head in range(shape.num_query_heads):
        query = tokens.queries[head, -1]
        keys, values = (t[head // shape.group_size].split(page_size) for t in (tokens.keys, tokens.values))
        upper = [float(torch.maximum(query * page.amin(0), query * page.amax(0)).sum()) for page in keys]
        if current_is_forced:
            upper[-1] = torch.inf
        kept = sorted(range(len(keys)), key=lambda page: upper[page], reverse=True)[:num_pages]
        k, v = (torch.cat([pages[page] for page in sorted(kept)]) for pages in (keys, values))
        outputs.append((query @ k.T * shape.scale).softmax(-1) @ v)
    return torch.stack(outputs)


def last_step(tokens: Tokens, shape: LayerShape, **settings: object) -> tuple[Tensor, Runner]:
    rule = make_rule("quest", {"dense_layers": (), **settings})
    runner = Runner(Plan(decode=rule), shape=shape)
    runner.feed(tokens.part(0, tokens.length - 1))
    return runner.feed(tokens.part(tokens.length - 1), decode_tokens=1)[0][:, 0], runner


@pytest.mark.parametrize("shape", [MHA, GQA], ids=["every head its own", "two query heads per KV head"])
@pytest.mark.parametrize("compat", ["paper", "code"])
@settings(max_examples=40)
@given(
    length=st.integers(2, 120), num_pages=st.integers(3, 6), page_size=st.sampled_from([4, 16]), seed=st.integers(0, 99)
)
def test_compat_does_what_the_paper_and_its_code_do(
    shape: LayerShape, compat: str, length: int, num_pages: int, page_size: int, seed: int
) -> None:
    tokens = draw_tokens(length, seed, shape)
    answer, _ = last_step(tokens, shape, compat=compat, page_size=page_size, budget=num_pages * page_size)
    expected = reference(tokens, shape, page_size, num_pages, current_is_forced=compat == "code")
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


def test_the_page_being_filled_may_lose_in_the_paper_and_never_in_the_code() -> None:
    tokens = draw_tokens(50, 0, MHA)
    tokens.keys[:, 48:] = -10 * tokens.queries[:, 49:]  # as far from the query as can be
    tokens.values[:, 48:] = 1000.0
    wide = tokens._replace(keys=tokens.keys.clamp(-100, 100))
    paper, _ = last_step(wide, MHA, compat="paper", page_size=16, budget=32)
    assert float(paper.abs().max()) < 100
    _, runner = last_step(wide, MHA, compat="code", page_size=16, budget=32)
    assert runner.stats.phase("decode").report()["visible_tokens"] == 18  # one scored page and the two tokens


@pytest.mark.parametrize("budget", [46, 47, 1024])
@pytest.mark.parametrize("compat", ["paper", "code"])
def test_a_budget_above_the_context_drops_no_page(compat: str, budget: int) -> None:
    """The public code rounds budget/page_size down and so drops the newest page of a short context."""
    tokens = draw_tokens(46, 0, MHA)
    answer, _ = last_step(tokens, MHA, compat=compat, page_size=16, budget=budget)
    every = reference(tokens, MHA, 16, 99, current_is_forced=False)
    torch.testing.assert_close(answer, every, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score_by", ["minmax", "mean_std", "centroid_radius", "log_mass"])
@pytest.mark.parametrize("heads", ["query", "kv", "auto"])
def test_heads_that_share_take_the_pages_their_best_head_wants(heads: str, score_by: str) -> None:
    tokens = draw_tokens(80, 3, GQA)
    answer, _ = last_step(tokens, GQA, page_size=4, budget=24, sinks=0, window=4, heads=heads, score_by=score_by)
    window_start = 76
    outputs = []
    scores = torch.stack([_scores(tokens, head, score_by) for head in range(4)])[:, : window_start // 4]
    if heads != "query":
        scores = scores.view(2, 2, -1).amax(1).repeat_interleave(2, 0)
    for head in range(4):
        pages = scores[head].topk(5).indices.sort().values
        chosen = torch.cat([(pages[:, None] * 4 + torch.arange(4)).flatten(), torch.arange(window_start, 80)])
        k, v = tokens.keys[head // 2][chosen], tokens.values[head // 2][chosen]
        outputs.append((tokens.queries[head, -1] @ k.T * GQA.scale).softmax(-1) @ v)
    torch.testing.assert_close(answer, torch.stack(outputs), rtol=1e-4, atol=1e-5)


def _scores(tokens: Tokens, head: int, score_by: str) -> Tensor:
    query, pages = tokens.queries[head, -1] * GQA.scale, torch.stack(tokens.keys[head // 2].split(4))
    mean, std = pages.mean(1), pages.std(1, unbiased=False)
    if score_by == "minmax":
        return torch.maximum(query * pages.amin(1), query * pages.amax(1)).sum(-1)
    if score_by == "mean_std":
        return mean @ query + std @ query.abs()
    if score_by == "log_mass":
        return mean @ query + std.square() @ query.square() / 2
    return mean @ query + query.norm() * (pages - mean[:, None]).norm(dim=-1).amax(-1)


@pytest.mark.parametrize("score_by", ["minmax", "centroid_radius"])
def test_the_page_with_the_largest_logit_is_found_when_bounds_are_tight(score_by: str) -> None:
    """A needle: one key that a query wants, far above the rest, in pages whose tokens agree."""
    tokens = draw_tokens(160, 5, GQA)
    pages = tokens.keys.view(2, -1, 16, 8)
    pages += (pages.mean(2, keepdim=True) - pages) * 0.99
    tokens.keys[:, 55] = 3 * tokens.queries[::2, -1]
    answer, _ = last_step(tokens, GQA, page_size=16, budget=40, sinks=0, window=4, score_by=score_by, heads="query")
    for head in (0, 2):
        torch.testing.assert_close(answer[head], tokens.values[head // 2, 55], rtol=0.01, atol=0.05)


@dataclass(frozen=True)
class OldestFirst(Quest):
    """Whose score no summary has."""

    page_size: int = 4

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, *more: Any
    ) -> Tensor:
        return -torch.arange(float(candidates.count)).expand(shape.num_query_heads, queries.shape[1], -1)


def test_a_subclass_is_ranked_by_its_own_score() -> None:
    method = OldestFirst()
    asked = spy(method)
    plan = Plan(decode=Rule(method, Budget(tokens=24, sinks=0, window=4, dense_layers=())))
    Runner(plan).feed_all(draw_tokens(82, 1), 80, [80, 81])
    assert len(asked) == 2
    for question in asked:
        chosen = question.selection.units
        assert torch.equal(chosen, torch.arange(chosen.shape[1]).expand_as(chosen))


def test_a_subclass_with_its_own_score_takes_no_prefilter() -> None:
    with pytest.raises(Conflict, match="has its own score"):
        OldestFirst(prefilter=8)
