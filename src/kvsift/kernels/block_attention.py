"""Dense attention of blocks of tokens: a few consecutive ones of each sequence, which read its cache once.

The two numbers: the bytes of keys and values as for one token, and as many times its operations as a block has tokens,
on rows of the tensor cores that one token leaves empty. What a token gets does not depend on the others of its block,
nor on other sequences and their number: the cache is cut at places that depend on its length alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.page_attention import attention_strides, logit_factors, masked_part, processor_count, tile_tokens
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.split_attention import attend_group
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl

MOST_STAGED = 8192  # numbers of the queries of a block: beside more, shared memory has no room for a tile ahead


def block_attention(
    queries: Tensor, kv: PagedKV, size: int, *, scale: float, softcap: float | None = None,
    parts: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention of blocks of ``size`` tokens, a power of two.

    Args:
        queries: [num_blocks * size, num_query_heads, head_dim].
        kv: the cache, the queries' own tokens included. Each token has a row of it, with a length of its own; the
            tokens of a block have the pages of its first, and lengths between the same two multiples of ``reach``.
        size: tokens of a block.
        scale: factor of q.k.
        softcap: logit = softcap * tanh(logit / softcap).
        parts: ``new_parts``, kept between launches (CUDA graphs); made here by default.
        pdl: launch while the kernel before still runs (Hopper and later).

    Returns:
        [num_blocks * size, num_query_heads, head_dim] in the dtype of ``queries``.
    """
    run = block_attention_triton if runs_on_triton(queries) else block_attention_reference
    return run(queries, kv, size, scale=scale, softcap=softcap, parts=parts, pdl=pdl)


def block_attention_reference(
    queries: Tensor, kv: PagedKV, size: int, *, scale: float, softcap: float | None = None,
    parts: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    output, kv = torch.empty_like(queries), kv._replace(table=kv.table[::size].repeat_interleave(size, 0))
    for row in range(kv.batch):
        mask = torch.ones(kv.num_kv_heads, int(kv.lengths[row]), dtype=torch.bool, device=queries.device)
        output[row] = masked_part(queries[row], kv, row, mask, scale, softcap).output[0, :, 0]
    return output


def reach(kv: PagedKV) -> int:
    """Return the tokens after which the places move at which a sequence is cut."""
    return _num_splits(kv) * _tile_pages(kv) * kv.page_size


def new_parts(kv: PagedKV, size: int, num_query_heads: int) -> Tensor:
    """Return a workspace for blocks over a cache: the records of its splits (``kernels.split_attention``), float32
    [num_blocks * num_kv_heads, splits, record]."""
    group = num_query_heads // kv.num_kv_heads * size
    record = -(-(group * kv.head_dim + 2 * group + 1) // 32) * 32
    return torch.empty(kv.batch // size * kv.num_kv_heads, _num_splits(kv), record, device=kv.keys.device)


def _num_splits(kv: PagedKV) -> int:
    """As many as fill the device with a sequence that is alone; however many pages the table has room for."""
    return max(1, 2 * processor_count(kv.keys) // kv.num_kv_heads)


def _tile_pages(kv: PagedKV) -> int:
    return max(1, tile_tokens(kv) // kv.page_size)


def block_attention_triton(
    queries: Tensor, kv: PagedKV, size: int, *, scale: float, softcap: float | None = None,
    parts: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    heads, dim, blocks = kv.num_kv_heads, kv.head_dim, len(queries) // size
    parts = new_parts(kv, size, queries.shape[1]) if parts is None else parts
    queries = queries.contiguous()
    output, group = torch.empty_like(queries), size * queries.shape[1] // heads
    splits, record, padded = *parts.shape[1:], max(16, power_of_two(group))
    sizes = {"G": group, "D": dim, "DP": power_of_two(dim), "SPLITS": splits, "RECORD": record, "SIZE": size}
    sizes |= {"PAGE": kv.page_size, "TILE": _tile_pages(kv), "PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    _attend_kernel[blocks * heads, splits](
        queries, kv.keys, kv.values, kv.table, kv.lengths, parts, *attention_strides(kv), kv.table.stride(0), heads,
        *logit_factors(scale, softcap), **sizes, GP=padded, CAPPED=softcap is not None,
        STAGES=3 if padded * dim <= MOST_STAGED else 1, num_warps=4,
    )  # fmt: skip
    _merge_kernel[blocks * heads, group](
        parts, kv.lengths, output, heads, **sizes, SPLITSP=power_of_two(splits), num_warps=4
    )
    return output


@jit
def _cut(lengths_ptr, first, SPLITS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Tokens of the longest context of a block, its pages, and those of a split: as many as its length alone says."""
    longest = tl.max(tl.load(lengths_ptr + first + tl.arange(0, SIZE)), 0)
    count = (longest + PAGE - 1) // PAGE
    return longest, count, (count + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE


@jit
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, parts_ptr, key_head, key_page, key_token, value_head,
    value_page, value_token, max_pages, num_heads, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, RECORD: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr, GP: tl.constexpr,
    CAPPED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    first, head = row // num_heads * SIZE, (row % num_heads).to(tl.int64)
    longest, count, per_split = _cut(lengths_ptr, first, SPLITS, SIZE, PAGE, TILE)
    begin, q_token = split * per_split, num_heads * (G // SIZE) * D
    if begin < count:
        attend_group(
            q_ptr + first.to(tl.int64) * q_token + head * (G // SIZE) * D, keys_ptr + head * key_head,
            values_ptr + head * value_head, table_ptr + first.to(tl.int64) * max_pages, table_ptr, begin,
            tl.minimum(begin + per_split, count), longest, key_page, key_token, value_page, value_token,
            lengths_ptr + first, q_token, scale, softcap, parts_ptr + (row * SPLITS + split).to(tl.int64) * RECORD,
            G, GP, D, DP, PAGE, PAGE, TILE, False, CAPPED, STAGES, SIZE,
        )  # fmt: skip


@jit
def _merge_kernel(
    parts_ptr, lengths_ptr, out_ptr, num_heads, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SPLITS: tl.constexpr, RECORD: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr, SPLITSP: tl.constexpr,
):  # fmt: skip
    """Merge the splits that have pages: others have written no record."""
    row, each = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    s, d, first = tl.arange(0, SPLITSP), tl.arange(0, DP), row // num_heads * SIZE
    _, count, per_split = _cut(lengths_ptr, first, SPLITS, SIZE, PAGE, TILE)
    records, inside = parts_ptr + row * SPLITS * RECORD + s * RECORD, s * per_split < count
    tops = tl.load(records + G * D + each, mask=inside, other=float("-inf"))
    sums = tl.load(records + G * D + G + each, mask=inside, other=0.0)
    weights = tl.exp2(tops - tl.max(tops, 0))  # every token sees itself
    parts = tl.load(records[:, None] + each * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    output = tl.sum(parts * weights[:, None], 0) / tl.sum(weights * sums, 0)
    token, head = first + each // (G // SIZE), row % num_heads * (G // SIZE) + each % (G // SIZE)
    tl.store(out_ptr + (token * num_heads * (G // SIZE) + head) * D + d, output, mask=d < D)
