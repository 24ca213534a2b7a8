"""Triton twins of ``page_summary``'s functions: the row of one page from keys in registers, and query features.

A twin of ``rows`` writes one row: ``(row, keys, valid, D, DP)`` with a pointer to the row, keys float32 [PAGE, DP], of
which D columns are real, and valid bool [PAGE]. A twin of ``features`` takes scaled queries, float32 [DP, ...], and
returns two tensors of that shape: the factors of a row's first D numbers, and of the others.
"""

from __future__ import annotations

from kvsift.kernels.triton_shim import constant, jit, tl

FP8_SCALE = 8.0  # rows of minmax_fp8 hold an eighth
SCALE = constant(FP8_SCALE)


@jit
def minmax_row(row, keys, valid, D: tl.constexpr, DP: tl.constexpr):
    top, bottom = extremes(keys, valid)
    store_halves(row, top, bottom, D, DP)


@jit
def minmax_fp8_row(row, keys, valid, D: tl.constexpr, DP: tl.constexpr):
    top, bottom = extremes(keys, valid)
    store_halves(row, fp8_above(top), fp8_above(-bottom) ^ 128, D, DP)  # rounding down is rounding the negative up


@jit
def mean_std_row(row, keys, valid, D: tl.constexpr, DP: tl.constexpr):
    mean, variance = moments(keys, valid)
    store_halves(row, mean, tl.sqrt_rn(variance), D, DP)


@jit
def log_mass_row(row, keys, valid, D: tl.constexpr, DP: tl.constexpr):
    mean, variance = moments(keys, valid)
    store_halves(row, mean, variance, D, DP)


@jit
def centroid_radius_row(row, keys, valid, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    centroid = mean_of(keys, valid).to(row.dtype.element_ty)  # the radius belongs to the centroid as stored
    deviation = tl.where(valid[:, None], keys - centroid.to(tl.float32)[None, :], 0.0)
    radius = tl.max(tl.sqrt_rn(tl.sum(deviation * deviation, 1)), 0)
    epsilon: tl.constexpr = 1 / (1 << row.dtype.element_ty.fp_mantissa_width)
    tl.store(row + d, centroid, mask=d < D)
    tl.store(row + D, radius * (1 + 2 * epsilon))


@jit
def write_row(row, keys, valid, KIND: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The row of a kind by its name. (Functions as arguments upset hooks of Triton that write arguments as JSON.)"""
    if KIND == "minmax":
        minmax_row(row, keys, valid, D, DP)
    elif KIND == "minmax_fp8":
        minmax_fp8_row(row, keys, valid, D, DP)
    elif KIND == "mean_std":
        mean_std_row(row, keys, valid, D, DP)
    elif KIND == "log_mass":
        log_mass_row(row, keys, valid, D, DP)
    else:
        tl.static_assert(KIND == "centroid_radius")
        centroid_radius_row(row, keys, valid, D, DP)


@jit
def minmax_features(q):
    return tl.maximum(q, 0.0), tl.minimum(q, 0.0)


@jit
def minmax_fp8_features(q):
    return tl.maximum(q, 0.0) * SCALE, tl.minimum(q, 0.0) * SCALE


@jit
def mean_std_features(q):
    return q, tl.abs(q)


@jit
def log_mass_features(q):
    return q, 0.5 * q * q


@jit
def centroid_radius_features(q):
    return q, tl.sqrt(tl.sum(q * q, 0, keep_dims=True)) + tl.zeros_like(q)


@jit
def extremes(keys, valid):
    """Largest and smallest number of each channel [DP]."""
    top = tl.max(tl.where(valid[:, None], keys, float("-inf")), 0)
    return top, tl.min(tl.where(valid[:, None], keys, float("inf")), 0)


@jit
def mean_of(numbers, valid):
    """Mean of each channel [DP]."""
    total = tl.sum(tl.where(valid[:, None], numbers, 0.0), 0)
    return tl.div_rn(total, tl.sum(valid.to(tl.float32), 0))


@jit
def moments(keys, valid):
    """Mean and variance of each channel [DP]."""
    mean = mean_of(keys, valid)
    deviation = keys - mean[None, :]
    return mean, mean_of(deviation * deviation, valid)


@jit
def store_halves(row, first, second, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(row + d, first.to(row.dtype.element_ty), mask=d < D)
    tl.store(row + D + d, second.to(row.dtype.element_ty), mask=d < D)


@jit
def fp8_above(x):
    """Bits of the smallest float8_e4m3fn that is not below x / 8, in int32; larger ones than 448 become 448.

    In integers, because the hardware's conversion rounds to nearest.
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
