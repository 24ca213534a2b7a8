"""A few rows times a large weight at the speed of memory: the product that all linear layers of decode share.

Every program computes some outputs and reads their weights once. One row is multiplied and added in registers, each
thread with its own part of the sum, and an RMS norm of it is free: the loop also sums its squares, and the products are
scaled at the end. Up to 32 rows go through tensor cores together. What a row gets there does not depend on how many
there are: each of its products is summed in the same order, 16 inputs at a time, whatever the tile.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm
from kvsift.kernels.triton_shim import jit, runs_on_triton, tl, triton

MAX_ROWS = 32  # two tiles of the tensor cores; with more rows, weights are not the only large operand
HOPPER_BYTES = 232448  # of shared memory for a program
Norm = tuple[Tensor, float]  # weight [in] and eps of an RMS norm


class Tiling(NamedTuple):
    """Tile sizes of a product."""

    outs: int  # outputs of a program
    ins: int  # weights of an output per load
    num_warps: int
    depth: int  # tiles in flight: stages in shared memory for tensor cores, otherwise loads of a thread
    dot: bool  # on tensor cores
    prefetch: int = 512  # weights of an output that are prefetched before the rows are ready (pdl)


def in_registers(outs: int, num_warps: int, depth: int) -> Tiling:
    """Tiling without tensor cores. A thread loads 16 bytes at a time; warps split the inputs, so that a thread has both
    the rows and the weights of its inputs."""
    return Tiling(outs, 256 * num_warps, num_warps, depth, dot=False)


def on_tensor_cores(outs: int, ins: int, num_warps: int, depth: int) -> Tiling:
    return Tiling(outs, ins, num_warps, depth, dot=True)


def choose_tiling(num_out: int, num_in: int, rows: int, steady: bool = False) -> Tiling:
    """Return the best tiling of a weight for this many rows, measured on Hopper (results/linear-h200 for one
    row, results/rows-h200 for more). With ``steady`` a single row gets the bits that it gets beside others."""
    if rows > 1 or steady:
        if num_out <= 2048:
            return on_tensor_cores(16, 512, 2, 4)
        # every program reads all rows: of up to 16, it pays that fewer programs do
        wide = num_out > 1 << 12 and (num_out <= 1 << 13 or rows <= 16)
        return on_tensor_cores(64, 256, 4, 4) if wide else on_tensor_cores(32, 256, 4, 6)
    return in_registers(4, 2, 4) if num_in < num_out <= 8192 else in_registers(8, 4, 1)


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the twins take x [rows, in] and weight [out, in]; they are faster than cuBLAS then."""
    return runs_on_triton(x) and 0 < x.shape[0] <= MAX_ROWS and x.stride(1) == 1 and takes_weight(weight, x.dtype)


def takes_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the twins take a weight [out, in], on whatever device, for rows of this dtype."""
    return weight.dtype == dtype and dtype in (torch.bfloat16, torch.float16) and weight.stride(1) == 1


def product_arguments(x: Tensor, weight: Tensor, norm: Norm | None, tiling: Tiling, pdl: bool) -> dict[str, object]:
    """Return the arguments of a kernel that calls ``row_products``; rows for tensor cores are normalised here."""
    if tiling.dot and norm is not None:
        x, norm = rms_norm(x, *norm, pdl=pdl), None
    rows, num_in = x.shape
    norm_weight, eps = norm or (None, 0.0)
    tile, depth = 1, tiling.depth
    if tiling.dot:
        tile = 16 if rows <= 16 else MAX_ROWS
        stage = tiling.ins * (tiling.outs + tile) * x.element_size()
        depth = max(1, min(depth, (shared_bytes(x.device.index) if x.is_cuda else HOPPER_BYTES) // stage))
    turn = tiling.ins if tiling.dot else tiling.ins * depth  # inputs per turn of the loop
    return {
        "x_ptr": x, "weight_ptr": weight, "norm_ptr": norm_weight, "eps": eps, "x_row": x.stride(0),
        "weight_row": weight.stride(0), "rows": rows, "num_in": num_in, "ROWS": tile, "OUTS": tiling.outs,
        "INS": tiling.ins, "EVEN": num_in % turn == 0, "DOT": tiling.dot, "DEPTH": depth, "PREFETCH": tiling.prefetch,
        "PDL": pdl, "num_warps": tiling.num_warps, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip


@cache
def shared_bytes(device: int) -> int:
    """Return how much shared memory a program may have."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


@jit
def row_products(
    x_ptr, weight_ptr, norm_ptr, eps, x_row, weight_row, rows, num_in, outs, ROWS: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, OUTS]: rows of x times the weights of ``outs`` [OUTS]; a row in registers may be normalised."""
    weights = weight_ptr + outs.to(tl.int64) * weight_row  # [OUTS]
    if PDL:
        # weights do not depend on the previous kernel: prefetch the first ones while it still runs
        if PREFETCH > 0:
            prefetch(weights, num_in, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    if DOT:
        products = dot_products(x_ptr, weights, x_row, rows, num_in, ROWS, OUTS, INS, EVEN, DEPTH)
    else:
        products = sum_products(x_ptr, weights, norm_ptr, eps, num_in, OUTS, INS, EVEN, DEPTH)
    return products


@jit
def sum_products(
    x_ptr, weights, norm_ptr, eps, num_in, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """One row: an iteration loads DEPTH * INS weights of every output before it adds any."""
    i = tl.arange(0, DEPTH)[None, :, None] * INS + tl.arange(0, INS)[None, None, :]
    weights = weights[:, None, None]
    total = tl.zeros((OUTS, INS), tl.float32)
    squares = tl.zeros((1, INS), tl.float32)
    for start in range(0, num_in, DEPTH * INS):
        inside = i < num_in - start
        w = load(weights + (start + i), inside, EVEN)
        x = load(x_ptr + (start + i), inside, EVEN).to(tl.float32)
        if norm_ptr is not None:
            squares += tl.sum(x * x, 1)
            x *= load(norm_ptr + (start + i), inside, EVEN).to(tl.float32)
        total += tl.sum(x * w.to(tl.float32), 1)
    products = tl.sum(total, 1)
    if norm_ptr is not None:
        products *= tl.rsqrt(tl.sum(squares, 1) / num_in + eps)
    return products[None, :]


@jit
def dot_products(
    x_ptr, weights, x_row, rows, num_in, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
    EVEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row, i = tl.arange(0, ROWS)[:, None], tl.arange(0, INS)[None, :]
    x_rows, weights = x_ptr + row * x_row, weights[:, None]
    products = tl.zeros((ROWS, OUTS), tl.float32)
    for start in tl.range(0, num_in, INS, num_stages=DEPTH):
        inside = i < num_in - start
        w = load(weights + (start + i), inside, EVEN)
        x = tl.load(x_rows + (start + i), mask=(row < rows) & inside, other=0.0)
        products = tl.dot(x, tl.trans(w), products)
    return products


@jit
def load(pointers, inside, ALL: tl.constexpr):
    if ALL:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def prefetch(weights, num_in, COUNT: tl.constexpr):
    """Prefetch the first COUNT weights of every output into the L2 cache, by lines of 128 bytes (64 weights)."""
    lines = tl.minimum(tl.arange(0, COUNT // 64) * 64, num_in - 1)
    addresses = (weights[:, None] + lines[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "mov.u32 $0, 0; prefetch.global.L2 [$1];", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
