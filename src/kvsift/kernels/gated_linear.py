"""Gate and up projection of a few rows and their product gated by SiLU, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm, rms_norm_reference
from kvsift.kernels.scaled_weight import full_product
from kvsift.kernels.skinny_product import Norm, Tiling, Weight, is_skinny, product_arguments, row_products
from kvsift.kernels.streamed_linear import streamed_linear, streams
from kvsift.kernels.triton_shim import jit, jit_for_any, runs_on_triton, tl, triton
from kvsift.native.product import product, takes_product


def gated_linear(
    x: Tensor, gate_up: Weight, *, norm: Norm | None = None, steady: bool = False, pdl: bool = False
) -> Tensor:
    """Compute ``silu(gate) * up`` from the two halves of ``rms_norm(x) @ gate_up.T``.

    Args:
        x: [rows, in].
        gate_up: [2 * inter, in], the weights of gate, then those of up; as that of ``linear``.
        norm: weight [in] and eps of an RMS norm of ``x``.
        steady: see ``linear``.
        pdl: launched while the kernel before still runs (Hopper and later); weights are then asked for at once.

    Returns:
        [rows, inter] in the dtype of ``x``; both projections and SiLU are rounded to it on the way.
    """
    if isinstance(gate_up, Tensor) and takes_product(x, gate_up, steady):
        return product(x, gate_up, norm=norm, gated=True)
    if not steady and streams(x, gate_up):
        return streamed_linear(x, gate_up, norm=norm, gated=True, pdl=pdl)  # type: ignore[arg-type]
    if is_skinny(x, gate_up):
        return gated_linear_triton(x, gate_up, norm=norm, steady=steady, pdl=pdl)
    if norm is not None:
        x = rms_norm(x, *norm, pdl=pdl)
    if runs_on_triton(x):
        return gate_triton(full_product(x, gate_up))
    return gated_linear_reference(x, gate_up)


def gated_linear_reference(x: Tensor, gate_up: Weight, *, norm: Norm | None = None) -> Tensor:
    gate_up = gate_up if isinstance(gate_up, Tensor) else gate_up.expanded(x.dtype)
    product = torch.nn.functional.linear(rms_norm_reference(x, *norm) if norm else x, gate_up)
    gate, up = product.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gated_linear_triton(
    x: Tensor,
    gate_up: Weight,
    *,
    norm: Norm | None = None,
    steady: bool = False,
    pdl: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    inter = gate_up.shape[0] // 2
    arguments = product_arguments(x, gate_up, norm, tiling, steady, pdl)
    out = x.new_empty(x.shape[0], inter)
    _gated_linear_kernel[(triton.cdiv(2 * inter, arguments["OUTS"]),)](out, inter, **arguments)
    return out


@jit_for_any("rows")
def _gated_linear_kernel(
    out_ptr, inter, x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps, x_row, weight_row, scale_row, rows, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # a gate and its up are adjacent in the tile, so that one loop streams both and one thread has both
    pair = tl.arange(0, OUTS)
    known = tl.minimum(tl.program_id(0) * (OUTS // 2) + pair // 2, inter - 1) + pair % 2 * inter
    products = row_products(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, eps, x_row, weight_row, scale_row, rows, num_in, known, ROWS,
        OUTS, INS, SCALE_OUTS, SCALE_INS, EVEN, DOT, DEPTH, PREFETCH, PDL,
    )  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate, up = tl.split(tl.reshape(products.to(dtype), (ROWS, OUTS // 2, 2)))  # rounded, as two projections would be
    y = gated(gate, up)
    row, outs = tl.arange(0, ROWS)[:, None], tl.program_id(0) * (OUTS // 2) + tl.arange(0, OUTS // 2)
    inside = (row < rows) & (outs < inter)[None, :]
    tl.store(out_ptr + row * inter + outs[None, :], y.to(dtype), mask=inside)


def gate_triton(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` from a finished product [rows, 2 * inter] -> [rows, inter]."""
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inter)
    _gate_kernel[(rows, triton.cdiv(inter, 1024))](  # the second axis of a grid has at most 65,535 programs
        gate_up, out, inter, BLOCK=1024, num_warps=4
    )
    return out


@jit
def gated(gate, up):
    """Apply SiLU, which is rounded before the product, as in a separate module."""
    wide = gate.to(tl.float32)
    active = wide * tl.sigmoid(wide)
    return active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@jit
def _gate_kernel(gate_up_ptr, out_ptr, inter, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up_ptr += row * 2 * inter
    gate = tl.load(gate_up_ptr + i, mask=i < inter, other=0.0)
    up = tl.load(gate_up_ptr + inter + i, mask=i < inter, other=0.0)
    tl.store(out_ptr + row * inter + i, gated(gate, up).to(gate.dtype), mask=i < inter)
