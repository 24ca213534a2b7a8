"""Largest and smallest number of each channel in each segment of queries, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit_for_any, power_of_two, runs_on_triton, tl, triton

QUERIES, WARPS = 64, 4  # of a tile


def extremes(x: Tensor, size: int) -> Tensor:
    """Return the extremes of consecutive segments of ``size`` rows; the last one may be shorter.

    x [num_heads, num_rows, head_dim] -> float32 [num_heads, num_segments, 2 * head_dim], largest numbers first.
    """
    return (extremes_triton if runs_on_triton(x) else extremes_reference)(x, size)


def extremes_reference(x: Tensor, size: int) -> Tensor:
    whole = x.shape[1] // size * size
    parts = [x[:, :whole].unflatten(1, (-1, size)), x[:, whole:].unsqueeze(1)]
    return torch.cat([torch.cat([part.amax(2), part.amin(2)], -1) for part in parts if part.numel()], 1).float()


def extremes_triton(x: Tensor, size: int) -> Tensor:
    num_heads, num_rows, head_dim = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    num_segments = triton.cdiv(num_rows, size)
    out = torch.empty(num_heads, num_segments, 2 * head_dim, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _extremes_kernel[num_segments, num_heads](
            x, out, *x.stride()[:2], num_rows, size, D=head_dim, DP=power_of_two(head_dim), QUERIES=QUERIES,
            num_warps=WARPS,
        )  # fmt: skip
    return out


@jit_for_any("num_rows", "size")
def _extremes_kernel(
    x_ptr, out_ptr, x_head, x_row, num_rows, size, D: tl.constexpr, DP: tl.constexpr, QUERIES: tl.constexpr
):
    segment, head = tl.program_id(0), tl.program_id(1)
    n, d = tl.arange(0, QUERIES), tl.arange(0, DP)
    first, stop = segment * size, tl.minimum((segment + 1) * size, num_rows)
    x_ptr += head.to(tl.int64) * x_head
    top, bottom = tl.full((DP,), float("-inf"), tl.float32), tl.full((DP,), float("inf"), tl.float32)
    for row in tl.range(first, stop, QUERIES, num_stages=3):
        at = tl.minimum(row + n, stop - 1)  # repeats of the last row change nothing
        x = tl.load(x_ptr + at.to(tl.int64)[:, None] * x_row + d[None, :], mask=(d < D)[None, :], other=0.0)
        top = tl.maximum(top, tl.max(x, 0).to(tl.float32))
        bottom = tl.minimum(bottom, tl.min(x, 0).to(tl.float32))
    out_ptr += (head * tl.num_programs(0) + segment).to(tl.int64) * 2 * D
    tl.store(out_ptr + d, top, mask=d < D)
    tl.store(out_ptr + D + d, bottom, mask=d < D)
