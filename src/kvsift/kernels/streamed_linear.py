"""A few rows times a weight of 8-bit floats, as one launch of CUDA C++ that keeps memory busy from one product to the
next (``streamed_linear.cu``; ``streamed_rows.cu`` with three to eight rows and 8 bits): Hopper and later.

Triton's twins stop at about three quarters of the bandwidth with weights of 8 bits, and begin each product with an
empty pipeline. They take what this one does not: other GPUs, more rows, and ``steady`` products.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, arguments, compile_kernel, have_nvrtc
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.scaled_weight import ScaledWeight
from kvsift.kernels.skinny_product import Norm
from kvsift.kernels.triton_shim import power_of_two

# columns of a product on tensor cores, of which codes of 4 bits need two for a row; and up to how many rows of 8-bit
# weights go without clusters, which are faster with three or more
MAX_ROWS, FEW_ROWS = 8, 2
# outputs of a tile; warps of a block, and their stages: of 16 settings the fastest for one row on an H100; fewer stages
# where shared memory is needed for rows. Two blocks on one processor are slower: a kernel that is launched early has
# two on some then, and none on others.
OUTS, WARPS, STAGES = 16, 16, 4
SHARED_BYTES = 225 << 10  # of a block, next to what the kernel has for itself
# blocks of a cluster, the first that has room for the most stages; least steps of inputs of a block and a tile; stages
# that do not wait for the rows
SPLITS, LEAST_STEPS, EARLY = (2, 4, 1), 8, 2


StreamArguments = arguments(
    "x weight scales zeros norm bias residual out chosen",
    "x_row residual_row weight_row of_expert scales_of_expert",
    "rows num_in num_out gated scale_outs scale_row scale_steps tiles per_row by_pair",
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
        and 0 < x.shape[0] <= (MAX_ROWS // 2 if isinstance(weight, Int4Weight) else MAX_ROWS)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == values.stride(1) == 1
        and x.shape[1] % step == x.stride(0) % 8 == values.stride(0) % 16 == 0
        and all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
        and _grid(weight, x) is not None
    )


def streamed_linear(
    x: Tensor, weight: ScaledWeight | Int4Weight, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None, gated: bool = False, gelu: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``residual + rms_norm(x) @ weight.T + bias``, or with ``gated`` what ``linear`` does then.

    Args:
        x: [rows, in].
        weight: [out, in], which ``streams`` with these rows; of gates, then of values, if ``gated``.
        bias: [out].
        norm: weight [in] and eps of an RMS norm of ``x``, and perhaps what is added to the weight.
        residual: [rows, out].
        gated, gelu: see ``linear``; without bias and residual.
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
    tensors = (x, values, scales, zeros, norm_weight, bias, residual, out, None)
    given = StreamArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        x.stride(0), 0 if residual is None else residual.stride(0), values.stride(0), 0, 0, rows, num_in, num_out,
        gated * (1 + gelu), scale_outs, scales.stride(0), int(by_block), _tiles(weight), 0, 0, eps, offset,
    )  # fmt: skip
    grid = _grid(weight, x)
    assert grid is not None
    kernel = _kernel(weight, x.dtype, rows, grid.stages, grid.split, x.device.index or 0)
    kernel.launch(grid.blocks, given, early=pdl, shared_bytes=grid.shared_bytes, cluster=grid.split or 1)
    return out


class Grid(NamedTuple):
    """Blocks, one per processor; stages of a warp; blocks of a cluster, or 0 without ``streamed_rows.cu``; and bytes of
    shared memory that each block needs."""

    blocks: int
    stages: int
    split: int
    shared_bytes: int


def _tiles(weight: ScaledWeight | Int4Weight) -> int:
    return -(-weight.shape[0] // OUTS)


def _grid(weight: ScaledWeight | Int4Weight, x: Tensor) -> Grid | None:
    """Return how a product is launched; None if a block has too little shared memory."""
    rows, num_in = x.shape
    if isinstance(weight, ScaledWeight) and rows > FEW_ROWS:
        return _grid_of_clusters(weight, x)
    stage, row = OUTS * 128, 2 * (num_in + 8)  # bytes of weights; of a row and its padding
    if isinstance(weight, Int4Weight):
        stage += OUTS * (512 // weight.ins + max(4, 256 // weight.ins))  # scales and zero points of 256 codes
        row = 2 * (num_in + 64) + num_in // weight.ins * 8  # two halves, and what the groups count
    blocks = min(_tiles(weight), processors_of(x.device))
    sums = -(-_tiles(weight) // blocks) * OUTS * (WARPS * rows + 1) * 4  # and scales, of all tiles of a block
    for stages in range(STAGES, 1, -1):
        shared = WARPS * stages * stage + rows * row + sums
        if shared <= SHARED_BYTES:
            return Grid(blocks, stages, 0, shared)
    return None


def _grid_of_clusters(weight: ScaledWeight, x: Tensor) -> Grid | None:
    """``_grid`` of ``streamed_rows.cu``. Blocks and clusters, and so the order of sums, are those of the most rows."""

    def shared_bytes(rows: int) -> int:
        tiles, ins = -(-_tiles(weight) // clusters), -(-steps // split) * 128
        sums = (tiles + WARPS) * rows + tiles  # and rests of tiles that two warps share; and scales
        return WARPS * stages * OUTS * 128 + rows * 2 * (ins + 8) + sums * OUTS * 4

    steps, grid = weight.shape[1] // 128, None
    for stages in range(2, STAGES + 1):
        for split in reversed(SPLITS):
            if split > 1 and steps < split * LEAST_STEPS:
                continue
            clusters = min(_tiles(weight), _clusters(weight, x.dtype, split, x.device))
            if shared_bytes(MAX_ROWS) <= SHARED_BYTES:
                grid = Grid(split * clusters, stages, split, shared_bytes(x.shape[0]))
    return grid


def _clusters(weight: ScaledWeight, dtype: torch.dtype, split: int, device: torch.device) -> int:
    """Return how many clusters run at once."""
    if split == 1:
        return processors_of(device)
    return _most_clusters(_kernel(weight, dtype, MAX_ROWS, STAGES, split, device.index or 0), split)


@cache
def _most_clusters(kernel: Kernel, split: int) -> int:
    return kernel.most_clusters(split)


@cache
def processors_of(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _kernel(
    weight: ScaledWeight | Int4Weight, dtype: torch.dtype, rows: int, stages: int, split: int, device: int
) -> Kernel:
    group = weight.ins if isinstance(weight, Int4Weight) else 0
    defines = {
        "HALF": int(dtype == torch.float16), "BITS": 4 if group else 8, "WARPS": WARPS, "STAGES": stages,
        "SPLIT": split or 1, "EARLY": EARLY, "GROUP": group or 32,
        "SCALE_HALF": int(weight.scales.dtype == torch.float16),
        "AT_ONCE": min(MAX_ROWS // 2 // power_of_two(rows), 256 // group) if group else 1,
        "ARGUMENT_BYTES": ctypes.sizeof(StreamArguments),
    }  # fmt: skip
    name = "streamed_rows" if split else "streamed_linear"
    sources = "streamed_common.cu", f"{name}.cu"
    return compile_kernel(sources, name, tuple(defines.items()), WARPS * 32, SHARED_BYTES, device)
