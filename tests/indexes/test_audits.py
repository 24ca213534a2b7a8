"""Audits notice what a graph misses, widen the heads that miss it, and are undone by a roll-back."""

import pytest
import torch
from methods.weighted import Keys

from kvsift import native
from kvsift.indexes.audits import WIDER, WIDEST, Audits, is_due
from kvsift.indexes.graph import GraphIndex
from kvsift.methods.common.indexed_keys import IndexedKeys, IndexedSpan
from kvsift.methods.retrieval_attention import RetrievalAttention
from kvsift.types import Candidates, LayerShape, Limit

needs_core = pytest.mark.skipif(not native.available(), reason=f"no compiled core: {native.why_missing()}")


def test_steps_are_audited_often_at_first_and_then_evenly() -> None:
    due = [tokens for tokens in range(200) if is_due(tokens, 64)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert not any(is_due(tokens, 0) for tokens in range(200))
    assert [tokens for tokens in range(-1, 8) if is_due(tokens, 3)] == [0, 1, 2, 3, 6]


def test_heads_that_miss_too_much_search_wider_and_the_others_do_not() -> None:
    audits, exact = Audits(), torch.arange(20).repeat(4, 1)  # 2 KV heads of 2 query heads
    ids = exact.clone()
    ids[1, 10:] = -1  # KV head 0 found 30 of its 40
    audits.take(100, ids, exact, 2)  # KV head 1 found all
    assert audits.log[0].found == pytest.approx((0.75, 1.0))
    assert audits.widths == (WIDER, 1.0)
    assert audits.failed
    for length in range(101, 120):
        audits.take(length, ids, exact, 2)
    assert audits.widths == (WIDEST, 1.0)
    audits.take(120, exact, exact, 2)
    assert not audits.failed
    assert audits.widths == (WIDEST, 1.0)


def test_a_roll_back_undoes_audits_and_a_fork_has_its_own() -> None:
    audits, exact = Audits(), torch.arange(4).repeat(2, 1)
    audits.take(10, exact - 4, exact, 1)
    fork = audits.fork()
    audits.take(11, exact - 4, exact, 1)
    assert audits.widths == (WIDER**2,)
    assert fork.widths == (WIDER,)
    audits.crop(10)
    assert audits.widths == (WIDER,)
    audits.crop(9)
    assert audits.widths is None


@needs_core
def test_an_audited_step_is_exact_and_the_next_ones_search_wider() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 600, 16, generator=generator)
    links = torch.randint(600, (1, 600, 8), generator=generator, dtype=torch.int32)
    graph = GraphIndex(links, links[:, :8, 0].contiguous(), [0], [10], {})  # finds little
    shape = LayerShape(layer=2, num_query_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    method, state = (
        RetrievalAttention(index="graph", beam=10),
        IndexedKeys(RetrievalAttention().new_state(shape).recorder),
    )
    state.spans = [IndexedSpan(graph, 0, 600, 600, "for the test")]
    reader = Keys(keys)
    queries = torch.randn(2, 1, 16, generator=generator)
    chosen = method.select(state, shape, queries, 600, Candidates(0, 600, 1), Limit(10), reader)
    exact = (queries[:, 0] @ keys[0].T).topk(10).indices.sort(-1).values
    assert torch.equal(chosen.units, exact)
    assert graph.widened == [15]
    assert method.describe(state)["audits"]["count"] == 1
    state.crop(600)  # the audit was at this length: it stays
    assert graph.widened == [15]
    state.audits.crop(599)
    state.widen()
    assert graph.widened == [10]
