"""Linear layers of experts on a few rows: each row reads the weights of its own expert, where they lie.

Sorting rows by expert, as grouped products do, takes a dozen launches, and a copy of the weights of each row three
times the traffic. Rows of the same expert run side by side, so the second one finds its weights in the GPU's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit_for_any, runs_on_triton, tl, triton

OUTS, INS, WARPS = 16, 256, 4  # of a program, at once


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x[i] @ weight[experts[i]].T + bias[experts[i]]``.

    Args:
        x: [rows, in], or fewer rows that are repeated: row i is that of pair ``i // (pairs / rows)``.
        weight: [num_experts, out, in], of any strides.
        experts: int64 [pairs].
        bias: [num_experts, out].

    Returns:
        [pairs, out] in the dtype of ``x``.
    """
    run = expert_linear_triton if runs_on_triton(x) else expert_linear_reference
    return run(x, weight, experts, bias)


def expert_linear_reference(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.repeat_interleave(len(experts) // len(x), 0)
    y = torch.bmm(weight[experts], rows.unsqueeze(2)).squeeze(2)
    return y if bias is None else y + bias[experts]


def expert_linear_triton(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    (_, num_out, num_in), pairs = weight.shape, len(experts)
    x, out = x.contiguous(), x.new_empty(pairs, num_out)
    _expert_linear_kernel[pairs, triton.cdiv(num_out, OUTS)](
        x, weight, experts, bias, out, *weight.stride(), 0 if bias is None else bias.stride(0), num_out, num_in,
        pairs // len(x), OUTS=OUTS, INS=INS, num_warps=WARPS,
    )  # fmt: skip
    return out


@jit_for_any("repeats")
def _expert_linear_kernel(
    x_ptr, weight_ptr, experts_ptr, bias_ptr, out_ptr, of_expert, of_out, of_in, bias_of_expert, num_out, num_in,
    repeats, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    pair, outs = tl.program_id(0), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    known = tl.minimum(outs, num_out - 1)  # the last tile may exceed the outputs: it repeats the last one
    weight_ptr += expert * of_expert + known[:, None] * of_out
    x_ptr += (pair // repeats).to(tl.int64) * num_in
    total = tl.zeros((OUTS, INS), dtype=tl.float32)
    for start in range(0, num_in, INS):
        ins = start + tl.arange(0, INS)
        weight = tl.load(weight_ptr + ins[None, :] * of_in, mask=ins[None, :] < num_in, other=0.0)
        x = tl.load(x_ptr + ins, mask=ins < num_in, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * bias_of_expert + known).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + pair.to(tl.int64) * num_out + outs, y.to(dtype), mask=outs < num_out)
