"""The work of a decoder step beside its attention: norms, a few rows times weight matrices, rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.native.loader import available, core, num_threads
from kvsift.native.shapes import ROW_DTYPES

MAX_ROWS = 8  # of x, which share one read of the weights, each with the sums that it has alone


def takes_product(x: Tensor, weight: Tensor, steady: bool = False) -> bool:
    """Whether the compiled core is available and multiplies x [rows, in] with weight [out, in]; it takes any number of
    rows if they are to have the bits that few have (``steady``), though a library is faster then."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.shape[0] > 0
        and (steady or x.shape[0] <= MAX_ROWS)
        and x.dtype == weight.dtype
        and weight.dtype in ROW_DTYPES
        and x.shape[1] % 8 == 0
        and weight.is_contiguous()
        and available()
    )


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None, gated: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """``residual + (rms_norm(x) @ weight.T + bias)``; every step is summed in float32 and rounded to the dtype of x.

    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out].
        norm: weight [in] and eps of an RMS norm of x.
        residual: [rows, out].
        gated: instead, silu of the first half of the products times the second half, [rows, out / 2].
        threads: torch's by default.
    """
    if len(x) > MAX_ROWS:
        residuals = [None] * len(x) if residual is None else residual.split(MAX_ROWS)
        parts = zip(x.split(MAX_ROWS), residuals)
        how = {"norm": norm, "gated": gated, "threads": threads}
        return torch.cat([product(part, weight, bias, residual=each, **how) for part, each in parts])  # type: ignore[arg-type]
    x = x.contiguous()
    bias, residual = (None if each is None else each.contiguous() for each in (bias, residual))
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(x.shape[0], width)
    core().multiply(
        x.dtype == torch.bfloat16, x.data_ptr(), x.shape[0], weight.data_ptr(), weight.shape[0], x.shape[1],
        0 if norm is None else norm[0].data_ptr(), 0.0 if norm is None else norm[1],
        0 if bias is None else bias.data_ptr(), 0 if residual is None else residual.data_ptr(), gated,
        num_threads(threads), out.data_ptr(),
    )  # fmt: skip
    return out


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> None:
    """Rotate the heads [num_heads, head_dim] of one token in place, after an RMS norm if there is a norm weight
    [head_dim]; cos, sin [head_dim] in the dtype of the heads."""
    core().rotate(
        heads.dtype == torch.bfloat16, heads.data_ptr(), *heads.shape, cos.data_ptr(), sin.data_ptr(),
        0 if norm is None else norm.data_ptr(), eps,
    )  # fmt: skip
