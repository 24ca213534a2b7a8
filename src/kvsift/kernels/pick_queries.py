"""The queries of each segment with the largest scores, prepared for products with the keys: one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit_for_any, power_of_two, runs_on_triton, tl

SMALLEST_NORM = 1e-6
QUERIES, WARPS = 64, 4  # of a tile


def pick_queries(
    queries: Tensor, scores: Tensor, num_kv_heads: int, count: int, *, shared: bool, mean: bool, unit: bool
) -> Tensor:
    """Pick the queries of the largest scores, the earlier of equal ones, by descending score.

    Args:
        queries: [num_query_heads, num_segments * num_queries, head_dim].
        scores: float32 [num_segments, num_query_heads, num_queries].
        num_kv_heads: consecutive query heads that read one KV head are a group.
        count: number of queries to pick, at most num_queries.
        shared: by the mean score of the group, the same for all its heads; otherwise each head picks its own.
        mean: average over the heads of a group what each has picked; otherwise it follows one after the other.
        unit: divide queries by their norm.

    Returns:
        float32 [num_segments, num_kv_heads, count, head_dim], with group_size * count queries unless ``mean``.
    """
    run = pick_queries_triton if runs_on_triton(queries) else pick_queries_reference
    return run(queries, scores, num_kv_heads, count, shared=shared, mean=mean, unit=unit)


def pick_queries_reference(
    queries: Tensor, scores: Tensor, num_kv_heads: int, count: int, *, shared: bool, mean: bool, unit: bool
) -> Tensor:
    q = queries.unflatten(1, (len(scores), -1)).transpose(0, 1).unflatten(1, (num_kv_heads, -1))
    scores = scores.unflatten(1, (num_kv_heads, -1))  # [num_segments, num_kv_heads, group_size, num_queries]
    if shared:
        scores = scores.mean(-2, keepdim=True)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]  # sorted, to pair heads by rank
    q = q.gather(-2, chosen.unsqueeze(-1).expand(*q.shape[:-2], count, q.shape[-1])).float()
    return averaged(q, mean=mean, unit=unit)


def averaged(q: Tensor, *, mean: bool, unit: bool) -> Tensor:
    """As ``pick_queries``, of picked queries [num_segments, num_kv_heads, group_size, count, head_dim]."""
    if unit:
        q = q / q.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
    return q.mean(-3) if mean else q.flatten(-3, -2)


def pick_queries_triton(
    queries: Tensor, scores: Tensor, num_kv_heads: int, count: int, *, shared: bool, mean: bool, unit: bool
) -> Tensor:
    num_segments, num_heads, size = scores.shape
    group, head_dim = num_heads // num_kv_heads, queries.shape[2]
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    out = scores.new_empty(num_segments, num_kv_heads, count if mean else group * count, head_dim)
    with torch.cuda.device_of(queries):
        _pick_kernel[num_segments, num_kv_heads](
            queries, scores.contiguous(), out, *queries.stride()[:2], size, SHARED=shared, MEAN=mean, UNIT=unit,
            SMALLEST=SMALLEST_NORM, G=group, KEPT=count, KEPTP=power_of_two(count), D=head_dim,
            DP=power_of_two(head_dim), QUERIES=QUERIES, num_warps=WARPS,
        )  # fmt: skip
    return out


@jit_for_any("size")
def _pick_kernel(
    q_ptr, scores_ptr, out_ptr, q_head, q_token, size, SHARED: tl.constexpr, MEAN: tl.constexpr, UNIT: tl.constexpr,
    SMALLEST: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, KEPTP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    segment, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = segment * tl.num_programs(1) + kv_head
    n, r, d = tl.arange(0, QUERIES), tl.arange(0, KEPTP), tl.arange(0, DP)
    mask = (r < KEPT)[:, None] & (d < D)[None, :]
    scores_ptr += pair * G * size
    out_ptr += pair * (KEPT if MEAN else G * KEPT) * D
    total = tl.zeros((KEPTP, DP), tl.float32)
    at = tl.zeros((KEPTP,), tl.int32)  # the query of each rank
    for g in tl.static_range(G):
        if not SHARED or g == 0:
            at = tl.zeros((KEPTP,), tl.int32)
            for first in range(0, size, QUERIES):
                own = _scores(scores_ptr + g * size, first + n, size, G if SHARED else 1)
                rank = tl.zeros((QUERIES,), tl.int32)
                for other in range(0, size, QUERIES):
                    others = _scores(scores_ptr + g * size, other + n, size, G if SHARED else 1)
                    earlier = (other + n)[None, :] < (first + n)[:, None]
                    ahead = (others[None, :] > own[:, None]) | ((others[None, :] == own[:, None]) & earlier)
                    rank += tl.sum(ahead.to(tl.int32), 1)
                here = (rank[None, :] == r[:, None]) & (first + n < size)[None, :]
                at += tl.sum(tl.where(here, (first + n)[None, :], 0), 1)
            at = tl.minimum(at, size - 1)  # scores that are NaN share a rank
        place = (kv_head * G + g).to(tl.int64) * q_head + (segment * size + at) * q_token
        q = tl.load(q_ptr + place[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        if UNIT:
            q = q / tl.maximum(tl.sqrt(tl.sum(q * q, 1)), SMALLEST)[:, None]
        if MEAN:
            total += q
        else:
            tl.store(out_ptr + (g * KEPT + r)[:, None] * D + d[None, :], q, mask=mask)
    if MEAN:
        tl.store(out_ptr + r[:, None] * D + d[None, :], total / G, mask=mask)


@jit_for_any("size")
def _scores(scores_ptr, at, size, HEADS: tl.constexpr):
    """Mean scores of queries over heads; those that there are not come last."""
    total = tl.load(scores_ptr + at, mask=at < size, other=float("-inf"))
    for head in tl.static_range(1, HEADS):
        total += tl.load(scores_ptr + head * size + at, mask=at < size, other=float("-inf"))
    return total / HEADS
