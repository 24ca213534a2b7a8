"""A few rows times a weight of 8-bit floats, as one launch of CUDA C++ that keeps memory busy from one product to the
next (``streamed_linear.cu``): Hopper and later.

Triton's twins stop at about three quarters of the bandwidth with weights of 8 bits, and begin each product with an
empty pipeline. They take what this one does not: other GPUs, more rows, and ``steady`` products.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, arguments, compile_kernel, have_nvrtc
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.scaled_weight import ScaledWeight
from kvsift.kernels.skinny_product import Norm

MAX_ROWS = 8  # columns of a product on tensor cores; with codes of 4 bits a row takes two
# outputs of a tile; warps of a block, and their stages: of 16 settings the fastest for one row on an H100; fewer stages
# where shared memory is needed for rows. Two blocks on one processor are slower: a kernel that is launched early has
# two on some then, and none on others.
OUTS, WARPS, STAGES = 16, 16, 4
SHARED_BYTES = 225 << 10  # of a block, next to what the kernel has for itself
SPLITS = (2, 4, 1)  # blocks of a cluster that may share the inputs of a tile
LEAST_STEPS = 8  # of a block and a tile
AHEAD = 0  # steps of a warp that are prefetched while its stages are full


_LinearArguments = arguments(
    "x weight scales zeros norm bias residual out",
    "x_row residual_row weight_row",
    "rows num_in num_out gated scale_outs scale_row scale_steps tiles",
    "eps norm_offset",
)


def streams(x: Tensor, weight: object) -> bool:
    """Whether ``streamed_linear`` takes rows x [rows, in] and a weight [out, in]."""
    if not (isinstance(weight, ScaledWeight | Int4Weight) and x.is_cuda and have_nvrtc()):
        return False
    if isinstance(weight, Int4Weight):
        values, step = weight.codes, 256
        scaled = weight.ins in (32, 64, 128) and weight.scales.itemsize == 2
    else:
        values, step = weight.values, 128
        scaled = weight.scales.shape[1] == 1 or weight.ins == step
    tensors = (x, values, weight.scales, getattr(weight, "zeros", None))
    return (
        scaled
        and 0 < x.shape[0] <= _max_rows(weight)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == values.stride(1) == 1
        and x.shape[1] % step == x.stride(0) % 8 == values.stride(0) % 16 == 0
        and all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
        and _split(weight, x) is not None
    )


def streamed_linear(
    x: Tensor,
    weight: ScaledWeight | Int4Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Compute ``residual + rms_norm(x) @ weight.T + bias``, or with ``gated`` what ``linear`` does then.

    Args:
        x: [rows, in].
        weight: [out, in], which ``streams`` with these rows; of gates, then of values, if ``gated``.
        bias: [out].
        norm: weight [in] and eps of an RMS norm of ``x``, and perhaps what is added to the weight.
        residual: [rows, out].
        gated: see ``linear``; without bias and residual.
        pdl: launch while the previous kernel still runs, and request weights at once.

    Returns:
        [rows, out] in the dtype of ``x``; half as many if ``gated``.
    """
    (rows, num_in), scales, zeros = x.shape, weight.scales, None
    if isinstance(weight, Int4Weight):
        values, zeros, scale_outs, by_block = weight.codes, weight.zeros, 1, False
    else:
        values, scale_outs, by_block = weight.values, weight.outs, scales.shape[1] > 1
    num_out = values.shape[0] // (2 if gated else 1)
    out = x.new_empty(rows, num_out)
    norm_weight, eps, offset = (*(norm or (None, 0.0)), 0.0)[:3]
    tensors = (x, values, scales, zeros, norm_weight, bias, residual, out)
    given = _LinearArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        x.stride(0), 0 if residual is None else residual.stride(0), values.stride(0), rows, num_in, num_out, int(gated),
        scale_outs, scales.stride(0), int(by_block), _tiles(weight), eps, offset,
    )  # fmt: skip
    split = _split(weight, x)
    assert split is not None
    blocks = _blocks(weight, x, split)
    stages = next(n for n in range(STAGES, 1, -1) if _shared_bytes(weight, rows, blocks, split, n) <= SHARED_BYTES)
    shared_bytes = _shared_bytes(weight, rows, blocks, split, stages)
    kernel = _kernel(_bits(weight), _group(weight), scales.dtype, x.dtype, stages, split, x.device.index or 0)
    kernel.launch(blocks, given, early=pdl, shared_bytes=shared_bytes, cluster=split)
    return out


