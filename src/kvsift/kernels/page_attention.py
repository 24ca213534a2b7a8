"""Decode attention over listed units, or over all pages: split along the keys, merged in the same launch.

A unit is a page or a part of one, such as a token; U divides the page size. The query heads that share a list are
packed, so a unit is read once for the group. Every split writes its part to a
workspace; the split that finishes last merges them (``kernels.split_attention``). The host is not involved: lists,
counts and lengths are read on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.attention import attention_reference
from kvsift.kernels.listed_attention import listed_attention_cuda, listed_launch_runs
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.split_attention import attend_split
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl
from kvsift.types import Part

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
        """Workspace of ``splits`` splits, records of estimates included."""
        record = -(-(group * head_dim + 2 * group + 1) // 32) * 32
        return cls(
            torch.empty(rows, splits, record, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
        )


def page_attention(
    queries: Tensor, kv: PagedKV, units: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
    unit_size: int | None = None, heads: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention of one query per sequence.

    Args:
        queries: [batch, num_query_heads, head_dim].
        kv: the cache, the queries' own tokens included.
        units: int32 [batch, num_kv_heads or num_query_heads, capacity], ids of units, the first ``counts`` of each
            row; None is every page.
        counts: int32 [batch, num_kv_heads or num_query_heads].
        scale: factor of q.k.
        softcap: logit = softcap * tanh(logit / softcap).
        sink_logit: [num_query_heads], a learned extra logit whose value is zero.
        space: of the Triton kernel, kept between launches (CUDA graphs); made here by default.
        visible: int64 [batch], to which each sequence's visible tokens are added, summed over its rows of lists (of KV
            heads, without).
        dense_below: int32 [batch], lengths below which a sequence is dense. Only dense sequences are attended without
            lists, and only the others with lists. None: all of them.
        out: written where a sequence is attended; a new one by default.
        unit_size: tokens per unit of the lists, a divisor of the page size; a page by default.
        heads: int32 [num_kv_heads or num_query_heads], whose list each head attends; its own by default.
        early: attention over lists may start while the kernel before is still running, which then must not write lists,
            the table, or keys and values of any token but the last of each sequence.

    Returns:
        [batch, num_query_heads, head_dim] in the dtype of ``queries``.
    """
    how: dict[str, Any] = {
        "scale": scale, "softcap": softcap, "sink_logit": sink_logit, "visible": visible, "dense_below": dense_below,
        "out": out, "unit_size": unit_size, "heads": heads,
    }  # fmt: skip
    if units is not None and counts is not None and listed_launch_runs(queries, kv, units, unit_size or kv.page_size):
        return listed_attention_cuda(queries, kv, units, counts, early=early, **how)
    run = page_attention_triton if runs_on_triton(queries) else page_attention_reference
    return run(queries, kv, units, counts, space=space, **how)


