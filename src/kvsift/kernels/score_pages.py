"""Page scores of a decode step: one pass over the packed summaries, shared by the query heads of a KV head.

A row has two parts, its first head_dim numbers and at most as many others; a score is the sum of the products of both
with the query features of the kind (``kernels.page_summary``), which the kernel computes by the kind's twin, or reads.
On tensor cores the float32 features become three 16-bit terms side by side in the small operand, which has unused
columns anyway: the product is as exact as float32, at no cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.page_summary import Kind, find_kind, page_scores
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl, triton

TILE_PAGES = 64
TILE_NUMBERS = 1 << 14  # of half the rows of a block: more do not fit shared memory


def score_pages(
    queries: Tensor, summary: Tensor, table: Tensor, spans: Tensor, *, kind: Kind, scale: float, shared: bool
) -> Tensor:
    """Scores of every row's candidates.

    Args:
        queries: [batch, num_query_heads, head_dim].
        summary: [num_kv_heads, num_pages, width], packed rows by physical page.
        table: int32 [batch, max_pages].
        spans: int32 [batch, 4]: first candidate page, the page behind the last, pages to choose, pages held.
        kind: kind of summary, or its name.
        scale: factor of q.k.
        shared: the query heads of a KV head share a row, which holds their maximum.

    Returns:
        float32 [batch, num_kv_heads or num_query_heads, max_pages]; column i is candidate first + i; columns
        behind the candidates are undefined.
    """
    run = score_pages_triton if runs_on_triton(queries) else score_pages_reference
    return run(queries, summary, table, spans, kind=kind, scale=scale, shared=shared)


def score_pages_reference(
    queries: Tensor, summary: Tensor, table: Tensor, spans: Tensor, *, kind: Kind, scale: float, shared: bool
) -> Tensor:
    num_kv_heads, max_pages = summary.shape[0], table.shape[1]
    features = find_kind(kind).features(queries.float() * scale).unflatten(1, (num_kv_heads, -1))
    rows = []
    for features_of_row, pages, (first, stop, _, _) in zip(features, table.long(), spans.tolist()):
        scores = page_scores(features_of_row, summary[:, pages[first:stop]])  # [num_kv_heads, group, count]
        scores = scores.amax(1) if shared else scores.flatten(0, 1)
        rows.append(torch.nn.functional.pad(scores, (0, max_pages - scores.shape[1]), value=-torch.inf))
    return torch.stack(rows)


def score_pages_triton(
    queries: Tensor, summary: Tensor, table: Tensor, spans: Tensor, *, kind: Kind, scale: float, shared: bool
) -> Tensor:
    batch, num_query_heads, head_dim = queries.shape
    num_kv_heads, max_pages = summary.shape[0], table.shape[1]
    heads, group_size = num_kv_heads if shared else num_query_heads, num_query_heads // num_kv_heads
    scores = queries.new_empty(batch, heads, max_pages, dtype=torch.float32)
    kind, width, padded = find_kind(kind), summary.shape[2], power_of_two(group_size)
    assert head_dim <= width <= 2 * head_dim
    inputs = queries if kind.features_twin is not None else kind.features(queries.float() * scale)
    pages = min(TILE_PAGES, TILE_NUMBERS // power_of_two(head_dim))
    _score_kernel[triton.cdiv(max_pages, pages), num_kv_heads, batch](
        inputs.contiguous(), summary, table, spans, scores, summary.stride(0), summary.stride(1), max_pages, scale,
        kind.features_twin, G=group_size, GP=padded, COLUMNS=max(16, 4 * padded), D=head_dim, DP=power_of_two(head_dim),
        WIDTH=width, SHARED=shared, USE_DOT=summary.dtype != torch.float32 and group_size > 1, PAGES=pages,
        num_warps=4,
    )  # fmt: skip
    return scores


@jit
def load_features(x_ptr, head, d, inside, scale, features, D: tl.constexpr, WIDTH: tl.constexpr):
    """Features of query heads for both parts of a row; ``x_ptr`` holds queries, or features if there is no twin."""
    if features is None:
        numbers = x_ptr + head * WIDTH + d
        return tl.load(numbers, mask=inside, other=0.0), tl.load(numbers + D, mask=inside & (d < WIDTH - D), other=0.0)
    else:
        return features(tl.load(x_ptr + head * D + d, mask=inside, other=0.0).to(tl.float32) * scale)


@jit
def three_terms(x, term, dtype: tl.constexpr):
    """x as a sum of three 16-bit numbers; column by column the one that ``term`` names, zero from the fourth on."""
    first = x.to(dtype)
    rest = x - first.to(tl.float32)
    second = rest.to(dtype)
    third = (rest - second.to(tl.float32)).to(dtype)
    return tl.where(term == 0, first, tl.where(term == 1, second, tl.where(term == 2, third, tl.zeros_like(third))))


@jit
def load_summary(summary_ptr, physical, inside, stride_page, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr):
    """Both parts of the rows of some pages, [pages, DP] each, with zeros behind their numbers."""
    d = tl.arange(0, DP)
    rows = summary_ptr + physical[:, None] * stride_page
    low = tl.load(rows + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    others = D + (d if WIDTH > D + 1 else tl.zeros_like(d))  # a single number is read faster by one address
    return low, tl.load(rows + others[None, :], mask=inside[:, None] & (d < WIDTH - D)[None, :], other=0.0)


@jit
def score_tile(
    x_ptr, low, high, scale, features,
    G: tl.constexpr, GP: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr,
    USE_DOT: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Scores of some pages for the G query heads at ``x_ptr``: float32 [PAGES, GP], -inf in columns from G on."""
    d = tl.arange(0, DP)
    if USE_DOT:
        column = tl.arange(0, COLUMNS)
        g, term = column % GP, column // GP
        inside = (d < D)[:, None] & (g < G)[None, :]
        first, second = load_features(x_ptr, g[None, :], d[:, None], inside, scale, features, D, WIDTH)
        operand: tl.constexpr = tl.float16 if low.dtype.primitive_bitwidth == 8 else low.dtype
        acc = tl.dot(low.to(operand), three_terms(first, term[None, :], operand))
        acc = tl.dot(high.to(operand), three_terms(second, term[None, :], operand), acc)
        scores = tl.sum(tl.reshape(acc, (PAGES, COLUMNS // GP, GP)), 1)
    else:
        group = tl.arange(0, GP)
        scores = tl.full((PAGES, GP), float("-inf"), tl.float32)
        for head in tl.static_range(G):
            first, second = load_features(x_ptr, head, d, d < D, scale, features, D, WIDTH)
            products = low.to(tl.float32) * first[None, :] + high.to(tl.float32) * second[None, :]
            scores = tl.where((group == head)[None, :], tl.sum(products, 1)[:, None], scores)
    return tl.where((tl.arange(0, GP) < G)[None, :], scores, float("-inf"))


@jit
def _score_kernel(
    x_ptr, summary_ptr, table_ptr, spans_ptr, scores_ptr, stride_head, stride_page, max_pages, scale, features,
    G: tl.constexpr, GP: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr,
    SHARED: tl.constexpr, USE_DOT: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first, stop = tl.load(spans_ptr + batch * 4), tl.load(spans_ptr + batch * 4 + 1)
    if chunk * PAGES >= stop - first:
        return
    index = chunk * PAGES + tl.arange(0, PAGES)
    inside = index < stop - first
    physical = tl.load(table_ptr + batch * max_pages + first + index, mask=inside, other=0).to(tl.int64)
    low, high = load_summary(summary_ptr + head.to(tl.int64) * stride_head, physical, inside, stride_page, D, DP, WIDTH)
    x_ptr += (batch * num_kv_heads + head) * G * (D if features is not None else WIDTH)
    scores = score_tile(x_ptr, low, high, scale, features, G, GP, COLUMNS, D, DP, WIDTH, USE_DOT, PAGES)
    store_scores(scores_ptr, scores, index, inside, batch * num_kv_heads + head, max_pages, G, GP, SHARED)


@jit
def store_scores(
    scores_ptr, scores, index, inside, kv_row, stride, G: tl.constexpr, GP: tl.constexpr, SHARED: tl.constexpr
):
    """Write the scores [PAGES, GP] of one KV head: one row if its query heads share, else one per query head."""
    if SHARED:
        tl.store(scores_ptr + kv_row * stride + index, tl.max(scores, 1), mask=inside)
    else:
        g = tl.arange(0, GP)
        rows = scores_ptr + (kv_row * G + g)[None, :] * stride
        tl.store(rows + index[:, None], scores, mask=inside[:, None] & (g < G)[None, :])
