"""Distance of each query of a segment from the segment's mean query: two passes, the second reads the L2 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit_for_any, power_of_two, runs_on_triton, tl

SMALLEST_NORM = 1e-6
QUERIES, WARPS = 64, 4  # of a tile


def unlikeness(queries: Tensor, num_segments: int, count: int) -> Tensor:
    """Return -cos(mean, q) of each query, with the mean of its head and segment.

    Args:
        queries: [num_query_heads, num_segments * num_queries, head_dim].
        num_segments: number of segments, which are of equal length.
        count: if the queries of a segment cancel out, so that the mean has no direction, so many evenly spaced queries
            get 1 and the others -1.

    Returns:
        float32 [num_segments, num_query_heads, num_queries].

    Source: QuoKA (arXiv 2602.08722), the score of its query selection.
    """
    run = unlikeness_triton if runs_on_triton(queries) else unlikeness_reference
    return run(queries, num_segments, count)


def unlikeness_reference(queries: Tensor, num_segments: int, count: int) -> Tensor:
    q = queries.float().unflatten(1, (num_segments, -1)).transpose(0, 1)  # [num_segments, heads, num_queries, head_dim]
    mean, norms = q.mean(-2, keepdim=True), q.norm(dim=-1)
    length = mean.norm(dim=-1)  # [.., 1]
    products = (q @ mean.mT).squeeze(-1)
    cosines = products / (norms * length).clamp_min(SMALLEST_NORM**2)
    position = torch.arange(q.shape[-2], device=q.device)
    spaced = torch.where(position * count % q.shape[-2] < count, 1.0, -1.0)
    return torch.where(length < SMALLEST_NORM * norms.mean(-1, keepdim=True), spaced, -cosines)


def unlikeness_triton(queries: Tensor, num_segments: int, count: int) -> Tensor:
    num_heads, num_tokens, head_dim = queries.shape
    size = num_tokens // num_segments
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    out = torch.empty(num_segments, num_heads, size, dtype=torch.float32, device=queries.device)
    with torch.cuda.device_of(queries):
        _unlikeness_kernel[num_segments, num_heads](
            queries, out, *queries.stride()[:2], size, count, SMALLEST=SMALLEST_NORM, D=head_dim,
            DP=power_of_two(head_dim), QUERIES=QUERIES, num_warps=WARPS,
        )  # fmt: skip
    return out


@jit_for_any("size", "count")
def _unlikeness_kernel(
    q_ptr, out_ptr, q_head, q_token, size, count, SMALLEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    segment, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    n, d = tl.arange(0, QUERIES).to(tl.int64), tl.arange(0, DP)
    q_ptr += head.to(tl.int64) * q_head + segment.to(tl.int64) * size * q_token
    out_ptr += (segment * num_heads + head).to(tl.int64) * size
    total, norms = tl.zeros((DP,), tl.float32), 0.0
    for first in tl.range(0, size, QUERIES, num_stages=3):
        mask = (first + n < size)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (first + n)[:, None] * q_token + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(q, 0)
        norms += tl.sum(tl.sqrt(tl.sum(q * q, 1)), 0)
    mean = total / size
    length = tl.sqrt(tl.sum(mean * mean, 0))
    for first in tl.range(0, size, QUERIES, num_stages=3):
        at = first + n
        mask = (at < size)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + at[:, None] * q_token + d[None, :], mask=mask, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(q * q, 1))
        cosine = tl.sum(q * mean[None, :], 1) / tl.maximum(norm * length, SMALLEST * SMALLEST)
        spaced = tl.where(at * count % size < count, 1.0, -1.0)
        tl.store(out_ptr + at, tl.where(length < SMALLEST * (norms / size), spaced, -cosine), mask=at < size)
