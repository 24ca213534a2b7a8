"""Decode attention over listed pages, or over all of them: split along the keys, merged in the same launch.

The query heads that share a list are packed, so a page is read once for the group. Every split writes its part to a
workspace; the split that finishes last merges them (``kernels.split_attention``). The host is not involved: lists,
counts and lengths are read on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.attention import attention_reference
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.split_attention import attend_split
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl

TILE_TOKENS = 128
TILE_BYTES = 32 << 10  # of keys at most: with the values and a stage ahead it fits the shared memory of every GPU
SPLIT_TOKENS = 128  # of a list: small enough that a budget of 2048 keeps a whole H200 busy
MOST_SPLITS = 1024  # of a row: merged as one tile, which Triton limits to 2^20 numbers
LOG2E = 1.4426950408889634


class SplitSpace(NamedTuple):
    """Workspace for the parts of the splits. One launch at a time may use it, and leaves ``arrived`` zero."""

    parts: Tensor  # float32 [rows, splits, record]
    arrived: Tensor  # int32 [rows], zero

    @classmethod
    def make(cls, rows: int, splits: int, group: int, head_dim: int, device: torch.device) -> SplitSpace:
        record = -(-(group * head_dim + 2 * group + 1) // 32) * 32
        return cls(
            torch.empty(rows, splits, record, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
        )


def page_attention(
    queries: Tensor, kv: PagedKV, pages: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention of one query per sequence.

    Args:
        queries: [batch, num_query_heads, head_dim].
        kv: the cache, the queries' own tokens included.
        pages: int32 [batch, num_kv_heads or num_query_heads, capacity], logical pages, the first ``counts`` of each
            row; None is every page.
        counts: int32 [batch, num_kv_heads or num_query_heads].
        scale: factor of q.k.
        softcap: logit = softcap * tanh(logit / softcap).
        sink_logit: [num_query_heads], a learned extra logit whose value is zero.
        space: kept between launches (CUDA graphs); made here by default.
        visible: int64 [batch], to which each sequence's visible tokens are added, summed over its rows of lists (of KV
            heads, without).
        dense_below: int32 [batch], lengths below which a sequence is dense. Only dense sequences are attended without
            lists, and only the others with lists. None: all of them.
        out: written where a sequence is attended; a new one by default.

    Returns:
        [batch, num_query_heads, head_dim] in the dtype of ``queries``.
    """
    run = page_attention_triton if runs_on_triton(queries) else page_attention_reference
    return run(
        queries, kv, pages, counts, scale=scale, softcap=softcap, sink_logit=sink_logit, space=space, visible=visible,
        dense_below=dense_below, out=out,
    )  # fmt: skip


