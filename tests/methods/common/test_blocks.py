"""Two levels of page scores against the rule written out a block and a page at a time."""

from math import ceil

import pytest
import torch
from contracts.harness import Runner, Tokens, draw_tokens, spy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES, page_scores, summarise
from kvsift.methods.common.blocks import BlockRows
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Candidates, LayerShape

SHAPE = LayerShape(layer=2, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
SAYABLE = 8 * torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # by a row of minmax_fp8


def bounds(keys: Tensor, score_by: str) -> tuple[Tensor, Tensor]:
    """(smallest, largest) of each channel of keys [num_tokens, head_dim], as a summary remembers them."""
    low, high = keys.amin(0), keys.amax(0)
    if score_by == "minmax":
        return low, high
    return (
        torch.stack([SAYABLE[number >= SAYABLE].max() for number in low]),
        torch.stack([SAYABLE[number <= SAYABLE].min() for number in high]),
    )


def selection_by_hand(
    method: Quest, queries: Tensor, keys: Tensor, candidates: Candidates, num_pages: int
) -> list[list[int]]:
    """Pages each selecting head takes: queries [num_query_heads, head_dim], keys [num_kv_heads, num_tokens, head_dim].

    Block b is, with blocks of 16, pages 16 b to 16 b + 15. Those wholly inside the candidates are ranked by the bound
    over all their keys, and the best ceil(prefilter * pages / 16) are kept; those at the edges are kept anyhow.
    """
    size, per_block = method.page_size, method.block_pages
    shared = method.heads != "query"
    heads = [(0, 1), (2, 3)] if shared else [(0,), (1,), (2,), (3,)]

    def best(group: tuple[int, ...], first: int, stop: int) -> float:
        low, high = bounds(keys[group[0] // 2, first * size : stop * size], method.score_by)
        return max(float(torch.maximum(queries[head] * low, queries[head] * high).sum()) for head in group)

    chosen = []
    for group in heads:
        blocks = range(candidates.first // per_block, (candidates.stop - 1) // per_block + 1)
        edges = [(b, b * per_block, (b + 1) * per_block) for b in blocks]
        whole = [(b, *of) for b, *of in edges if of[0] >= candidates.first and of[1] <= candidates.stop]
        ranked = sorted(whole, key=lambda block: (-best(group, *block[1:]), block[0]))
        dropped = {b for b, *_ in ranked[ceil(method.prefilter * num_pages / per_block) :]}
        pages = [page for page in range(candidates.first, candidates.stop) if page // per_block not in dropped]
        chosen.append(sorted(sorted(pages, key=lambda page: (-best(group, page, page + 1), page))[:num_pages]))
    return chosen


def quest(**knobs: object) -> Quest:
    return Quest(**{"page_size": 2, **knobs})  # type: ignore[arg-type]


def last_step(method: Quest, budget: Budget, tokens: Tokens) -> tuple[Tensor, list, Runner]:
    """Answer to the last token of a sequence whose second last was decoded too, and what the method was asked."""
    asked = spy(method)
    runner = Runner(Plan(decode=Rule(method, budget)), shape=SHAPE)
    runner.feed_all(tokens.part(0, tokens.length - 1), tokens.length - 2, [tokens.length - 2])
    answer = runner.feed(tokens.part(tokens.length - 1), decode_tokens=1)[0]
    return answer, asked, runner


@settings(max_examples=60)
@given(
    length=st.integers(120, 400), seed=st.integers(0, 99), score_by=st.sampled_from(["minmax", "minmax_fp8"]),
    heads=st.sampled_from(["query", "kv"]), prefilter=st.sampled_from([1, 1.5, 2, 4]), units=st.integers(1, 20),
    block_pages=st.sampled_from([16, 5, 4]), sinks=st.integers(0, 70), window=st.integers(0, 70),
)  # fmt: skip
def test_the_best_blocks_are_kept_and_then_the_best_of_their_pages(
    length: int, seed: int, score_by: str, heads: str, prefilter: float, units: int, block_pages: int, sinks: int,
    window: int,
) -> None:  # fmt: skip
    method = quest(score_by=score_by, heads=heads, prefilter=prefilter, block_pages=block_pages)
    tokens = draw_tokens(length, seed, SHAPE)
    budget = Budget(tokens=sinks + window + 2 * units + 4, sinks=sinks, window=window, dense_layers=())
    _, asked, _ = last_step(method, budget, tokens)
    for question in asked:
        by_hand = selection_by_hand(
            method, tokens.queries[:, question.start], tokens.keys[:, : question.start + 1], question.candidates,
            question.limit.units,
        )  # fmt: skip
        assert question.selection.units.tolist() == by_hand


def bytes_to_select(runner: Runner) -> int:
    return runner.stats.report()["phases"]["decode"]["kv_bytes_to_select"]


@pytest.mark.parametrize("score_by", ["minmax", "minmax_fp8"])
@pytest.mark.parametrize(("heads", "num_heads"), [("kv", 2), ("query", 4)])
def test_bytes_are_merged_rows_and_the_rows_of_kept_blocks(score_by: str, heads: str, num_heads: int) -> None:
    """And, once per block, the rows it is merged from."""
    row = SUMMARIES[score_by].width(8) * (1 if score_by == "minmax_fp8" else 4)
    method = quest(score_by=score_by, heads=heads, prefilter=2)
    runner = Runner(Plan(decode=Rule(method, Budget(tokens=46, sinks=4, window=4, dense_layers=()))), shape=SHAPE)
    runner.feed(draw_tokens(323, 0, SHAPE))
    steps = []
    for seed in range(40):
        before = bytes_to_select(runner)
        runner.feed(draw_tokens(1, seed, SHAPE), decode_tokens=1)
        steps.append(bytes_to_select(runner) - before)
    # token 323, pages of 2: candidates are pages 2 to 159, so blocks 1 to 9 are whole and the first is there in part.
    # 18 pages are selected: ceil(2 * 18 / 16) = 3 blocks kept.
    merged, edges = 9, 14
    read = 2 * merged + num_heads * (edges + 3 * 16)
    assert steps[0] == row * (read + 2 * 10 * 16)  # ten blocks are merged, the first one with them
    assert steps[2] == row * (read + num_heads * 1)  # page 160 has joined the candidates
    whole = 2 * 10 + num_heads * (edges + 3 * 16)
    assert steps[32] == row * (whole + 2 * 16)  # pages 160 to 175 have become block 10, which is merged
    assert steps[33] == row * whole


@settings(max_examples=30)
@given(data=st.data())
def test_remembered_rows_are_those_of_the_store_whatever_happened(data: st.DataObject) -> None:
    """Growing, roll-backs and forks in any order; the page being filled is part of the last block that is asked for."""
    method = quest(prefilter=1)
    runner = Runner(Plan(decode=Rule(method, Budget(tokens=46, dense_layers=(), sinks=4, window=4))), shape=SHAPE)
    state = method.new_state(SHAPE)
    for seed in range(data.draw(st.integers(1, 8))):
        runner.feed(draw_tokens(data.draw(st.integers(1, 90)), seed, SHAPE))
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, runner.store.lengths[0]))
            runner.crop(0, length)
            state.crop(length)
        if data.draw(st.booleans()):
            before = state
            state = state.fork()
            before.crop(0)  # the origin goes its own way
        num_pages = -(-runner.store.lengths[0] // 2)
        stop = num_pages // 16
        start = data.draw(st.integers(0, max(stop - 1, 0)))
        if stop == 0:
            continue
        reader = runner.store.reader(0)
        rows = state.read(range(start, stop), reader)
        pages = reader.summary("minmax", slice(16 * start, 16 * stop)).unflatten(1, (-1, 16))
        expected = torch.cat([pages[..., :8].amax(2), pages[..., 8:].amin(2)], -1)
        assert torch.equal(rows, expected)
    assert isinstance(state, BlockRows)


def test_a_block_is_never_scored_below_a_page_of_it() -> None:
    keys = draw_tokens(320, 0, SHAPE).keys.unflatten(1, (-1, 2))  # [2, 160, 2, 8]
    queries = 3 * torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for kind, of in SUMMARIES.items():
        if of.merge is None:
            continue
        rows = summarise(kind, keys, torch.ones(160, 2, dtype=torch.bool))
        blocks = of.merge(rows.unflatten(1, (-1, 16)))
        assert blocks.dtype == rows.dtype
        below = page_scores(of.features(queries), rows).unflatten(2, (-1, 16)).amax(-1)
        assert bool((page_scores(of.features(queries), blocks) >= below - 1e-5).all())
