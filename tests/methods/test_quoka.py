"""QuoKA: which queries it keeps, how it scores keys, and what it remembers."""

from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Asked, Runner, Tokens, draw_tokens, poison, spy
from torch import Tensor

from kvsift.kernels.unlikeness import unlikeness
from kvsift.methods.common.token_rows import KeyNorms
from kvsift.methods.quoka import QuoKA, kept_queries, key_scores
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.paged import PagedStore

BUDGET = Budget(tokens=30, sinks=4, window=6, dense_layers=())
MODES: list[Any] = ["shared", "paired_sorted", "max_of_mean_exact"]


def test_queries_kept_by_rank_depend_on_what_each_head_asks() -> None:
    """Paired, the heads' first choices are averaged whatever they are: here the third query of one with the first of
    the other."""
    x, y = [1.0, 0], [0.0, 1]
    heads = torch.tensor([[x, x, y], [y, x, x]])
    assert kept_queries(heads, 1, 1, 1, "paired_sorted", cosine=True)[0].tolist() == [[[0, 1]]]
    assert kept_queries(heads, 1, 1, 1, "shared", cosine=True)[0].tolist() == [[[0.5, 0.5]]]  # a tie: the first of all
    exact = kept_queries(heads, 1, 1, 1, "max_of_mean_exact", cosine=True)[0]
    assert exact.tolist() == [[y, y]]
    keys = torch.tensor([[[0.0, 2]]])
    assert key_scores(exact, keys, None, "max", num_heads=2).tolist() == [[2.0]]


def textbook(method: QuoKA, queries: Tensor, keys: Tensor) -> Tensor:
    """Scores by the formulas, head by head and key by key, in float64: [num_kv_heads, num_keys]."""
    unit = (lambda t: t / t.norm(dim=-1, keepdim=True)) if method.score == "cosine" else (lambda t: t)
    reduce = (lambda t: t.amax(0)) if method.reduce == "max" else (lambda t: t.mean(0))
    rows = []
    for group, of in zip(queries.double().unflatten(0, (SHAPE.num_kv_heads, -1)), keys.double()):
        unlike = torch.stack([-torch.cosine_similarity(q.mean(0, keepdim=True), q, dim=-1) for q in group])
        if method.mode == "shared":
            unlike = unlike.mean(0, keepdim=True).expand_as(unlike)
        kept = [q[order[: method.queries]] for q, order in zip(group, unlike.argsort(1, descending=True))]
        similar = torch.stack([unit(q) @ unit(of).T for q in kept])  # [group_size, num_kept, num_keys]
        if method.mode == "max_of_mean_exact":
            rows.append(torch.stack([reduce(head) for head in similar]).mean(0))
        else:
            rows.append(reduce(similar.mean(0)))
    return torch.stack(rows)


def cached(keys: Tensor) -> Any:
    """What a method reads of a sequence."""
    store = PagedStore(SHAPE, 1, 4, keys)
    store.append(0, keys, keys)
    return store.reader(0)


def asked_in_prefill(method: QuoKA, tokens: Tokens, budget: Budget = BUDGET) -> tuple[list[Asked], Runner]:
    asked = spy(method)
    runner = Runner(Plan(prefill=Rule(method, budget)))
    runner.feed(tokens)
    return asked, runner


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("score", ["cosine", "dot"])
def test_the_selection_is_that_of_the_formulas(mode: Any, reduce: Any, score: Any) -> None:
    """Averaging unit queries before the product is averaging cosines after it: no mode but the exact one loses."""
    tokens = draw_tokens(150, 3)
    method = QuoKA(chunk=32, queries=5, mode=mode, reduce=reduce, score=score)
    asked, _ = asked_in_prefill(method, tokens)
    assert len(asked) == 4
    for question in asked:
        stop = question.start + question.num_queries
        scores = textbook(method, tokens.queries[:, question.start : stop], tokens.keys)
        best = scores[:, question.candidates.tokens].topk(question.limit.units).indices + question.candidates.first
        assert torch.equal(question.selection.units, best.sort(-1).values)


def test_a_needle_that_one_unusual_query_asks_for_is_found() -> None:
    tokens = draw_tokens(300, 0)
    tokens.queries[:, 256:] = torch.randn(8).abs() + 0.2 * tokens.queries[:, 256:]  # much alike, but for
    tokens.queries[:, 280] = -tokens.queries[:, 281]
    tokens.queries[1::2, 280] = tokens.queries[::2, 280]  # asked by both heads of a group
    tokens.keys[:, 50] = 0.1 * tokens.queries[::2, 280]  # short: by its product it would lose
    asked, _ = asked_in_prefill(QuoKA(chunk=64, queries=2), tokens)
    assert bool((asked[-1].selection.units == 50).any(1).all())


