"""Root-mean-square normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, residual: Tensor | None = None, scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``weight * x / rms(x)``, with the statistics in float32; or ``(residual + that) * scale``, which is
    rounded at each step.

    Args:
        x: [rows, hidden].
        weight: [hidden].
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1). The product is then rounded once, at its end, as in Gemma; without an
            offset the normalised row is rounded first, as in Llama.
        residual: [rows, hidden], contiguous; what is normalised is added to it (Gemma 2 and later).
        scale: of the sum with a residual (Gemma 4).
        pdl: launch while the previous kernel still runs (Hopper and later).

    Returns:
        [rows, hidden] in the dtype of ``x``.
    """
    if runs_on_triton(x):
        return rms_norm_triton(x, weight, eps, offset=offset, residual=residual, scale=scale, pdl=pdl)
    return rms_norm_reference(x, weight, eps, offset=offset, residual=residual, scale=scale)


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """``rms_norm``; without a weight, all weights are 1."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        normal = normal.to(x.dtype)
    elif offset:
        normal = (normal * (weight.float() + offset)).to(x.dtype)
    else:
        normal = (weight * normal.to(x.dtype)).to(x.dtype)
    return normal if residual is None else (residual + normal) * scale


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, residual: Tensor | None = None, scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    assert residual is None or residual.is_contiguous()
    rows, hidden = x.shape
    out = x.new_empty(rows, hidden)
    tile = power_of_two(hidden)
    _rms_norm_kernel[(rows,)](
        x, weight, residual, out, x.stride(0), hidden, eps, scale, OFFSET=offset, TILE=tile, PDL=pdl,
        num_warps=min(16, max(4, tile // 512)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, x_row, hidden, eps, scale, OFFSET: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inside = d < hidden
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    x = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    normal = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = weighted(normal, weight, OFFSET, dtype)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * hidden + d, mask=inside, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
        y = (y.to(tl.float32) * scale).to(dtype)
    tl.store(out_ptr + row * hidden + d, y, mask=inside)


@jit
def weighted(normal, weight, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Multiply a normalised row by its weight; rounds where the reference rounds."""
    if OFFSET != 0:
        return (normal * (weight.to(tl.float32) + OFFSET)).to(dtype)
    return (normal.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
