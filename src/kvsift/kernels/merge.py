"""Exact merge of attention over disjoint sets of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl, triton
from kvsift.types import Part

TILE_NUMBERS = 4096  # of one program


def merge(a: Part, b: Part) -> Part:
    """Attention over the union of two disjoint token sets.

    Args:
        a, b: output [batch, num_query_heads, num_queries, head_dim] in any dtype; lse [batch, num_query_heads,
            num_queries] float32, natural log, -inf for a row without visible tokens.

    Returns:
        The merged part, output in the dtype of ``a``. A part without visible tokens, whose output must be finite,
        changes nothing.

    Raises:
        ValueError: if the two parts differ in shape.

    Source: RetrievalAttention (arXiv 2409.10516), equations 4 and 5.
    """
    if a.output.shape != b.output.shape or a.lse.shape != b.lse.shape:
        raise ValueError(f"parts differ in shape: {tuple(a.output.shape)} and {tuple(b.output.shape)}")
    return _run(a)(a, b)


def _run(a: Part) -> Callable[..., Part]:
    return merge_reference if a.output.is_cpu or not runs_on_triton(a.output) else merge_triton


def merge_all(parts: Iterable[Part]) -> Part:
    """As ``merge``, of several parts, and rounded once; each may be made when those before it have been merged."""
    following = iter(parts)
    merged, is_own = next(following), False
    dtype, run = merged.output.dtype, _run(merged)
    for part in following:
        if not is_own:
            sums = merged.output.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            merged, is_own = Part(sums, merged.lse), True
        merged = run(merged, part, overwrite=True)
        del part  # before the next one is made
    return Part(merged.output.to(dtype), merged.lse)


def merge_reference(a: Part, b: Part, overwrite: bool = False) -> Part:
    """As ``merge``; ``overwrite`` allows the output of ``a`` to be changed."""
    lse = torch.logaddexp(a.lse, b.lse)
    # exp(-inf - -inf) is NaN: a row without visible tokens in either part takes nothing of b
    share = torch.exp(b.lse - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    return Part(torch.lerp(a.output.float(), b.output.float(), share).to(a.output.dtype), lse)


def merge_triton(a: Part, b: Part, overwrite: bool = False) -> Part:
    """As ``merge``; with ``overwrite`` the output of ``a``, contiguous, becomes the merged one."""
    num_heads, num_queries, head_dim = a.output.shape[1:]
    a_lse, b_lse = a.lse.contiguous(), b.lse.contiguous()
    a_output, b_output = (p.output if p.output.stride(3) == 1 else p.output.contiguous() for p in (a, b))
    output = a_output if overwrite else torch.empty_like(a_output, memory_format=torch.contiguous_format)
    lse = torch.empty_like(a_lse)
    width = power_of_two(head_dim)
    rows = max(1, TILE_NUMBERS // width)
    if lse.numel():
        with torch.cuda.device_of(output):  # it may differ from the current device
            _merge_kernel[(triton.cdiv(lse.numel(), rows),)](
                a_output, b_output, a_lse, b_lse, output, lse, *a_output.stride()[:3], *b_output.stride()[:3],
                lse.numel(), num_heads, num_queries, D=head_dim, DP=width, ROWS=rows, num_warps=4,
            )  # fmt: skip
    return Part(output, lse)


def with_sink_logit(part: Part, sink_logit: Tensor) -> Part:
    """Add a learned extra logit per head, [num_query_heads], whose value is zero (GPT-OSS)."""
    logit = sink_logit.float().view(1, -1, 1).expand_as(part.lse)
    return merge(part, Part(torch.zeros_like(part.output), logit))


@jit
def _merge_kernel(
    a_ptr, b_ptr, a_lse_ptr, b_lse_ptr, out_ptr, lse_ptr, a_batch, a_head, a_query, b_batch, b_head, b_query,
    count, num_heads, num_queries, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    inside = row < count
    mask = inside[:, None] & (d < D)[None, :]
    query, head, batch = row % num_queries, row // num_queries % num_heads, row // num_queries // num_heads
    a_lse = tl.load(a_lse_ptr + row, mask=inside, other=0.0)
    b_lse = tl.load(b_lse_ptr + row, mask=inside, other=0.0)
    top = tl.maximum(a_lse, b_lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    lse = top + tl.log(tl.exp(a_lse - top) + tl.exp(b_lse - top))
    shift = tl.where(lse == float("-inf"), 0.0, lse)
    a_row, b_row = batch * a_batch + head * a_head + query * a_query, batch * b_batch + head * b_head + query * b_query
    a = tl.load(a_ptr + a_row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + b_row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    merged = a * tl.exp(a_lse - shift)[:, None] + b * tl.exp(b_lse - shift)[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], merged, mask=mask)
    tl.store(lse_ptr + row, lse, mask=inside)
