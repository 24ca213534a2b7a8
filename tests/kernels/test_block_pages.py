"""vLLM's packed blocks as pages: numbers, tables, and summaries of the pages that tokens were written to."""

import pytest
import torch
from kernels.conftest import DEVICE, needs_triton
from refusals import refused
from torch import Tensor

from kvsift.kernels import block_pages, summarise_slots
from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.page_summary import row_format, summarise

HEADS, DIM, PAGE, BLOCKS = 2, 32, 16, 7
LAYOUTS = ["NHD", "HND", "padded NHD", "padded HND"]
RUNS = ["reference", pytest.param("triton", marks=needs_triton)]


def cache_of(layout: str, block_size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """[BLOCKS, HEADS, block_size, 2 * DIM] as vLLM lays it out; padded: with bytes behind each block."""
    torch.manual_seed(0)
    shape = (HEADS, block_size, 2 * DIM) if "HND" in layout else (block_size, HEADS, 2 * DIM)
    size = HEADS * block_size * 2 * DIM
    behind = PAGE * HEADS * 2 * DIM if "padded" in layout else 0
    cache = torch.randn(BLOCKS, size + behind, device=DEVICE).to(dtype)[:, :size].unflatten(1, shape)
    return cache if "HND" in layout else cache.transpose(1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_pages_are_the_blocks_tokens_and_their_rows_share_no_memory(layout: str, block_size: int) -> None:
    cache = cache_of(layout, block_size)
    pages = BlockPages.of(cache, PAGE)
    keys, values = pages.split(cache)
    rows = pages.new_rows(BLOCKS, HEADS, 8, torch.float32, cache.device)
    slots = torch.arange(BLOCKS * block_size, device=DEVICE)
    numbers = pages.of_slots(slots)
    packed = cache.permute(1, 0, 2, 3).flatten(1, 2)
    assert torch.equal(keys[:, numbers, slots % PAGE], packed[..., :DIM])
    assert torch.equal(values[:, numbers, slots % PAGE], packed[..., DIM:])
    used = numbers[::PAGE]
    for head, numbers in zip(rows, torch.arange(HEADS * len(used) * 8.0, device=DEVICE).view(HEADS, len(used), 8)):
        head[used] = numbers
    assert len(rows[:, used].unique()) == HEADS * len(used) * 8


def test_blocks_without_a_stride_are_refused() -> None:
    with refused("invalid_tensor: --block-size 16"):
        BlockPages.of(torch.zeros(3, HEADS, 40, 2 * DIM), PAGE)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("block_size", "step"), [(16, 1), (64, 4), (64, 8)])
def test_tables_hold_page_numbers_as_far_as_rows_reach(run: str, block_size: int, step: int) -> None:
    pages = BlockPages(block_size, PAGE, step)
    blocks = torch.tensor([[3, 1, 5], [2, 9, 9], [4, 6, 0]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2 * block_size + 1, 0, 17], dtype=torch.int32, device=DEVICE)
    table = torch.full((3, 3 * pages.per_block), -7, dtype=torch.int32, device=DEVICE)
    own, totals = torch.zeros_like(lengths), torch.ones(3, 4, dtype=torch.int64, device=DEVICE)
    place = getattr(block_pages, f"place_pages_{run}")
    sparse_from = torch.tensor([20, 20, 18], dtype=torch.int32, device=DEVICE)  # the last row has fewer tokens
    place(blocks, lengths, pages, (table, own), totals, sparse_from)
    for row, length in enumerate(lengths.tolist()):
        slots = torch.arange(0, length, PAGE)
        expected = pages.of_slots(blocks[row].cpu()[slots // block_size] * block_size + slots % block_size)
        assert table[row, : len(slots)].tolist() == expected.tolist()
        assert set(table[row, len(slots) :].tolist()) <= {-7}
    assert torch.equal(own, lengths)
    long = 2 * block_size + 1
    assert totals.tolist() == [[2, 1 + long, 2, 1 + long], [1, 1, 1, 1], [2, 18, 1, 1]]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["minmax", "minmax_fp8", "sketch1"])
@pytest.mark.parametrize(("layout", "block_size"), [("NHD", 16), ("HND", 64)])
@pytest.mark.parametrize("few", [0, 1 << 10], ids=["prompts", "tokens"])
@pytest.mark.parametrize("writes", [False, True], ids=["written", "writes"])
def test_rows_are_those_of_the_pages_that_were_filled(
    run: str, kind: str, layout: str, block_size: int, few: int, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summarise_slots, "FEW", few)
    cache = cache_of(layout, block_size)
    pages = BlockPages.of(cache, PAGE)
    keys, values = pages.split(cache)
    width, dtype = row_format(kind, DIM, PAGE)
    rows = pages.new_rows(BLOCKS, HEADS, width, dtype or cache.dtype, cache.device)
    # a page and a bit, the end of a page, one token of another, padding
    written = [*range(block_size, block_size + 19), 15, 16 * 5 + 3, -1, -1]
    write, tokens = getattr(summarise_slots, f"summarise_slots_{run}"), None
    if writes:  # rows of a wider tensor, of which only some are tokens
        new = torch.randn(len(written) + 2, 3, HEADS, DIM, device=DEVICE).to(cache)
        tokens, expected_cache = (new[:, 1], new[:, 2]), cache.clone()
        for token, slot in enumerate(written[:-2]):
            expected_cache[slot // block_size, :, slot % block_size] = new[token, 1:].transpose(0, 1).flatten(1)
    write(kind, torch.tensor(written, device=DEVICE), keys, values, rows, pages, tokens)
    if writes:
        assert torch.equal(cache, expected_cache)
    filled = {int(pages.of_slots(torch.tensor(slot))) for slot in (15, block_size + 15)}
    for page in range(keys.shape[1]):
        if page in filled:
            expected = summarise(kind, keys[:, page : page + 1], None, values[:, page : page + 1])[:, 0]
            difference = (rows[:, page].float() - expected.float()).abs()
            assert (difference > 0).float().mean() < (0.03 if kind in ("sketch1",) else 1e-9)  # codes at zero
        elif page % pages.step < pages.per_block:
            assert not rows[:, page].float().any()
