"""Decode attention over listed pages, or over all of them: split along the keys, merged in the same launch.

The query heads that share a list are packed, so a page is read once for the group. Every split leaves its part in a
workspace; the split that finishes last merges them (``kernels.split_attention``). Nothing of it needs the host: lists,
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
    """Where splits leave their parts. One launch at a time may use it; it is left as it was found."""

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
    visible: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per sequence.

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
        visible: int64 [1], to which the tokens seen are added, summed over rows of lists (of KV heads, without).

    Returns:
        [batch, num_query_heads, head_dim] in the dtype of ``queries``.
    """
    run = page_attention_triton if runs_on_triton(queries) else page_attention_reference
    return run(
        queries, kv, pages, counts, scale=scale, softcap=softcap, sink_logit=sink_logit, space=space, visible=visible
    )


def page_attention_reference(
    queries: Tensor, kv: PagedKV, pages: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None,
) -> Tensor:  # fmt: skip
    outputs = []
    for row in range(kv.batch):
        keys, values = kv.row(row)
        mask = torch.ones(kv.num_kv_heads, keys.shape[1], dtype=torch.bool, device=keys.device)
        if pages is not None and counts is not None:
            mask = _mask(pages[row], counts[row], keys.shape[1], kv.page_size)
        if visible is not None:
            visible += mask.sum()
        num_heads = len(mask)
        keys, values = (tensor.repeat_interleave(num_heads // len(tensor), 0) for tensor in (keys, values))
        part = attention_reference(
            queries[row, None, :, None], keys[None], values[None], scale, mask=mask[None, :, None], softcap=softcap
        )
        part = part if sink_logit is None else with_sink_logit(part, sink_logit)
        outputs.append(part.output[:, :, 0])
    return torch.cat(outputs)


def _mask(pages: Tensor, counts: Tensor, length: int, page_size: int) -> Tensor:
    """bool [num_rows, length]: what the lists of one sequence show."""
    listed = torch.arange(pages.shape[1], device=pages.device) < counts[:, None]
    num_pages = -(-length // page_size)
    seen = torch.zeros(len(pages), num_pages + 1, dtype=torch.bool, device=pages.device)
    seen.scatter_(1, pages.long().masked_fill(~listed, num_pages), True)
    return seen[:, :num_pages].repeat_interleave(page_size, 1)[:, :length]


def page_attention_triton(
    queries: Tensor, kv: PagedKV, pages: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, num_query_heads, head_dim = queries.shape
    num_rows = kv.num_kv_heads if pages is None else pages.shape[1]
    group, capacity = num_query_heads // num_rows, None if pages is None else pages.shape[2]
    if space is None:
        splits = split_count(kv, capacity, batch * num_rows)
        space = SplitSpace.make(batch * num_rows, splits, group, head_dim, queries.device)
    queries = queries.contiguous()
    output = torch.empty_like(queries)
    _page_attention_kernel[batch * num_rows, space.parts.shape[1]](
        queries, kv.keys, kv.values, kv.table, kv.lengths, kv.table if pages is None else pages,
        kv.lengths if counts is None else counts, output, *space, queries if sink_logit is None else sink_logit,
        torch.zeros(1, dtype=torch.int64, device=queries.device) if visible is None else visible,
        *attention_strides(kv), kv.table.shape[1], capacity or 0, num_rows, *logit_factors(scale, softcap),
        **attention_constants(kv, group, num_rows, space), LISTED=pages is not None,
        CAPPED=softcap is not None, SINK=sink_logit is not None, STAGES=3,
        num_warps=8 if group == 1 else 4,
    )  # fmt: skip
    return output


def split_count(kv: PagedKV, capacity: int | None, rows: int) -> int:
    """Splits of a row: of a list as many as it has full splits; of the whole cache what keeps the device busy."""
    if capacity is not None:
        return min(max(1, -(-capacity * kv.page_size // SPLIT_TOKENS)), MOST_SPLITS)
    processors = 132
    if kv.keys.is_cuda:
        processors = torch.cuda.get_device_properties(kv.keys.device).multi_processor_count
    tiles = -(-kv.table.shape[1] * kv.page_size // tile_tokens(kv))
    return max(1, min(tiles, 2 * processors // rows))


def attention_strides(kv: PagedKV) -> tuple[int, ...]:
    """Strides the kernels need: head, page, token of keys and of values."""
    return (*kv.keys.stride()[:3], *kv.values.stride()[:3])


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Scale and soft cap for logits in units of log 2."""
    return scale * LOG2E, (softcap or 0.0) * LOG2E


def tile_tokens(kv: PagedKV) -> int:
    """Tokens attended at once; a page at least."""
    return min(TILE_TOKENS, TILE_BYTES // (power_of_two(kv.head_dim) * kv.keys.element_size()))


def attention_constants(kv: PagedKV, group: int, num_rows: int, space: SplitSpace) -> dict[str, Any]:
    """What the kernels are compiled for; ``group`` query heads share a list."""
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
    sink_ptr, visible_ptr, key_head, key_page, key_token, value_head, value_page, value_token, max_pages, capacity,
    num_rows, scale, softcap,
    G: tl.constexpr, GP: tl.constexpr, ROWS_PER_KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SPLITSP: tl.constexpr, RECORD: tl.constexpr,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    if LISTED:
        count = tl.load(counts_ptr + row)
        list_ptr += row * capacity
    else:
        count = (tl.load(lengths_ptr + row // num_rows) + PAGE - 1) // PAGE
    attend_split(
        row, split, q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, list_ptr, count, out_ptr, parts_ptr,
        arrived_ptr, sink_ptr, visible_ptr, key_head, key_page, key_token, value_head, value_page, value_token,
        max_pages, num_rows, scale, softcap,
        G, GP, ROWS_PER_KV, D, DP, PAGE, TILE, SPLITS, SPLITSP, RECORD, LISTED, CAPPED, SINK, STAGES,
    )  # fmt: skip