def page_attention_reference(
    queries: Tensor, kv: PagedKV, units: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
    unit_size: int | None = None, heads: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if heads is not None and units is not None and counts is not None:
        units, counts = units[:, heads], counts[:, heads]
    output = torch.zeros_like(queries) if out is None else out
    for row in range(kv.batch):
        if dense_below is not None and bool(kv.lengths[row] < dense_below[row]) == (units is not None):
            continue
        length = int(kv.lengths[row])
        mask = torch.ones(kv.num_kv_heads, length, dtype=torch.bool, device=queries.device)
        if units is not None and counts is not None:
            mask = listed_tokens(units[row], counts[row], length, unit_size or kv.page_size)
        if visible is not None:
            visible[row] += mask.sum()
        part = masked_part(queries[row], kv, row, mask, scale, softcap)
        part = part if sink_logit is None else with_sink_logit(part, sink_logit)
        output[row] = part.output[0, :, 0]
    return output


def masked_part(
    queries: Tensor, kv: PagedKV, row: int, mask: Tensor, scale: float, softcap: float | None
) -> Part:  # fmt: skip
    """Attention of one sequence's query [num_query_heads, head_dim] over a mask, bool [num_rows, length]."""
    keys, values = (tensor.repeat_interleave(len(mask) // len(tensor), 0) for tensor in kv.row(row))
    return attention_reference(
        queries[None, :, None], keys[None], values[None], scale, mask=mask[None, :, None], softcap=softcap
    )


def listed_tokens(units: Tensor, counts: Tensor, length: int, unit_size: int) -> Tensor:
    """Return the tokens that the lists of one sequence hold, bool [num_rows, length]."""
    listed = torch.arange(units.shape[1], device=units.device) < counts[:, None]
    num_units = -(-length // unit_size)
    visible = torch.zeros(len(units), num_units + 1, dtype=torch.bool, device=units.device)
    visible.scatter_(1, units.long().masked_fill(~listed, num_units), True)
    return visible[:, :num_units].repeat_interleave(unit_size, 1)[:, :length]


def page_attention_triton(
    queries: Tensor, kv: PagedKV, units: Tensor | None, counts: Tensor | None, *, scale: float,
    softcap: float | None = None, sink_logit: Tensor | None = None, space: SplitSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
    unit_size: int | None = None, heads: Tensor | None = None, estimates: int = 0, estimated: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``page_attention``, merged with the last ``estimates`` records of each row of the workspace
    (``kernels.split_attention``); ``estimated`` as in ``kernels.sketch_attention``."""
    batch, num_query_heads, head_dim = queries.shape
    num_rows, unit_size = kv.num_kv_heads if units is None else units.shape[1], unit_size or kv.page_size
    group, capacity = num_query_heads // num_rows, None if units is None else units.shape[2]
    if space is None:
        splits = split_count(kv, capacity, batch * num_rows, unit_size)
        space = SplitSpace.make(batch * num_rows, splits, group, head_dim, queries.device)
    queries = queries.contiguous()
    output = torch.empty_like(queries) if out is None else out
    _page_attention_kernel[batch * num_rows, space.parts.shape[1] - estimates](
        queries, kv.keys, kv.values, kv.table, kv.lengths, kv.table if units is None else units,
        kv.lengths if counts is None else counts, output, *space, queries if sink_logit is None else sink_logit,
        kv.lengths if visible is None else visible, kv.lengths if estimated is None else estimated,
        kv.lengths if dense_below is None else dense_below, kv.lengths if heads is None else heads,
        *attention_strides(kv), kv.table.shape[1], capacity or 0,
        num_rows, *logit_factors(scale, softcap),
        **attention_constants(kv, group, num_rows, unit_size, space, estimates), LISTED=units is not None,
        MAPPED=heads is not None, MIXED=dense_below is not None, COUNTED=visible is not None,
        CAPPED=softcap is not None, SINK=sink_logit is not None, STAGES=3, num_warps=8 if group == 1 else 4,
    )  # fmt: skip
    return output


def split_count(kv: PagedKV, capacity: int | None, rows: int, unit_size: int | None = None) -> int:
    """Return the splits of a row: as many as a list has full splits; for the whole cache what fills the device."""
    if capacity is not None:
        return min(max(1, -(-capacity * (unit_size or kv.page_size) // SPLIT_TOKENS)), MOST_SPLITS)
    processors = processor_count(kv.keys)
    tiles = -(-kv.table.shape[1] * kv.page_size // tile_tokens(kv))
    return max(1, min(tiles, 2 * processors // rows))


def processor_count(tensor: Tensor) -> int:
    """Return the multiprocessors of the GPU that holds a tensor; those of an H200 for one on the host."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 132


def attention_strides(kv: PagedKV) -> tuple[int, ...]:
    """Return the strides of head, page and token, of keys and of values."""
    return (*kv.keys.stride()[:3], *kv.values.stride()[:3])


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return scale and soft cap for logits in units of log 2."""
    return scale * LOG2E, (softcap or 0.0) * LOG2E


def tile_tokens(kv: PagedKV) -> int:
    """Return the tokens attended at once; at least a page."""
    return min(TILE_TOKENS, TILE_BYTES // (power_of_two(kv.head_dim) * max(2, kv.keys.element_size())))


def attention_constants(
    kv: PagedKV, group: int, num_rows: int, unit_size: int, space: SplitSpace, estimates: int
) -> dict[str, Any]:
    """Return the constants the kernels are compiled for; ``group`` query heads share a list."""
    _, records, record = space.parts.shape
    return {
        "G": group, "GP": max(16, power_of_two(group)),
        "ROWS_PER_KV": num_rows // kv.num_kv_heads, "D": kv.head_dim, "DP": power_of_two(kv.head_dim),
        "PAGE": kv.page_size, "UNIT": unit_size, "TILE": max(1, tile_tokens(kv) // unit_size),
        "SPLITS": records - estimates, "ESTIMATES": estimates, "RECORDSP": power_of_two(records), "RECORD": record,
    }  # fmt: skip


@jit
def _page_attention_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, list_ptr, counts_ptr, out_ptr, parts_ptr, arrived_ptr,
    sink_ptr, visible_ptr, estimated_ptr, below_ptr, heads_ptr, key_head, key_page, key_token, value_head, value_page,
    value_token, max_pages, capacity, num_rows, scale, softcap,
    G: tl.constexpr, GP: tl.constexpr, ROWS_PER_KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, ESTIMATES: tl.constexpr,
    RECORDSP: tl.constexpr, RECORD: tl.constexpr, LISTED: tl.constexpr, MAPPED: tl.constexpr, MIXED: tl.constexpr,
    COUNTED: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    if MIXED:
        dense = tl.load(lengths_ptr + row // num_rows) < tl.load(below_ptr + row // num_rows)
        if dense == LISTED:
            return
    if LISTED:
        source = row
        if MAPPED:
            source += tl.load(heads_ptr + row % num_rows) - row % num_rows
        count = tl.load(counts_ptr + source)
        list_ptr += source * capacity
    else:
        count = (tl.load(lengths_ptr + row // num_rows) + PAGE - 1) // PAGE
    attend_split(
        row, split, q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, list_ptr, count, out_ptr, parts_ptr,
        arrived_ptr, sink_ptr, visible_ptr, estimated_ptr, key_head, key_page, key_token, value_head, value_page,
        value_token, max_pages, num_rows, scale, softcap,
        G, GP, ROWS_PER_KV, D, DP, PAGE, UNIT, TILE, SPLITS, ESTIMATES, RECORDSP, RECORD, LISTED, COUNTED, CAPPED, SINK,
        STAGES,
    )  # fmt: skip