def test_queries_that_cancel_out_are_sampled_evenly() -> None:
    queries = torch.randn(4, 8, 8)
    queries[:, 4:] = -queries[:, :4]
    unlike = unlikeness(queries, 1, 3)
    assert unlike[0, 0].tolist() == [1, -1, -1, 1, -1, -1, 1, -1]
    kept = kept_queries(queries, 1, 4, 3, "paired_sorted", cosine=False)[0]
    torch.testing.assert_close(kept, queries[:, [0, 3, 6]])
    assert not kept_queries(torch.zeros(4, 8, 8), 1, 2, 3, "shared", cosine=True).isnan().any()


def test_segments_at_once_keep_what_each_keeps_alone() -> None:
    queries = torch.randn(4, 3 * 32, 8)
    for mode in MODES:
        together = kept_queries(queries, 3, 2, 5, mode, cosine=True)
        for alone, own in zip(queries.split(32, 1), together, strict=True):
            torch.testing.assert_close(own, kept_queries(alone, 1, 2, 5, mode, cosine=True)[0])


def test_inverse_norms_are_those_of_the_keys_however_they_came() -> None:
    keys = torch.randn(2, 70, 8)
    keys[:, 5] = 0
    expected = 1 / keys.norm(dim=-1).clamp_min(1e-6)
    norms, reader = KeyNorms(), cached(keys)
    for start, stop in ((0, 1), (0, 2), (1, 40), (40, 60)):
        torch.testing.assert_close(norms.norms(reader, start, stop), expected[:, start:stop])
    other, longer = norms.fork(), torch.cat([keys[:, :60], 2 * keys[:, 60:]], 1)
    torch.testing.assert_close(norms.norms(cached(longer), 50, 70), other.norms(cached(longer), 50, 70))
    norms.crop(50)
    torch.testing.assert_close(norms.norms(reader, 0, 70), expected)
    torch.testing.assert_close(other.norms(cached(longer), 60, 70), expected[:, 60:] / 2)
    torch.testing.assert_close(norms.norms(reader, 60, 70), expected[:, 60:])
    assert not norms.norms(reader, 0, 70).isinf().any()


@pytest.mark.parametrize("mode", MODES)
def test_a_generous_prefilter_changes_nothing_and_a_tight_one_reads_less(mode: Any) -> None:
    tokens = draw_tokens(400, 2)
    plain, runner = asked_in_prefill(QuoKA(chunk=64, mode=mode), tokens)
    loose, _ = asked_in_prefill(QuoKA(chunk=64, mode=mode, prefilter=99, page_size=4), tokens)
    tight, frugal = asked_in_prefill(QuoKA(chunk=64, mode=mode, prefilter=1, page_size=4), tokens)
    assert all(torch.equal(a.selection.units, b.selection.units) for a, b in zip(plain, loose))
    for question in tight:
        units = question.selection.units
        whole = range(2, question.candidates.stop // 4)  # candidates begin at token 4
        pages = {int(unit) // 4 for unit in units[0]} & set(whole)
        assert len(pages) <= -(-question.limit.units // 4), "more pages were read than were to be kept"
    read, less = (of.stats.phase("prefill").index_bytes_read for of in (runner, frugal))
    assert less < read


def test_a_prefilter_finds_the_page_of_a_needle_among_longer_keys() -> None:
    """The summaries bound products; what is compared are bounds over the lengths of the page's keys."""
    tokens = draw_tokens(400, 0)
    tokens.queries[:, 384:] = tokens.queries[::2, 384:385].repeat_interleave(2, 0)
    tokens.keys[:] = 20 * tokens.keys[:, ::4].repeat_interleave(4, 1)  # alike within a page: their bounds are tight
    tokens.keys[:, 48:52] = 0.01 * tokens.queries[::2, 384:385]
    asked, _ = asked_in_prefill(QuoKA(chunk=64, prefilter=1, page_size=4, queries=1), tokens)
    assert all({48, 49, 50, 51} <= set(row) for row in asked[-1].selection.units.tolist())


def test_norms_follow_a_plan_that_changes() -> None:
    tokens = draw_tokens(160, 0)
    plan = Plan(prefill=Rule(QuoKA(chunk=32), BUDGET))
    runner = Runner(Plan())
    runner.feed(tokens.part(0, 96))
    runner.attention.replan(plan)
    poison(runner.store)
    method = plan.prefill.method  # type: ignore[union-attr]
    asked = spy(method)
    runner.feed(tokens.part(96))
    scores = textbook(method, tokens.queries[:, 96:128], tokens.keys)  # type: ignore[arg-type]
    best = scores[:, asked[0].candidates.tokens].topk(asked[0].limit.units).indices + asked[0].candidates.first
    assert torch.equal(asked[0].selection.units, best.sort(-1).values)
