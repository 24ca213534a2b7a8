"""Page scores of a decode step: one pass over the packed summaries, all query heads of a KV head sharing it.

A row of a summary has two halves, and every kind's score is ``low . f(q) + high . g(q)`` (``kernels.page_summary``).
On tensor cores the float32 features become three 16-bit terms side by side in the small operand, which has unused
columns anyway: the product is as exact as float32, and costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES, page_scores
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl, triton

KINDS = {"minmax": 0, "mean_std": 1, "centroid_radius": 2, "log_mass": 3, "minmax_fp8": 4}
FP8_FACTOR = 8.0  # minmax_fp8 stores an eighth
BLOCK_PAGES = 64


def score_pages(
    queries: Tensor, summary: Tensor, table: Tensor, spans: Tensor, *, kind: str, scale: float, shared: bool
) -> Tensor:
    """Scores of every row's candidates.

    Args:
        queries: [batch, num_query_heads, head_dim].
        summary: [num_kv_heads, num_pages, width], packed rows by physical page.
        table: int32 [batch, max_pages].
        spans: int32 [batch, 4]: first candidate page, the page behind the last, pages to choose, pages held.
        kind: of summary.
        scale: factor of q.k.
        shared: the query heads of a KV head share a row, which holds their maximum.

    Returns:
        float32 [batch, num_kv_heads or num_query_heads, max_pages]; column i is candidate first + i, what lies behind
        the candidates is undefined.
    """
    run = score_pages_triton if runs_on_triton(queries) else score_pages_reference
    return run(queries, summary, table, spans, kind=kind, scale=scale, shared=shared)


def score_pages_reference(
    queries: Tensor, summary: Tensor, table: Tensor, spans: Tensor, *, kind: str, scale: float, shared: bool
) -> Tensor:
    num_kv_heads, max_pages = summary.shape[0], table.shape[1]
    features = SUMMARIES[kind].features(queries.float() * scale).unflatten(1, (num_kv_heads, -1))
    rows = []
    for features_of_row, pages, (first, stop, _, _) in zip(features, table.long(), spans.tolist()):
        scores = page_scores(features_of_row, summary[:, pages[first:stop]])  # [num_kv_heads, group, count]
        scores = scores.amax(1) if shared else scores.flatten(0, 1)
        rows.append(torch.nn.functional.pad(scores, (0, max_pages - scores.shape[1]), value=-torch.inf))
    return torch.stack(rows)


def score_pages_triton(
    queries: Tensor, summary: Tensor, table: Tensor, spans: Tensor, *, kind: str, scale: float, shared: bool
) -> Tensor:
    batch, num_query_heads, head_dim = queries.shape
    num_kv_heads, max_pages = summary.shape[0], table.shape[1]
    queries, heads = queries.contiguous(), num_kv_heads if shared else num_query_heads
    scores = queries.new_empty(batch, heads, max_pages, dtype=torch.float32)
    _score_kernel[triton.cdiv(max_pages, BLOCK_PAGES), num_kv_heads, batch](
        queries, summary, table, spans, scores, summary.stride(0), summary.stride(1), max_pages, scale,
        **score_constants(num_query_heads // num_kv_heads, head_dim, kind, summary.dtype, shared), num_warps=4,
    )  # fmt: skip
    return scores


def score_constants(group_size: int, head_dim: int, kind: str, dtype: torch.dtype, shared: bool) -> dict[str, object]:
    """What the kernel is compiled for."""
    padded = power_of_two(group_size)
    return {
        "G": group_size, "GP": padded, "COLUMNS": max(16, 4 * padded), "D": head_dim, "DP": power_of_two(head_dim),
        "KIND": KINDS[kind], "FACTOR": FP8_FACTOR if kind == "minmax_fp8" else 1.0, "SHARED": shared,
        "USE_DOT": dtype != torch.float32 and group_size > 1, "PAGES": BLOCK_PAGES,
    }  # fmt: skip


@jit
def low_features(q, KIND: tl.constexpr):
    if KIND == 0 or KIND == 4:
        return tl.maximum(q, 0.0)
    return q


@jit
def high_features(q, norm, KIND: tl.constexpr):
    if KIND == 0 or KIND == 4:
        return tl.minimum(q, 0.0)
    elif KIND == 1:
        return tl.abs(q)
    elif KIND == 2:
        return norm + tl.zeros_like(q)
    return 0.5 * q * q


@jit
def three_terms(x, term, dtype: tl.constexpr):
    """x as a sum of three 16-bit numbers; column by column the one that ``term`` names, zero from the fourth on."""
    first = x.to(dtype)
    rest = x - first.to(tl.float32)
    second = rest.to(dtype)
    third = (rest - second.to(tl.float32)).to(dtype)
    return tl.where(term == 0, first, tl.where(term == 1, second, tl.where(term == 2, third, tl.zeros_like(third))))


@jit
def load_summary(summary_ptr, physical, inside, stride_page, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    """Both halves of the rows of some pages: [pages, DP] each; the second [pages, 1] where it is one number."""
    d = tl.arange(0, DP)
    rows = summary_ptr + physical[:, None] * stride_page
    mask = inside[:, None] & (d < D)[None, :]
    low = tl.load(rows + d[None, :], mask=mask, other=0.0)
    if KIND == 2:
        high = tl.load(rows + D + tl.zeros_like(d)[None, :], mask=mask & (d == 0)[None, :], other=0.0)
    else:
        high = tl.load(rows + D + d[None, :], mask=mask, other=0.0)
    return low, high


@jit
def score_tile(
    q_ptr, low, high, scale,
    G: tl.constexpr, GP: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr,
    FACTOR: tl.constexpr, USE_DOT: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Scores of some pages for the G query heads at ``q_ptr``: float32 [PAGES, GP], -inf in columns from G on."""
    d = tl.arange(0, DP)
    if USE_DOT:
        column = tl.arange(0, COLUMNS)
        g, term = column % GP, column // GP
        mask = (d < D)[:, None] & (g < G)[None, :]
        q = tl.load(q_ptr + g[None, :] * D + d[:, None], mask=mask, other=0.0).to(tl.float32) * scale * FACTOR
        norm = tl.sqrt(tl.sum(q * q, 0))[None, :]
        operand: tl.constexpr = tl.float16 if KIND == 4 else low.dtype
        acc = tl.dot(low.to(operand), three_terms(low_features(q, KIND), term[None, :], operand))
        acc = tl.dot(high.to(operand), three_terms(high_features(q, norm, KIND), term[None, :], operand), acc)
        scores = tl.sum(tl.reshape(acc, (PAGES, COLUMNS // GP, GP)), 1)
    else:
        group = tl.arange(0, GP)
        scores = tl.full((PAGES, GP), float("-inf"), tl.float32)
        for each in tl.static_range(G):
            q = tl.load(q_ptr + each * D + d, mask=d < D, other=0.0).to(tl.float32) * scale * FACTOR
            norm = tl.sqrt(tl.sum(q * q, 0))
            both = low.to(tl.float32) * low_features(q, KIND)[None, :]
            both += high.to(tl.float32) * high_features(q, norm, KIND)[None, :]
            scores = tl.where((group == each)[None, :], tl.sum(both, 1)[:, None], scores)
    return tl.where((tl.arange(0, GP) < G)[None, :], scores, float("-inf"))


@jit
def _score_kernel(
    q_ptr, summary_ptr, table_ptr, spans_ptr, scores_ptr, stride_head, stride_page, max_pages, scale,
    G: tl.constexpr, GP: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr,
    FACTOR: tl.constexpr, SHARED: tl.constexpr, USE_DOT: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first, stop = tl.load(spans_ptr + batch * 4), tl.load(spans_ptr + batch * 4 + 1)
    if chunk * PAGES >= stop - first:
        return
    index = chunk * PAGES + tl.arange(0, PAGES)
    inside = index < stop - first
    physical = tl.load(table_ptr + batch * max_pages + first + index, mask=inside, other=0).to(tl.int64)
    low, high = load_summary(summary_ptr + head.to(tl.int64) * stride_head, physical, inside, stride_page, D, DP, KIND)
    q_row = q_ptr + (batch * num_kv_heads + head) * G * D
    scores = score_tile(q_row, low, high, scale, G, GP, COLUMNS, D, DP, KIND, FACTOR, USE_DOT, PAGES)
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
