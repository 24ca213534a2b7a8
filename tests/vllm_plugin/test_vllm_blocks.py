"""A cache in vLLM's blocks: found layout, page summaries, and sparse attention as over kvsift's own store."""

from __future__ import annotations

import pytest
import torch
from refusals import refused

from kvsift.kernels.page_summary import summarise
from kvsift.layer.accounting import RunStats, Tally
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.common.anchors import AnchorMap, Reuse, write
from kvsift.plan.syntax import parse_plan
from kvsift.types import Chunk, LayerShape
from kvsift.vllm.block_cache import BlockCache, BlockLayout, attend_token

HEADS, DIM, BLOCK = 2, 32, 32
SHAPE = LayerShape(3, 4, HEADS, DIM, DIM**-0.5)


def transposed(keys, values, cache, slots):
    """Write as vLLM's CPU kernels do: keys transposed within a block, in the first half of it."""
    halves = cache.view(*cache.shape[:2], 2, -1)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, cache.shape[2])
        halves[block, :, 0].view(HEADS, DIM, -1)[:, :, offset] = keys[token]
        halves[block, :, 1].view(HEADS, -1, DIM)[:, offset] = values[token]


def interleaved(keys, values, cache, slots):
    """Write as on a GPU: key and value of a token side by side."""
    for token, slot in enumerate(slots.tolist()):
        cache[slot // cache.shape[2], :, slot % cache.shape[2]] = torch.cat([keys[token], values[token]], -1)


def filled(write, length, summaries, step=None, dtype=torch.float32):
    """A cache that holds a sequence in scattered blocks, the sequence's blocks, its keys and values."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, length, HEADS, DIM, generator=generator).to(dtype)
    kv = torch.zeros(12, HEADS, BLOCK, 2 * DIM, dtype=dtype)
    blocks = torch.tensor([7, 2, 9, 3, 11, 5])[: -(-length // BLOCK)]
    cache = BlockCache(kv, BlockLayout.find(kv, write), summaries)
    positions = torch.arange(length)
    slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
    for first in range(0, length, step or length):
        part = slice(first, first + (step or length))
        write(keys[part], values[part], kv, slots[part])
        cache.summarise(torch.cat([slots[part], torch.tensor([-1])]))  # padding, as vLLM adds
    return cache, blocks, keys.transpose(0, 1), values.transpose(0, 1)


@pytest.mark.parametrize("write", [transposed, interleaved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_whatever_the_layout(write, dtype):
    cache, blocks, keys, values = filled(write, 150, (), dtype=dtype)
    reader = cache.reader(blocks, 150, 16)
    assert torch.equal(reader.keys(), keys)
    assert torch.equal(reader.values(37, 101), values[:, 37:101])
    chosen = torch.tensor([[0, 3, 8], [1, 2, 5]])
    for found, all_tokens in zip(reader.gather(chosen, 16), (keys, values)):
        whole = torch.stack([all_tokens[head].split(16)[page] for head in range(2) for page in chosen[head]])
        assert torch.equal(found.flatten(0, 1), whole.flatten(0, 1))


def test_a_layout_that_loses_numbers_is_refused():
    def overwrites(keys, values, cache, slots):
        transposed(keys, keys, cache, slots)

    with refused("unsupported_call"):
        BlockLayout.find(torch.zeros(4, HEADS, BLOCK, 2 * DIM), overwrites)


@pytest.mark.parametrize("kind", ["minmax", "minmax_fp8", "sketch1"])
@pytest.mark.parametrize("step", [1, 23, 150])  # decode, chunks across pages, a whole prompt
def test_summaries_do_not_depend_on_how_tokens_came(kind, step):
    cache, blocks, keys, values = filled(transposed, 150, ((kind, 16),), step)
    reader = cache.reader(blocks, 150, 16)
    pages = [tensor[:, :144].unflatten(1, (-1, 16)).contiguous() for tensor in (keys, values)]
    expected = summarise(kind, pages[0], None, pages[1])
    assert torch.equal(reader.summary(kind, slice(0, 9)).float(), expected.float())
    assert torch.equal(reader.summary_in_place(kind, slice(1, 8)).gather().float(), expected[:, 1:8].float())


def test_a_block_that_is_used_again_forgets_its_first_request():
    cache, blocks, _, _ = filled(transposed, 32, (("minmax", 16),))
    low = -100 - torch.rand(3, HEADS, DIM)
    slots = blocks[0] * BLOCK + torch.arange(3)
    transposed(low, low, cache.kv, slots)
    cache.summarise(slots)
    row = cache.reader(blocks, 3, 16).summary("minmax", slice(0, 1))[:, 0]
    assert torch.equal(row, torch.cat([low.amax(0), low.amin(0)], -1))


@pytest.mark.parametrize("plan", ["quest:budget=112", "sketch:budget=80", "sketch:budget=72:rest=false"])
@pytest.mark.parametrize("length", [130, 150, 161])
def test_a_token_is_attended_as_over_the_store_of_kvsift(plan, length):
    rule = parse_plan(plan).decode
    summaries = ((rule.method.summaries[0], 16),)
    cache, blocks, keys, values = filled(transposed, length, summaries)
    query = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    own = SparseAttention(SHAPE, parse_plan(plan), 1, keys, RunStats(1))
    padding = torch.zeros(1, 4, length - 1, DIM)
    own.take(Chunk(padding, keys[None, :, :-1], values[None, :, :-1], [length - 1]))
    expected = own.attend(Chunk(query[None, :, None], keys[None, :, -1:], values[None, :, -1:], [1]), 1)
    tally, expected_tally = Tally(), own.stats.phase("decode")
    attended = attend_token(SHAPE, rule, query, cache, blocks, length, tally, is_probed=True)
    torch.testing.assert_close(attended, expected[0, :, 0], atol=1e-5, rtol=1e-5)
    counted = "queries", "sparse_queries", "context_tokens", "visible_tokens", "kv_bytes_dense"
    assert [getattr(tally, name) for name in counted] == [getattr(expected_tally, name) for name in counted]
    assert expected_tally.probes == (expected_tally.sparse_queries > 0)
    assert tally.recovery == pytest.approx(expected_tally.recovery if expected_tally.probes else 1, abs=1e-5)
    assert tally.index_bytes_read > 0


def test_a_layer_attends_what_its_anchor_selected_for_the_heads_it_maps(tmp_path):
    reuse = Reuse(3, (1, 0), 1.0)
    write(tmp_path / "anchors.json", AnchorMap(("tiny", [1.0]), (3,), {5: reuse}, (), {}))
    rule, length = parse_plan(f"sketch:budget=80:anchors={tmp_path / 'anchors.json'}").decode, 150
    selecting, blocks, keys, values = filled(transposed, length, (("sketch1", 16),))
    reusing = BlockCache(selecting.kv, selecting.layout, ())  # selects nothing
    queries = torch.randn(2, 2, 4, DIM, generator=torch.Generator().manual_seed(1))  # of layers and rows
    messages, tally, found = LayerMessages(), Tally(), []
    for layer, cache, state in ((3, selecting, None), (5, reusing, reuse)):
        for row in range(2):
            found.append(attend_token(
                SHAPE._replace(layer=layer), rule, queries[layer // 5, row], cache, blocks, length, tally,
                is_probed=True, reuse=state, messages=messages, row=row,
            ))  # fmt: skip
    assert (tally.sparse_queries, tally.probes) == (4, 4)
    sinks_stop, window_start = rule.budget.always(length - 1, 1)
    for row in range(2):
        listed = torch.zeros(HEADS, length, dtype=torch.bool)
        listed[:, :sinks_stop] = listed[:, window_start:] = True
        messages.begin(row, 6)
        chosen = messages.get(row, 6, (("decode", length - 1, length), 3))
        listed.scatter_(1, chosen[[1, 0]], True)
        assert listed.sum(1).tolist() == [80, 80]
        logits = torch.einsum("hgd,hnd->hgn", queries[1, row].view(HEADS, 2, DIM), keys) * SHAPE.scale
        weights = logits.masked_fill(~listed[:, None], -torch.inf).softmax(-1)
        expected = torch.einsum("hgn,hnd->hgd", weights, values).flatten(0, 1)
        torch.testing.assert_close(found[2 + row], expected, atol=1e-5, rtol=1e-5)
