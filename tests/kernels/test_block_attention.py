"""Blocks of tokens: each gets the textbook formula, and the bits that it gets alone."""

from collections.abc import Callable

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.decode_cases import DecodeCase, draw_case, everything, exact_attention
from kernels.decode_checks import error_ratio
from kernels.paged_cases import plain
from torch import Tensor
from turns import in_turns

from kvsift.kernels import block_attention as module
from kvsift.kernels.block_attention import (
    block_attention,
    block_attention_reference,
    block_attention_triton,
    new_parts,
    reach,
)
from kvsift.kernels.paged import PagedKV

SHAPES = [(1, 3, 12, 4), (2, 2, 16, 8)]  # KV heads, group, head_dim, page_size
if DEVICE == "cuda":
    SHAPES = [(1, 1, 64, 8), (2, 3, 80, 16), (4, 8, 128, 16), (2, 2, 256, 16)]
SIZE = 4
LENGTHS = [150, 9, 64, 130] if DEVICE == "cpu" else [250, 9, 64, 130]


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: five splits, of which the last ones get no token, instead of
    as many as fill a GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "_num_splits", lambda kv: 5)


def blocks_of(shape: tuple[int, int, int, int], dtype: torch.dtype, in_8_bits: bool = False) -> DecodeCase:
    """Blocks whose last tokens are at these lengths; the last token of the second block is idle."""
    case = draw_case([length for length in LENGTHS for _ in range(SIZE)], *shape, dtype, in_8_bits=in_8_bits)
    behind = torch.arange(SIZE - 1, -1, -1, dtype=torch.int32, device=DEVICE).repeat(len(LENGTHS))
    table = case.kv.table.clone()
    for row in range(len(table)):
        table[row] = table[row - row % SIZE]
    lengths = case.kv.lengths - behind
    lengths[2 * SIZE - 1] = 1
    return case._replace(kv=case.kv._replace(table=table, lengths=lengths))


@needs_triton
@crossed(shape=SHAPES, dtype=DTYPES, softcap=[None, 3.0], in_8_bits=[False, True])
def test_tokens_are_at_most_twice_as_far_from_float64_as_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, softcap: float | None, in_8_bits: bool
) -> None:
    case = blocks_of(shape, dtype, in_8_bits)
    lists = everything(case.kv, case.kv.num_kv_heads)
    exact = exact_attention(case.queries, case.kv, lists, scale=case.scale, dtype=torch.float64, softcap=softcap)
    own = block_attention_reference(case.queries, plain(case.kv, dtype), SIZE, scale=case.scale, softcap=softcap)
    twin = block_attention_triton(case.queries, case.kv, SIZE, scale=case.scale, softcap=softcap)
    assert twin.shape == own.shape == case.queries.shape
    assert twin.dtype == own.dtype == dtype
    if dtype != torch.float32 and not in_8_bits:  # whose keys the reference rounds
        assert error_ratio(own, exact.to(dtype), exact) <= 2
    assert error_ratio(twin, own, exact) <= 2


@pytest.mark.parametrize("run", [block_attention_reference, pytest.param(block_attention_triton, marks=needs_triton)])
@crossed(shape=SHAPES, in_8_bits=[False, True])
def test_a_token_gets_the_bits_that_it_gets_alone(
    run: Callable[..., Tensor], shape: tuple[int, int, int, int], in_8_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_splits", lambda kv: 7)
    monkeypatch.setattr(module, "tile_tokens", lambda kv: 16)
    case = blocks_of(shape, torch.bfloat16, in_8_bits)
    queries, kv = case.queries, case.kv
    together = run(queries, kv, SIZE, scale=case.scale)
    stretch = reach(kv)
    for row in range(0, len(queries), 3):  # every place in a block, and every block
        first, length = row - row % SIZE, int(kv.lengths[row])
        block = kv.lengths[first : first + SIZE]
        if -(-int(block.max()) // stretch) != -(-length // stretch):
            continue  # a block is cut where its longest token is
        lengths = torch.ones(SIZE, dtype=torch.int32, device=DEVICE)
        lengths[(row + 1) % SIZE] = length  # in another place, beside idle ones
        alone = PagedKV(kv.keys, kv.values, kv.table[first : first + SIZE], lengths)
        asked = torch.zeros_like(queries[:SIZE])
        asked[(row + 1) % SIZE] = queries[row]
        assert torch.equal(run(asked, alone, SIZE, scale=case.scale)[(row + 1) % SIZE], together[row])


@needs_triton
@pytest.mark.parametrize(("shape", "size"), in_turns(SHAPES, [2, 8]), ids=str)
def test_a_token_gets_the_same_bits_in_a_block_of_any_size(shape: tuple[int, int, int, int], size: int) -> None:
    case = draw_case([3000, 9, 64, 130], *shape, torch.bfloat16)
    kv, last = case.kv, slice(size - 1, None, size)
    blocks = kv._replace(table=kv.table.repeat_interleave(size, 0), lengths=kv.lengths.repeat_interleave(size))
    queries = torch.randn_like(case.queries).repeat_interleave(size, 0)
    queries[last] = case.queries
    alone = block_attention_triton(case.queries, kv, 1, scale=case.scale)
    assert torch.equal(block_attention_triton(queries, blocks, size, scale=case.scale)[last], alone)


@needs_triton
def test_a_workspace_is_used_again() -> None:
    case = blocks_of(SHAPES[-1], torch.float32)
    parts = new_parts(case.kv, SIZE, case.queries.shape[1]).fill_(torch.nan)
    once, again = (block_attention_triton(case.queries, case.kv, SIZE, scale=case.scale, parts=parts) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.allclose(once, block_attention(case.queries, case.kv, SIZE, scale=case.scale), atol=1e-5)
