"""A linear layer on a few rows, with the RMS norm before it and the residual after it in the same launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm, rms_norm_reference
from kvsift.kernels.scaled_weight import full_product
from kvsift.kernels.skinny_product import Norm, Tiling, Weight, is_skinny, product_arguments, row_products
from kvsift.kernels.streamed_linear import streamed_linear, streams
from kvsift.kernels.triton_shim import jit_for_any, tl, triton
from kvsift.native.product import product, takes_product


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    steady: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Compute ``residual + rms_norm(x) @ weight.T + bias``.

    Args:
        x: [rows, in].
        weight: [out, in], of the dtype of ``x``, scaled 8-bit floats, or codes of 4 bits.
        bias: [out].
        norm: weight [in] and eps of an RMS norm of ``x``.
        residual: [rows, out].
        steady: a row has the same bits whatever the number of rows (``Projection.keeps_bits``).
        pdl: launch while the previous kernel still runs (Hopper and later), and prefetch the weights at once.

    Returns:
        [rows, out] in the dtype of ``x``.
    """
    if isinstance(weight, Tensor) and takes_product(x, weight, steady):
        return product(x, weight, bias, norm=norm, residual=residual)
    if not steady and streams(x, weight):
        return streamed_linear(x, weight, bias, norm=norm, residual=residual, pdl=pdl)  # type: ignore[arg-type]
    if is_skinny(x, weight):
        return linear_triton(x, weight, bias, norm=norm, residual=residual, steady=steady, pdl=pdl)
    if norm is not None:
        x = rms_norm(x, *norm, pdl=pdl)
    y = full_product(x, weight, bias)
    return y if residual is None else residual + y


def linear_reference(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    weight = weight if isinstance(weight, Tensor) else weight.expanded(x.dtype)
    y = torch.nn.functional.linear(rms_norm_reference(x, *norm) if norm else x, weight, bias)
    return y if residual is None else residual + y


def linear_triton(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    steady: bool = False,
    pdl: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    num_out, arguments = weight.shape[0], product_arguments(x, weight, norm, tiling, steady, pdl)
    out = x.new_empty(x.shape[0], num_out)
    residual_row = 0 if residual is None else residual.stride(0)
    _linear_kernel[(triton.cdiv(num_out, arguments["OUTS"]),)](out, bias, residual, residual_row, num_out, **arguments)
    return out


@jit_for_any("rows")
def _linear_kernel(
    out_ptr, bias_ptr, residual_ptr, residual_row, num_out, x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps,
    x_row, weight_row, scale_row, rows, num_in, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, DEPTH: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    known = tl.minimum(outs, num_out - 1)  # the last tile may exceed the outputs: it repeats the last one
    y = row_products(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps, x_row, weight_row, scale_row, rows, num_in, known, ROWS,
        OUTS, INS, SCALE_OUTS, SCALE_INS, EVEN, DOT, DEPTH, PREFETCH, PDL,
    )  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (outs < num_out)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        y += tl.load(bias_ptr + known).to(tl.float32)[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_row + outs[None, :], mask=inside, other=0.0)
        y = y.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + row * num_out + outs[None, :], y.to(dtype), mask=inside)
