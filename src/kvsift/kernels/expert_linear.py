"""Linear layers of experts on a few rows: each row reads the weights of its own expert, where they lie.

Sorting rows by expert, as grouped products do, takes a dozen launches, and a copy of the weights of each row three
times the traffic. Rows of the same expert run side by side, so the second one finds its weights in the GPU's cache.
8-bit floats are converted exactly; their scales are applied to sums, of blocks of inputs where they belong to these.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kvsift.kernels.scaled_weight import ScaledStack
from kvsift.kernels.triton_shim import jit_for_any, runs_on_triton, tl, triton

OUTS, INS, WARPS = 16, 256, 4  # of a program, at once


def expert_linear(x: Tensor, weight: Tensor | ScaledStack, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x[i] @ weight[experts[i]].T + bias[experts[i]]``.

    Args:
        x: [rows, in], or fewer rows that are repeated: row i is that of pair ``i // (pairs / rows)``.
        weight: [num_experts, out, in], of any strides; if scaled, on a GPU with scales of whole rows, or of a power of
            two of inputs.
        experts: int64 [pairs].
        bias: [num_experts, out].

    Returns:
        [pairs, out] in the dtype of ``x``.
    """
    run = expert_linear_triton if runs_on_triton(x) else expert_linear_reference
    return run(x, weight, experts, bias)


def expert_linear_reference(
    x: Tensor, weight: Tensor | ScaledStack, experts: Tensor, bias: Tensor | None = None
) -> Tensor:
    rows = x.repeat_interleave(len(experts) // len(x), 0).unsqueeze(2)
    if isinstance(weight, ScaledStack):
        y = torch.bmm(weight.of_experts(experts).expanded(torch.float32), rows.float()).to(x.dtype)
    else:
        y = torch.bmm(weight[experts], rows)
    return y.squeeze(2) if bias is None else y.squeeze(2) + bias[experts]


def expert_linear_triton(
    x: Tensor, weight: Tensor | ScaledStack, experts: Tensor, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    (_, num_out, num_in), pairs = weight.shape, len(experts)
    x, out = x.contiguous(), x.new_empty(pairs, num_out)
    values, scales, scale_outs, scale_ins, ins = weight, None, 1, 0, INS
    if isinstance(weight, ScaledStack):
        values, scales, scale_outs = weight.values, weight.scales, weight.outs
        if scales.shape[2] > 1:
            scale_ins, ins = weight.ins, gcd(INS, weight.ins)
    assert isinstance(values, Tensor)
    _expert_linear_kernel[pairs, triton.cdiv(num_out, OUTS)](
        x, values, experts, bias, out, scales, *values.stride(), 0 if bias is None else bias.stride(0),
        *((0, 0) if scales is None else scales.stride()[:2]), num_out, num_in, pairs // len(x), OUTS=OUTS, INS=ins,
        SCALE_OUTS=scale_outs, SCALE_INS=scale_ins, num_warps=WARPS,
    )  # fmt: skip
    return out


@jit_for_any("repeats")
def _expert_linear_kernel(
    x_ptr, weight_ptr, experts_ptr, bias_ptr, out_ptr, scales_ptr, of_expert, of_out, of_in, bias_of_expert,
    scales_of_expert, scales_of_out, num_out, num_in, repeats, OUTS: tl.constexpr, INS: tl.constexpr,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr,
):  # fmt: skip
    pair, outs = tl.program_id(0), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    known = tl.minimum(outs, num_out - 1)  # the last tile may exceed the outputs: it repeats the last one
    weight_ptr += expert * of_expert + known[:, None] * of_out
    x_ptr += (pair // repeats).to(tl.int64) * num_in
    total = tl.zeros((OUTS, INS), dtype=tl.float32)
    if scales_ptr is not None:
        scales_ptr += expert * scales_of_expert + known // SCALE_OUTS * scales_of_out
    for start in range(0, num_in, INS):
        ins = start + tl.arange(0, INS)
        weight = tl.load(weight_ptr + ins[None, :] * of_in, mask=ins[None, :] < num_in, other=0.0)
        x = tl.load(x_ptr + ins, mask=ins < num_in, other=0.0)
        products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
        if SCALE_INS > 0:
            products *= tl.load(scales_ptr + start // SCALE_INS)[:, None]
        total += products
    y = tl.sum(total, 1)
    if scales_ptr is not None and SCALE_INS == 0:
        y *= tl.load(scales_ptr)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * bias_of_expert + known).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + pair.to(tl.int64) * num_out + outs, y.to(dtype), mask=outs < num_out)
