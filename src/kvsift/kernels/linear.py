"""A linear layer on a few rows, with the RMS norm before it and the residual after it in the same launch; or gate and
up projection, and their product gated by SiLU or GELU. Also gates of heads of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm, rms_norm_reference
from kvsift.kernels.scaled_weight import full_product
from kvsift.kernels.skinny_product import Norm, Tiling, Weight, is_skinny, product_arguments, row_products
from kvsift.kernels.streamed_linear import streamed_linear, streams
from kvsift.kernels.triton_shim import jit, jit_for_any, power_of_two, runs_on_triton, tl, triton
from kvsift.native.product import product, takes_product


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, norm: Norm | None = None, residual: Tensor | None = None,
    gated: bool = False, gelu: bool = False, steady: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``residual + rms_norm(x) @ weight.T + bias``, or with ``gated`` the product ``silu(gate) * up`` of the
    two halves of ``rms_norm(x) @ weight.T``; both, and SiLU, are rounded on the way.

    Args:
        x: [rows, in].
        weight: [out, in], of the dtype of ``x``, scaled 8-bit floats, or codes of 4 bits; of gate, then of up, if
            ``gated``.
        bias: [out].
        norm: weight [in] and eps of an RMS norm of ``x``, and perhaps what is added to the weight.
        residual: [rows, out].
        gated: without bias and residual.
        gelu: gated by GELU by tanh in place of SiLU.
        steady: a row has the same bits whatever the number of rows (``Projection.keeps_bits``).
        pdl: launch while the previous kernel still runs (Hopper and later), and prefetch the weights at once.

    Returns:
        [rows, out] in the dtype of ``x``; half as many if ``gated``.
    """
    if isinstance(weight, Tensor) and takes_product(x, weight, steady):
        return product(x, weight, bias, norm=norm, residual=residual, gated=gated, gelu=gelu)
    if not steady and streams(x, weight):
        how = {"norm": norm, "residual": residual, "gated": gated, "gelu": gelu, "pdl": pdl}
        return streamed_linear(x, weight, bias, **how)  # type: ignore[arg-type]
    if is_skinny(x, weight):
        how = {"norm": norm, "residual": residual, "gated": gated, "gelu": gelu, "steady": steady, "pdl": pdl}
        return linear_triton(x, weight, bias, **how)  # type: ignore[arg-type]
    if norm is not None:
        x = rms_norm(x, *norm, pdl=pdl)
    y = full_product(x, weight, bias)
    if gated:
        return gate_triton(y, gelu) if runs_on_triton(y) else gate_reference(y, gelu)
    return y if residual is None else residual + y


def linear_reference(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None, gated: bool = False, gelu: bool = False,
) -> Tensor:  # fmt: skip
    weight = weight if isinstance(weight, Tensor) else weight.expanded(x.dtype)
    y = torch.nn.functional.linear(rms_norm_reference(x, *norm) if norm else x, weight, bias)
    if gated:
        return gate_reference(y, gelu)
    return y if residual is None else residual + y


