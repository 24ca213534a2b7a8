"""A few rows times the 8-bit weights of their experts, as one launch of CUDA C++ that reads each expert once
(``streamed_experts.cu``): Hopper and later. Triton's twin in ``routed_experts`` reads it for every row that gets it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, compile_kernel, have_nvrtc
from kvsift.kernels.float4_stack import Float4Stack
from kvsift.kernels.scaled_weight import ScaledStack
from kvsift.kernels.streamed_linear import (
    EARLY,
    MAX_ROWS,
    OUTS,
    SHARED_BYTES,
    STAGES,
    WARPS,
    StreamArguments,
    processors_of,
)

STEP = 128  # inputs that are multiplied at once
MOST_PAIRS = 128  # of a row and an expert, of a launch: then a block has tiles of two experts at most


def streams_experts(x: Tensor, chosen: Tensor, weight: object) -> bool:
    """Whether ``streamed_experts`` takes rows or pairs x [rows, in], their experts and the weights [experts, out, in]
    of all experts. It does not depend on the number of rows, nor do the bits of one."""
    if not isinstance(weight, ScaledStack) or isinstance(weight, Float4Stack) or not (x.is_cuda and have_nvrtc()):
        return False
    values, num_in = weight.values, weight.shape[2]
    return (
        chosen.shape[1] * MAX_ROWS <= min(MOST_PAIRS, processors_of(x.device))
        and (weight.scales.shape[2] == 1 or weight.ins == STEP)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == values.stride(2) == 1
        and num_in % STEP == x.stride(0) % 8 == values.stride(0) % 16 == values.stride(1) % 16 == 0
        and x.data_ptr() % 16 == values.data_ptr() % 16 == 0
        and _stages(MAX_ROWS, num_in, len(x) > len(chosen)) > 1
    )


def streamed_experts(
    x: Tensor, chosen: Tensor, weight: ScaledStack, *, gated: bool = False, pdl: bool = False
) -> Tensor:
    """Products of rows and the weights of their experts, eight rows at a time.

    Args:
        x: [rows, in], or [rows * per_row, in], a row for each pair of a row and its expert.
        chosen: int32 [rows, per_row], contiguous; of pairs, older than the kernel in front.
        weight: [experts, out, in], which ``streams_experts`` with these; of gates, then of ups, if ``gated``.
        gated: compute ``silu(gate) * up``, products and the SiLU rounded.
        pdl: launch while the previous kernel still runs.

    Returns:
        [rows, per_row, out] in the dtype of ``x``; half as many if ``gated``.
    """
    (count, per_row), (_, width, num_in), scales = chosen.shape, weight.shape, weight.scales
    num_out, by_pair, device = width // (2 if gated else 1), len(x) > count, x.device.index or 0
    out = x.new_empty(count, per_row, num_out)
    for start in range(0, count, MAX_ROWS):
        rows = min(MAX_ROWS, count - start)
        tensors = (
            x[start * per_row if by_pair else start :], weight.values, scales, None, None, None, None, out[start:],
            chosen[start:],
        )  # fmt: skip
        given = StreamArguments(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            x.stride(0), 0, weight.values.stride(1), weight.values.stride(0), scales.stride(0), rows, num_in, num_out,
            int(gated), weight.outs, scales.stride(1), int(scales.shape[2] > 1), -(-width // OUTS), per_row,
            int(by_pair), 0.0, 0.0,
        )  # fmt: skip
        stages = _stages(rows, num_in, by_pair)
        kernel, shared_bytes = _kernel(x.dtype, stages, device), _shared_bytes(rows, num_in, by_pair, stages)
        kernel.launch(processors_of(x.device), given, early=pdl, shared_bytes=shared_bytes)
    return out


def _shared_bytes(rows: int, num_in: int, by_pair: bool, stages: int) -> int:
    """Return what a block needs: weights of its warps, and rows, or their pairs with two experts."""
    return WARPS * stages * OUTS * STEP + (2 if by_pair else 1) * rows * 2 * (num_in + 8)


def _stages(rows: int, num_in: int, by_pair: bool) -> int:
    """Return the most stages of a warp that shared memory holds, perhaps too few."""
    return next((n for n in range(STAGES, 1, -1) if _shared_bytes(rows, num_in, by_pair, n) <= SHARED_BYTES), 1)


def _kernel(dtype: torch.dtype, stages: int, device: int) -> Kernel:
    defines = {
        "HALF": int(dtype == torch.float16), "BITS": 8, "WARPS": WARPS, "STAGES": stages, "SPLIT": 1,
        "EARLY": min(EARLY, stages), "GROUP": 32, "SCALE_HALF": 0, "AT_ONCE": 1,
        "ARGUMENT_BYTES": ctypes.sizeof(StreamArguments),
    }  # fmt: skip
    sources = "streamed_common.cu", "streamed_experts.cu"
    return compile_kernel(sources, "streamed_experts", tuple(defines.items()), WARPS * 32, SHARED_BYTES, device)