def page_attention_reference(
    queries: Tensor, kv: PagedKV, pages: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    output = torch.zeros_like(queries) if out is None else out
    for row in range(kv.batch):
        if dense_below is not None and bool(kv.lengths[row] < dense_below[row]) == (pages is not None):
            continue
        keys, values = kv.row(row)
        mask = torch.ones(kv.num_kv_heads, keys.shape[1], dtype=torch.bool, device=keys.device)
        if pages is not None and counts is not None:
            mask = _mask(pages[row], counts[row], keys.shape[1], kv.page_size)
        if visible is not None:
            visible[row] += mask.sum()
        num_heads = len(mask)
        keys, values = (tensor.repeat_interleave(num_heads // len(tensor), 0) for tensor in (keys, values))
        part = attention_reference(
            queries[row, None, :, None], keys[None], values[None], scale, mask=mask[None, :, None], softcap=softcap
        )
        part = part if sink_logit is None else with_sink_logit(part, sink_logit)
        output[row] = part.output[0, :, 0]
    return output


def _mask(pages: Tensor, counts: Tensor, length: int, page_size: int) -> Tensor:
    """Return the tokens that the lists of one sequence hold, bool [num_rows, length]."""
    listed = torch.arange(pages.shape[1], device=pages.device) < counts[:, None]
    num_pages = -(-length // page_size)
    visible = torch.zeros(len(pages), num_pages + 1, dtype=torch.bool, device=pages.device)
    visible.scatter_(1, pages.long().masked_fill(~listed, num_pages), True)
    return visible[:, :num_pages].repeat_interleave(page_size, 1)[:, :length]


def page_attention_triton(
    queries: Tensor, kv: PagedKV, pages: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, num_query_heads, head_dim = queries.shape
    num_rows = kv.num_kv_heads if pages is None else pages.shape[1]
    group, capacity = num_query_heads // num_rows, None if pages is None else pages.shape[2]
    if space is None:
        splits = split_count(kv, capacity, batch * num_rows)
        space = SplitSpace.make(batch * num_rows, splits, group, head_dim, queries.device)
    queries = queries.contiguous()
    output = torch.empty_like(queries) if out is None else out
    _page_attention_kernel[batch * num_rows, space.parts.shape[1]](
        queries, kv.keys, kv.values, kv.table, kv.lengths, kv.table if pages is None else pages,
        kv.lengths if counts is None else counts, output, *space, queries if sink_logit is None else sink_logit,
        kv.lengths if visible is None else visible, kv.lengths if dense_below is None else dense_below,
        *attention_strides(kv), kv.table.shape[1], capacity or 0, num_rows, *logit_factors(scale, softcap),
        **attention_constants(kv, group, num_rows, space), LISTED=pages is not None, MIXED=dense_below is not None,
        COUNTED=visible is not None, CAPPED=softcap is not None, SINK=sink_logit is not None, STAGES=3,
        num_warps=8 if group == 1 else 4,
    )  # fmt: skip
    return output


def split_count(kv: PagedKV, capacity: int | None, rows: int) -> int:
    """Return the splits of a row: as many as a list has full splits; for the whole cache what fills the device."""
    if capacity is not None:
        return min(max(1, -(-capacity * kv.page_size // SPLIT_TOKENS)), MOST_SPLITS)
    processors = 132
    if kv.keys.is_cuda:
        processors = torch.cuda.get_device_properties(kv.keys.device).multi_processor_count
    tiles = -(-kv.table.shape[1] * kv.page_size // tile_tokens(kv))
    return max(1, min(tiles, 2 * processors // rows))


def attention_strides(kv: PagedKV) -> tuple[int, ...]:
    """Return the strides of head, page and token, of keys and of values."""
    return (*kv.keys.stride()[:3], *kv.values.stride()[:3])


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return scale and soft cap for logits in units of log 2."""
    return scale * LOG2E, (softcap or 0.0) * LOG2E


def tile_tokens(kv: PagedKV) -> int:
    """Return the tokens attended at once; at least a page."""
    return min(TILE_TOKENS, TILE_BYTES // (power_of_two(kv.head_dim) * kv.keys.element_size()))


def attention_constants(kv: PagedKV, group: int, num_rows: int, space: SplitSpace) -> dict[str, Any]:
    """Return the constants the kernels are compiled for; ``group`` query heads share a list."""
    _, splits, record = space.parts.shape
    return {
        "G": group, "GP": max(16, power_of_two(group)),
        "ROWS_PER_KV": num_rows // kv.num_kv_heads, "D": kv.head_dim, "DP": power_of_two(kv.head_dim),
        "PAGE": kv.page_size, "TILE": max(1, tile_tokens(kv) // kv.page_size),
        "SPLITS": splits, "SPLITSP": power_of_two(splits), "RECORD": record,
    }  # fmt: skip


@jit
def _page_attention_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, list_ptr, counts_ptr, out_ptr, parts_ptr, arrived_ptr,
    sink_ptr, visible_ptr, below_ptr, key_head, key_page, key_token, value_head, value_page, value_token, max_pages,
    capacity, num_rows, scale, softcap,
    G: tl.constexpr, GP: tl.constexpr, ROWS_PER_KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SPLITSP: tl.constexpr, RECORD: tl.constexpr,
    LISTED: tl.constexpr, MIXED: tl.constexpr, COUNTED: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    if MIXED:
        dense = tl.load(lengths_ptr + row // num_rows) < tl.load(below_ptr + row // num_rows)
        if dense == LISTED:
            return
    if LISTED:
        count = tl.load(counts_ptr + row)
        list_ptr += row * capacity
    else:
        count = (tl.load(lengths_ptr + row // num_rows) + PAGE - 1) // PAGE
    attend_split(
        row, split, q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, list_ptr, count, out_ptr, parts_ptr,
        arrived_ptr, sink_ptr, visible_ptr, key_head, key_page, key_token, value_head, value_page, value_token,
        max_pages, num_rows, scale, softcap,
        G, GP, ROWS_PER_KV, D, DP, PAGE, TILE, SPLITS, SPLITSP, RECORD, LISTED, COUNTED, CAPPED, SINK, STAGES,
    )  # fmt: skip