def linear_triton(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, norm: Norm | None = None, residual: Tensor | None = None,
    gated: bool = False, gelu: bool = False, steady: bool = False, pdl: bool = False, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    arguments = product_arguments(x, weight, norm, tiling, steady, pdl)
    num_out, grid = weight.shape[0] // (2 if gated else 1), (triton.cdiv(weight.shape[0], arguments["OUTS"]),)
    out = x.new_empty(x.shape[0], num_out)
    if gated:
        _gated_linear_kernel[grid](out, num_out, **arguments, GELU=gelu)
    else:
        residual_row = 0 if residual is None else residual.stride(0)
        _linear_kernel[grid](out, bias, residual, residual_row, num_out, **arguments)
    return out


@jit_for_any("rows")
def _linear_kernel(
    out_ptr, bias_ptr, residual_ptr, residual_row, num_out, x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps,
    norm_offset, x_row, weight_row, scale_row, rows, num_in, ROWS: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr,
    DEPTH: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    known = tl.minimum(outs, num_out - 1)  # the last tile may exceed the outputs: it repeats the last one
    y = row_products(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps, norm_offset, x_row, weight_row, scale_row, rows, num_in,
        known, ROWS, OUTS, INS, SCALE_OUTS, SCALE_INS, EVEN, DOT, DEPTH, PREFETCH, PDL,
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


@jit_for_any("rows")
def _gated_linear_kernel(
    out_ptr, inter, x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps, norm_offset, x_row, weight_row, scale_row,
    rows, num_in, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, SCALE_OUTS: tl.constexpr,
    SCALE_INS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    # a gate and its up are adjacent in the tile, so that one loop streams both and one thread has both
    pair = tl.arange(0, OUTS)
    known = tl.minimum(tl.program_id(0) * (OUTS // 2) + pair // 2, inter - 1) + pair % 2 * inter
    products = row_products(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps, norm_offset, x_row, weight_row, scale_row, rows, num_in,
        known, ROWS, OUTS, INS, SCALE_OUTS, SCALE_INS, EVEN, DOT, DEPTH, PREFETCH, PDL,
    )  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate, up = tl.split(tl.reshape(products.to(dtype), (ROWS, OUTS // 2, 2)))  # rounded, as two projections would be
    y = gated(gate, up, GELU)
    row, outs = tl.arange(0, ROWS)[:, None], tl.program_id(0) * (OUTS // 2) + tl.arange(0, OUTS // 2)
    inside = (row < rows) & (outs < inter)[None, :]
    tl.store(out_ptr + row * inter + outs[None, :], y.to(dtype), mask=inside)


def gate_reference(gate_up: Tensor, gelu: bool = False) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    active = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    return active * up


def gate_triton(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Compute ``silu(gate) * up`` from a finished product [rows, 2 * inter] -> [rows, inter]; see ``linear``."""
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inter)
    _gate_kernel[(rows, triton.cdiv(inter, 1024))](  # the second axis of a grid has at most 65,535 programs
        gate_up, out, inter, BLOCK=1024, GELU=gelu, num_warps=4
    )
    return out


@jit
def gated(gate, up, GELU: tl.constexpr = False):
    """Apply SiLU, or GELU by tanh, which is rounded before the product, as in a separate module."""
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    active = wide * tl.sigmoid(slope)
    return active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@jit
def _gate_kernel(gate_up_ptr, out_ptr, inter, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up_ptr += row * 2 * inter
    gate = tl.load(gate_up_ptr + i, mask=i < inter, other=0.0)
    up = tl.load(gate_up_ptr + inter + i, mask=i < inter, other=0.0)
    tl.store(out_ptr + row * inter + i, gated(gate, up, GELU).to(gate.dtype), mask=i < inter)


def gate_heads(heads: Tensor, gates: Tensor, *, pdl: bool = False) -> Tensor:
    """Compute ``heads * sigmoid(gates)``, both rounded; [rows, num_heads, head_dim] -> [rows, num_heads * head_dim]."""
    if not runs_on_triton(heads):
        return (heads * gates.sigmoid()).flatten(1)
    return gate_heads_triton(heads, gates, pdl=pdl)


def gate_heads_triton(heads: Tensor, gates: Tensor, *, pdl: bool = False) -> Tensor:
    rows, num_heads, head_dim = heads.shape
    assert heads.is_contiguous()
    assert gates.stride(2) == 1
    out = heads.new_empty(rows, num_heads * head_dim)
    _gate_heads_kernel[rows, num_heads](
        heads, gates, out, gates.stride(0), gates.stride(1), D=head_dim, DP=power_of_two(head_dim), PDL=pdl,
        num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@jit
def _gate_heads_kernel(
    heads_ptr, gates_ptr, out_ptr, gate_row, gate_head, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr
):
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (row * tl.num_programs(1) + head) * D + d
    x = tl.load(heads_ptr + at, mask=d < D, other=0.0)
    gate = tl.load(gates_ptr + row * gate_row + head * gate_head + d, mask=d < D, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + at, (x.to(tl.float32) * share).to(x.dtype), mask=d < D)
