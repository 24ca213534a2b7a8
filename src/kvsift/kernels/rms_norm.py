"""Root-mean-square normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, pdl: bool = False) -> Tensor:
    """Compute ``weight * x / rms(x)``, with the statistics in float32.

    Args:
        x: [rows, hidden].
        weight: [hidden].
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1). The product is then rounded once, at its end, as in Gemma; without an
            offset the normalised row is rounded first, as in Llama.
        pdl: launch while the previous kernel still runs (Hopper and later).

    Returns:
        [rows, hidden] in the dtype of ``x``.
    """
    if runs_on_triton(x):
        return rms_norm_triton(x, weight, eps, offset=offset, pdl=pdl)
    return rms_norm_reference(x, weight, eps, offset=offset)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normal * (weight.float() + offset)).to(x.dtype)
    return (weight * normal.to(x.dtype)).to(x.dtype)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, pdl: bool = False) -> Tensor:
    rows, hidden = x.shape
    out = x.new_empty(rows, hidden)
    tile = power_of_two(hidden)
    _rms_norm_kernel[(rows,)](
        x, weight, out, x.stride(0), hidden, eps, OFFSET=offset, TILE=tile, PDL=pdl,
        num_warps=min(16, max(4, tile // 512)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, hidden, eps, OFFSET: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inside = d < hidden
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    x = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    normal = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out_ptr + row * hidden + d, weighted(normal, weight, OFFSET, out_ptr.dtype.element_ty), mask=inside)


@jit
def weighted(normal, weight, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Multiply a normalised row by its weight; rounds where the reference rounds."""
    if OFFSET != 0:
        return (normal * (weight.to(tl.float32) + OFFSET)).to(dtype)
    return (normal.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
