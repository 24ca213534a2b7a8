"""The work of a decoder step besides its attention: norms, a few rows times weight matrices, rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.native.loader import AVAILABLE, core, num_threads
from kvsift.native.shapes import ROW_DTYPES

MAX_ROWS = 8  # of x, which share one read of the weights, each with the sums that it has alone
Norm = tuple[Tensor, float] | tuple[Tensor, float, float]  # of RMS: weight [in], eps, and what is added to the weight
NO_NORM = 0, 0.0, 0.0  # as the core takes it


def takes_product(x: Tensor, weight: Tensor, steady: bool = False) -> bool:
    """Whether the compiled core is available and multiplies x [rows, in] with weight [out, in]; it takes any number of
    rows if they are to have the bits that few have (``steady``), though a library is faster then."""
    return (
        AVAILABLE
        and x.is_cpu
        and weight.is_cpu
        and x.shape[0] > 0
        and (steady or x.shape[0] <= MAX_ROWS)
        and x.dtype == weight.dtype
        and weight.dtype in ROW_DTYPES
        and x.shape[1] % 8 == 0
        and weight.is_contiguous()
    )


def takes_rows(x: Tensor) -> bool:
    """Whether the compiled core is available and normalises rows x."""
    return AVAILABLE and x.is_cpu and x.dtype in ROW_DTYPES


def numbers_of(norm: Norm) -> tuple[int, float, float]:
    """Address, eps and offset of a norm, as the core takes them."""
    return norm[0].data_ptr(), norm[1], norm[2] if len(norm) == 3 else 0.0


def normalised(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """``residual + rms_norm(x)``, both rounded, with the bits that it has in ``product``; x, residual [rows, width]."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    residual = None if residual is None else residual.contiguous()
    core.normalise(
        x.dtype == torch.bfloat16, x.data_ptr(), *x.shape, *numbers_of(norm),
        0 if residual is None else residual.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None, gated: bool = False, gelu: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """``residual + (rms_norm(x) @ weight.T + bias)``; every step is summed in float32 and rounded to the dtype of x.

    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out].
        norm: weight [in] and eps of an RMS norm of x, and perhaps an offset.
        residual: [rows, out].
        gated: instead, silu of the first half of the products times the second half, [rows, out / 2].
        gelu: gated by GELU by tanh instead of silu.
        threads: torch's by default.
    """
    if x.shape[0] > MAX_ROWS:
        residuals = [None] * len(x) if residual is None else residual.split(MAX_ROWS)
        parts = zip(x.split(MAX_ROWS), residuals)
        how = {"norm": norm, "gated": gated, "gelu": gelu, "threads": threads}
        return torch.cat([product(part, weight, bias, residual=each, **how) for part, each in parts])  # type: ignore[arg-type]
    assert x.dtype == weight.dtype
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, width), num_out = x.shape, weight.shape[0]
    out = x.new_empty(rows, num_out // 2 if gated else num_out)
    core.multiply(
        x.dtype == torch.bfloat16, x.data_ptr(), rows, weight.data_ptr(), num_out, width,
        *(NO_NORM if norm is None else numbers_of(norm)), 0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        gated, gelu, num_threads(threads), out.data_ptr(),
    )  # fmt: skip
    return out


def rotate(
    heads: Tensor, cos: Tensor, sin: Tensor, num_query_heads: int, num_kv_heads: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> None:  # fmt: skip
    """Rotate queries and keys of tokens in place, each head after an RMS norm if there is a norm weight [head_dim], to
    which the offset is added.

    heads [tokens, num_query_heads + 2 * num_kv_heads, head_dim], contiguous, queries first, then keys, then values,
    which stay; cos, sin [tokens, numbers of a head that are rotated], contiguous, in the dtype of the heads.
    """
    is_bfloat16, (num_tokens, num_heads, head_dim) = heads.dtype == torch.bfloat16, heads.shape
    number, rotated = heads.element_size(), cos.shape[1]
    parts = [(0, num_query_heads, q_norm), (num_query_heads, num_kv_heads, k_norm)]
    if q_norm is None and k_norm is None:
        parts = [(0, num_query_heads + num_kv_heads, None)]
    start, cos_start, sin_start = heads.data_ptr(), cos.data_ptr(), sin.data_ptr()
    for token in range(num_tokens):
        angles = cos_start + token * rotated * number, sin_start + token * rotated * number
        for first, count, norm in parts:
            core.rotate(
                is_bfloat16, start + (token * num_heads + first) * head_dim * number, count, head_dim, rotated, *angles,
                0 if norm is None else norm.data_ptr(), eps, offset,
            )  # fmt: skip