def _tiles(weight: ScaledWeight | Int4Weight) -> int:
    return -(-weight.shape[0] // OUTS)


def _max_rows(weight: ScaledWeight | Int4Weight) -> int:
    return MAX_ROWS // 2 if isinstance(weight, Int4Weight) else MAX_ROWS


def _split(weight: ScaledWeight | Int4Weight, x: Tensor) -> int | None:
    """Return how many blocks share the inputs of a tile: as many as leave room for the most stages; None if none has
    room for two. Where there is room for as many rows as there may be, it does not depend on their number, nor does the
    order of sums."""
    steps = weight.shape[1] * _bits(weight) // 1024
    splits = [n for n in SPLITS if n == 1 or (_bits(weight) == 8 and steps >= n * LEAST_STEPS)]
    for rows in (_max_rows(weight), x.shape[0]):
        for stages in range(STAGES, 1, -1):
            for split in splits:
                if _shared_bytes(weight, rows, _blocks(weight, x, split), split, stages) <= SHARED_BYTES:
                    return split
    return None


def _blocks(weight: ScaledWeight | Int4Weight, x: Tensor, split: int) -> int:
    """Return the blocks of a launch: no more than run at once, one per processor."""
    device = x.device.index or 0
    if split == 1:
        return min(_tiles(weight), _processors(x.device))
    return split * min(_tiles(weight), _clusters(x.dtype, split, device))


@cache
def _clusters(dtype: torch.dtype, split: int, device: int) -> int:
    kernel = _kernel(8, 32, torch.float32, dtype, STAGES, split, device)
    return kernel.most_clusters(split)


def _shared_bytes(weight: ScaledWeight | Int4Weight, rows: int, blocks: int, split: int, stages: int) -> int:
    """Return the bytes of shared memory that each block needs."""
    num_in = weight.shape[1]
    stage, ins = OUTS * 128, -(-num_in // 128 // split) * 128  # bytes of weights; inputs of a block
    row = 2 * (ins + 8)  # and its padding
    if isinstance(weight, Int4Weight):
        stage += OUTS * (512 // weight.ins + max(4, 256 // weight.ins))  # scales and zero points of 256 codes
        row = 2 * (num_in + 64) + num_in // weight.ins * 8  # two halves, and what the groups count
    tiles = -(-_tiles(weight) // (blocks // split))
    # sums of tiles; of those that a warp takes over from another, or of each warp with codes of 4 bits; scales
    sums = tiles + WARPS * (tiles if isinstance(weight, Int4Weight) else 1)
    return WARPS * stages * stage + rows * row + (sums * rows + tiles) * OUTS * 4


def _bits(weight: ScaledWeight | Int4Weight) -> int:
    return 4 if isinstance(weight, Int4Weight) else 8


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _group(weight: ScaledWeight | Int4Weight) -> int:
    return weight.ins if isinstance(weight, Int4Weight) else 32


def _kernel(
    bits: int, group: int, scales: torch.dtype, dtype: torch.dtype, stages: int, split: int, device: int
) -> Kernel:
    defines = {
        "HALF": int(dtype == torch.float16), "BITS": bits, "WARPS": WARPS, "STAGES": stages, "SPLIT": split,
        "AHEAD": AHEAD, "GROUP": group, "SCALE_HALF": int(scales == torch.float16),
        "ARGUMENT_BYTES": ctypes.sizeof(_LinearArguments),
    }  # fmt: skip
    source = "streamed_linear.cu"
    return compile_kernel((source,), "streamed_linear", tuple(defines.items()), WARPS * 32, SHARED_BYTES, device)
