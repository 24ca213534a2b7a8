"""Summary rows of one page from its keys in registers: what ``page_summary.summarise`` does, inside a decode kernel.

A page's keys are ``keys`` float32 [PAGE, DP] with ``valid`` bool [PAGE]; D of the DP columns are real. Every kind that
is asked for has a pool, the others are None.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, tl

KINDS = ("minmax", "mean_std", "centroid_radius", "log_mass", "minmax_fp8")


def summary_pools(summaries: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """A pool or None for every kind, as keyword arguments of a kernel; 8-bit floats as bytes.

    summaries: kind -> [num_kv_heads, num_pages, width], contiguous.
    """
    assert summaries.keys() <= set(KINDS), f"no kernel writes summaries of kind {summaries.keys() - set(KINDS)}"
    assert all(pool.is_contiguous() for pool in summaries.values())
    pools: dict[str, Tensor | None] = dict.fromkeys(KINDS)
    pools.update(summaries)
    if pools["minmax_fp8"] is not None:
        pools["minmax_fp8"] = pools["minmax_fp8"].view(torch.uint8)
    return pools


@jit
def store_summaries(
    keys, valid, index, minmax, mean_std, centroid_radius, log_mass, minmax_fp8, EPS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Write the rows of the page at ``index`` (int64: KV head * pages + page). EPS is the KV dtype's."""
    d = tl.arange(0, DP)
    if minmax is not None or minmax_fp8 is not None:
        top = tl.max(tl.where(valid[:, None], keys, float("-inf")), 0)
        bottom = tl.min(tl.where(valid[:, None], keys, float("inf")), 0)
        if minmax is not None:
            store_halves(minmax + index * (2 * D), top, bottom, D, DP)
        if minmax_fp8 is not None:
            low = fp8_above(-bottom) ^ 128  # rounding down is rounding the negative up
            store_halves(minmax_fp8 + index * (2 * D), fp8_above(top), low, D, DP)
    if mean_std is not None or centroid_radius is not None or log_mass is not None:
        count = tl.sum(valid.to(tl.float32), 0)
        mean = tl.div_rn(tl.sum(tl.where(valid[:, None], keys, 0.0), 0), count)
        deviation = tl.where(valid[:, None], keys - mean[None, :], 0.0)
        variance = tl.div_rn(tl.sum(deviation * deviation, 0), count)
        if mean_std is not None:
            store_halves(mean_std + index * (2 * D), mean, tl.sqrt_rn(variance), D, DP)
        if log_mass is not None:
            store_halves(log_mass + index * (2 * D), mean, variance, D, DP)
        if centroid_radius is not None:
            row = centroid_radius + index * (D + 1)
            centroid = mean.to(row.dtype.element_ty)  # the radius belongs to the centroid as stored
            deviation = tl.where(valid[:, None], keys - centroid.to(tl.float32)[None, :], 0.0)
            radius = tl.max(tl.sqrt_rn(tl.sum(deviation * deviation, 1)), 0)
            tl.store(row + d, centroid, mask=d < D)
            tl.store(row + D, radius * (1 + 2 * EPS))


@jit
def store_halves(row, first, second, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(row + d, first.to(row.dtype.element_ty), mask=d < D)
    tl.store(row + D + d, second.to(row.dtype.element_ty), mask=d < D)


@jit
def fp8_above(x):
    """Bits of the smallest float8_e4m3fn that is not below x / 8, in int32; what is beyond 448 becomes 448.

    In integers, because the conversion of the hardware rounds to nearest.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # numbers from 8 * 2^-6 on keep their exponent and three bits of the mantissa; below, the step is 8 * 2^-9
    is_normal = magnitude >= (124 << 23)
    steps = tl.abs(x) * 64.0
    code = tl.where(is_normal, (magnitude >> 20) - (123 << 3), steps.to(tl.int32))
    inexact = tl.where(is_normal, (magnitude & 0xFFFFF) != 0, code.to(tl.float32) != steps)
    code += (inexact & (x > 0)).to(tl.int32)  # cutting bits off rounds negative numbers up already
    code = tl.minimum(code, 0x7E)
    return tl.where(bits < 0, code | 128, code)
