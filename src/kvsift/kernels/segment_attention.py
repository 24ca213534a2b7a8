"""Sparse attention of prefill: segments of queries over the tokens listed for them and over a causal span of their own.

The two numbers: 4 * num_query_heads * head_dim operations per query and visible token, and a read of every listed token
per tile of queries, mostly from the L2 cache. Listed and recent tokens go through one softmax, so nothing is merged
afterwards, and the rows of a tile are the queries of a whole group of heads: a token is fetched once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvsift.kernels.attention import attention_reference
from kvsift.kernels.split_attention import capped
from kvsift.kernels.triton_shim import jit, jit_for_any, power_of_two, runs_on_triton, tl
from kvsift.types import Part

LOG2E = math.log2(math.e)
ROWS, TOKENS, STAGES, WARPS = 128, 32, 4, 8  # of a tile; the fastest of those tried at head_dim 128
Row = TypeVar("Row", bound=tuple[int, ...])


class IntegerRows(tuple[Row, ...]):
    """Rows of small integers that the host knows, of equal length. A device gets them once, whichever layers of a model
    read them."""

    def on(self, device: torch.device) -> Tensor:
        """int32 [num_rows, width]; only the stream that is current at the first call may read it."""
        copies: dict[torch.device, Tensor] = vars(self).setdefault("copies", {})
        if device not in copies:
            copies[device] = torch.tensor(self, dtype=torch.int32).to(device, non_blocking=True)
        return copies[device]


class Rows(NamedTuple):
    """The cached tokens of one sequence, on pages of any order."""

    keys: Tensor  # [num_kv_heads, num_pages, page_size, head_dim], any strides, the last one 1
    values: Tensor  # the same
    table: Tensor  # int32 [max_pages], physical page of each logical page

    def slots(self, positions: Tensor) -> Tensor:
        """Return the addresses of tokens: physical page * page_size + offset in the page."""
        page_size = self.keys.shape[2]
        return self.table[positions // page_size] * page_size + positions % page_size


class Span(NamedTuple):
    """A segment: queries ``first`` to ``stop``, each of which sees all positions from ``oldest`` to its own."""

    first: int
    stop: int
    oldest: int


class Spans(IntegerRows[Span]):
    """The ``Span`` of each segment."""

    @cached_property
    def longest(self) -> int:
        """Most queries of a segment."""
        return max(stop - first for first, stop, _ in self)


def segment_attention(
    queries: Tensor, rows: Rows, start: int, spans: Sequence[Span], slots: Tensor, counts: Tensor | None, scale: float,
    softcap: float | None = None,
) -> Part:  # fmt: skip
    """Return attention of consecutive queries of one sequence, segment by segment.

    Args:
        queries: [num_query_heads, num_queries, head_dim].
        rows: the cache, the queries' own tokens included.
        start: position of the first query.
        spans: spans of the segments.
        slots: int32 [num_segments, num_lists, capacity], further tokens of each list (``Rows.slots``), each token once
            and none of its span; num_lists is num_kv_heads, or a multiple of it that divides num_query_heads.
        counts: int32 [num_segments, num_lists], how many of a list count; None: all of them.
        scale, softcap: as in ``kernels.attention``.

    Returns:
        The part, output [1, num_query_heads, num_queries, head_dim]. Queries of no segment are undefined.
    """
    counts = slots.new_full(slots.shape[:2], slots.shape[2]) if counts is None else counts
    run = segment_attention_triton if runs_on_triton(queries) else segment_attention_reference
    return run(queries, rows, start, spans, slots, counts, scale, softcap)


def segment_attention_reference(
    queries: Tensor, rows: Rows, start: int, spans: Sequence[Span], slots: Tensor, counts: Tensor, scale: float,
    softcap: float | None = None,
) -> Part:  # fmt: skip
    output = torch.zeros_like(queries).unsqueeze(0)
    lse = torch.full(output.shape[:3], -torch.inf, dtype=torch.float32, device=queries.device)
    num_lists, page_size = slots.shape[1], rows.keys.shape[2]
    for span, lists, sizes in zip(spans, slots, counts, strict=True):
        own = torch.arange(span.oldest, start + span.stop, device=queries.device)
        token = torch.cat([lists, rows.slots(own).expand(num_lists, -1)], 1).long()  # [num_lists, num_tokens]
        head = torch.arange(num_lists, device=token.device).unsqueeze(1) // (num_lists // rows.keys.shape[0])
        listed = torch.arange(lists.shape[1], device=token.device) < sizes.unsqueeze(1)
        token[:, : lists.shape[1]].masked_fill_(~listed, 0)
        keys, values = (pool[head, token // page_size, token % page_size] for pool in rows[:2])
        position = torch.arange(start + span.first, start + span.stop, device=own.device)
        causal = own <= position.unsqueeze(1)  # [num_queries, num_own]
        mask = torch.cat([listed.unsqueeze(1).expand(-1, len(causal), -1), causal.expand(num_lists, -1, -1)], 2)
        part = attention_reference(
            queries[None, :, span.first : span.stop], keys[None], values[None], scale, mask=mask, softcap=softcap
        )
        output[:, :, span.first : span.stop], lse[:, :, span.first : span.stop] = part
    return Part(output, lse)


def segment_attention_triton(
    queries: Tensor, rows: Rows, start: int, spans: Sequence[Span], slots: Tensor, counts: Tensor, scale: float,
    softcap: float | None = None,
) -> Part:  # fmt: skip
    num_heads, num_queries, head_dim = queries.shape
    num_lists, page_size = slots.shape[1], rows.keys.shape[2]
    group = num_heads // num_lists
    width = power_of_two(group)
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    output = torch.empty(1, num_queries, num_heads, head_dim, dtype=queries.dtype, device=queries.device)
    output = output.transpose(1, 2)  # as the projection behind it reads: no copy
    lse = torch.empty(1, num_heads, num_queries, dtype=torch.float32, device=queries.device)
    spans = spans if isinstance(spans, Spans) else Spans(spans)
    segments, tile = spans.on(queries.device), max(1, ROWS // width)
    tiles = -(-spans.longest // tile)
    pools = [pool.stride(axis) for pool in rows[:2] for axis in range(3)]
    big = head_dim > 128 or queries.element_size() > 2
    with torch.cuda.device_of(queries):
        _segment_kernel[len(spans) * tiles, num_lists](
            queries, rows.keys, rows.values, rows.table, slots.contiguous(), counts.contiguous(), segments, output,
            lse, *queries.stride()[:2], *output.stride()[1:3], *pools, num_queries, start, tiles, slots.shape[2],
            scale * LOG2E, (softcap or 0.0) * LOG2E,
            G=group, GP=width, QUERIES=tile, LISTS_PER_KV=num_lists // rows.keys.shape[0], D=head_dim,
            DP=power_of_two(head_dim), PAGE=page_size, TOKENS=TOKENS, CAPPED=softcap is not None,
            STAGES=2 if big else STAGES, num_warps=WARPS,
        )  # fmt: skip
    return Part(output, lse)


@jit
def _load_tokens(pool_ptr, slots, inside, page_stride, token_stride, D: tl.constexpr, DP: tl.constexpr,
                 PAGE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load rows of a pool, [tokens, DP]."""
    d = tl.arange(0, DP)
    where = (slots // PAGE).to(tl.int64) * page_stride + slots % PAGE * token_stride
    if MASKED:
        return tl.load(pool_ptr + where[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    if D == DP:
        return tl.load(pool_ptr + where[:, None] + d[None, :])
    return tl.load(pool_ptr + where[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)


@jit
def _attend(q, k, v, seen, top, total, acc, scale, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Add a tile of tokens to the softmax of each row."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, CAPPED)
    if MASKED:
        logits = tl.where(seen, logits, float("-inf"))
    new = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    weights = tl.exp2(logits - shift[:, None])
    shrink = tl.exp2(top - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new, total * shrink + tl.sum(weights, 1), acc


@jit_for_any("num_queries", "start", "tiles", "capacity")
def _segment_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, slots_ptr, counts_ptr, segments_ptr, out_ptr, lse_ptr,
    q_head, q_token, out_head, out_token, key_head, key_page, key_token, value_head, value_page, value_token,
    num_queries, start, tiles, capacity, scale, softcap,
    G: tl.constexpr, GP: tl.constexpr, QUERIES: tl.constexpr, LISTS_PER_KV: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    segment, tile, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    num_lists = tl.num_programs(1)
    stop_query, oldest = tl.load(segments_ptr + segment * 3 + 1), tl.load(segments_ptr + segment * 3 + 2)
    first_query = tl.load(segments_ptr + segment * 3) + tile * QUERIES
    if first_query >= stop_query:
        return
    m, d, t = tl.arange(0, QUERIES * GP), tl.arange(0, DP), tl.arange(0, TOKENS)
    query, head = first_query + m // GP, row * G + m % GP
    real = (query < stop_query) & (m % GP < G)
    mask = real[:, None] & (d < D)[None, :]
    q = tl.load(
        q_ptr + (head.to(tl.int64) * q_head + query.to(tl.int64) * q_token)[:, None] + d[None, :], mask=mask, other=0.0
    )
    kv_head = (row // LISTS_PER_KV).to(tl.int64)
    keys_ptr += kv_head * key_head
    values_ptr += kv_head * value_head
    top, total = tl.full((QUERIES * GP,), float("-inf"), tl.float32), tl.zeros((QUERIES * GP,), tl.float32)
    acc = tl.zeros((QUERIES * GP, DP), tl.float32)

    slots_ptr += (segment * num_lists + row).to(tl.int64) * capacity
    count = tl.load(counts_ptr + segment * num_lists + row)
    whole = count // TOKENS * TOKENS
    for n in tl.range(0, whole, TOKENS, num_stages=STAGES):
        slots = tl.load(slots_ptr + n + t)
        k = _load_tokens(keys_ptr, slots, t, key_page, key_token, D, DP, PAGE, False)
        v = _load_tokens(values_ptr, slots, t, value_page, value_token, D, DP, PAGE, False)
        top, total, acc = _attend(q, k, v, t, top, total, acc, scale, softcap, CAPPED, False)
    if whole < count:
        inside = whole + t < count
        slots = tl.load(slots_ptr + whole + t, mask=inside, other=0)
        k = _load_tokens(keys_ptr, slots, inside, key_page, key_token, D, DP, PAGE, True)
        v = _load_tokens(values_ptr, slots, inside, value_page, value_token, D, DP, PAGE, True)
        top, total, acc = _attend(q, k, v, inside[None, :], top, total, acc, scale, softcap, CAPPED, True)

    position = start + query
    newest = start + tl.minimum(first_query + QUERIES, stop_query) - 1
    whole = (
        oldest + tl.maximum(start + first_query + 1 - oldest, 0) // TOKENS * TOKENS
    )  # every query sees what is before
    for n in tl.range(oldest, whole, TOKENS, num_stages=STAGES):
        slots = tl.load(table_ptr + (n + t) // PAGE) * PAGE + (n + t) % PAGE
        k = _load_tokens(keys_ptr, slots, t, key_page, key_token, D, DP, PAGE, False)
        v = _load_tokens(values_ptr, slots, t, value_page, value_token, D, DP, PAGE, False)
        top, total, acc = _attend(q, k, v, t, top, total, acc, scale, softcap, CAPPED, False)
    for n in tl.range(whole, newest + 1, TOKENS, num_stages=STAGES):
        inside = n + t <= newest
        slots = tl.load(table_ptr + (n + t) // PAGE, mask=inside, other=0) * PAGE + (n + t) % PAGE
        k = _load_tokens(keys_ptr, slots, inside, key_page, key_token, D, DP, PAGE, True)
        v = _load_tokens(values_ptr, slots, inside, value_page, value_token, D, DP, PAGE, True)
        seen = (n + t)[None, :] <= position[:, None]
        top, total, acc = _attend(q, k, v, seen, top, total, acc, scale, softcap, CAPPED, True)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + (head.to(tl.int64) * out_head + query.to(tl.int64) * out_token)[:, None] + d[None, :], acc, mask=mask
    )
    lse = tl.where(total > 0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + head * num_queries + query, lse, mask=real)
