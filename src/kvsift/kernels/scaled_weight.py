"""Weights of 8-bit floats with scales: how they are made and expanded, and their product with many rows.

Few rows are multiplied in 16 bits with the values as they are stored (``skinny_product``). With many rows arithmetic
is what counts: the rows are rounded to 8 bits too, each with a scale of its own, where the GPU multiplies such numbers
and the weight has one scale per output; else the weight is expanded first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor

from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.triton_shim import HAVE_TRITON, jit, power_of_two, tl, triton

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # finite number of FP8
LEAST_SCALE = 2.0**-120  # of zeros, so that nothing is divided by 0


@dataclass(frozen=True)
class ScaledWeight:
    """A matrix [out, in]: weight [o, i] is ``values[o, i] * scales[o // outs, i // ins]``.

    Attributes:
        values: float8_e4m3fn [out, in].
        scales: float32 [ceil(out / outs), ceil(in / ins)].
        outs, ins: outputs and inputs that share a scale; one scale per output is 1 and in.
    """

    values: Tensor
    scales: Tensor
    outs: int
    ins: int

    @classmethod
    def of(cls, weight: Tensor) -> ScaledWeight:
        """Return the nearest 8-bit floats of a weight [out, in], with one scale per output: its largest weight is
        448 times that."""
        values, scales = round_rows(weight)
        return cls(values, scales, 1, weight.shape[1])

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape

    @property
    def by_output(self) -> bool:
        """Whether each output has one scale."""
        return self.outs == 1 and self.scales.shape[1] == 1

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], rounded to a dtype once."""
        if converts_fp8(self.values.device):
            return expand_triton(self, dtype)
        return expand_reference(self, dtype)

    def finer(self, outs: int) -> ScaledWeight:
        """Return the same weight with a scale for fewer outputs, a divisor of ``outs``."""
        num_rows = -(-self.shape[0] // outs)
        scales = self.scales.repeat_interleave(self.outs // outs, 0)[:num_rows]
        return ScaledWeight(self.values, scales.contiguous(), outs, self.ins)


@dataclass(frozen=True)
class ScaledStack:
    """Matrices of experts [experts, out, in], each a ``ScaledWeight``.

    Attributes:
        values: float8_e4m3fn [experts, out, in].
        scales: float32 [experts, ceil(out / outs), ceil(in / ins)].
        outs, ins: see ``ScaledWeight``.
    """

    values: Tensor
    scales: Tensor
    outs: int
    ins: int

    @classmethod
    def of(cls, weight: Tensor) -> ScaledStack:
        """Return the nearest 8-bit floats of weights [experts, out, in], with one scale per output."""
        values, scales = round_rows(weight.flatten(0, 1))
        return cls(values.view(weight.shape), scales.view(*weight.shape[:2], 1), 1, weight.shape[2])

    @classmethod
    def joined(cls, experts: Sequence[Sequence[ScaledWeight]]) -> ScaledStack:
        """Return the stack of the matrices of each expert, whose outputs follow one another and whose scales belong to
        as many inputs."""
        outs = gcd(*(shared_outs(own) for own in experts))
        finer = [[weight.finer(outs) for weight in own] for own in experts]
        values = torch.stack([torch.cat([weight.values.view(torch.uint8) for weight in own]) for own in experts])
        scales = torch.stack([torch.cat([weight.scales for weight in own]) for own in finer])
        return cls(values.view(FP8), scales, outs, experts[0][0].ins)

    @property
    def shape(self) -> torch.Size:
        """[experts, out, in]."""
        return self.values.shape

    def of_experts(self, ids: Tensor) -> ScaledStack:
        """Return the matrices of these experts, int64 [any number]."""
        values = self.values.view(torch.uint8)[ids].view(FP8)
        return ScaledStack(values, self.scales[ids], self.outs, self.ins)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [experts, out, in], rounded to a dtype once."""
        if self.shape[1] % self.outs:
            return expand_reference(self, dtype)
        flat = ScaledWeight(self.values.flatten(0, 1), self.scales.flatten(0, 1), self.outs, self.ins)
        return flat.expanded(dtype).view(self.shape)


def shared_outs(weights: Sequence[ScaledWeight]) -> int:
    """Return how many outputs may share a scale once the rows of these weights follow one another."""
    return gcd(*(weight.outs for weight in weights), *(len(weight.values) for weight in weights[:-1]))


def converts_fp8(device: torch.device) -> bool:
    """Whether kernels convert 8-bit floats on a device: Ada, Hopper and later do so in hardware."""
    return HAVE_TRITON and _capability(device) >= (8, 9)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floats by scales of rows and outputs: Hopper and later."""
    return HAVE_TRITON and _capability(device) >= (9, 0)


def keeps_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights stay in 8 bits on a device, with rows of a dtype."""
    return converts_fp8(device) and dtype in (torch.bfloat16, torch.float16)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def expand_reference(weight: ScaledWeight | ScaledStack, dtype: torch.dtype) -> Tensor:
    num_out, num_in = weight.shape[-2:]
    scales = weight.scales.repeat_interleave(weight.outs, -2)[..., :num_out, :]
    return (weight.values.float() * scales.repeat_interleave(weight.ins, -1)[..., :num_in]).to(dtype)


def expand_triton(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    num_out, num_in = weight.shape
    out = torch.empty(num_out, num_in, dtype=dtype, device=weight.values.device)
    _expand_kernel[(num_out, triton.cdiv(num_in, 4096))](
        weight.values, weight.scales, out, weight.values.stride(0), weight.scales.stride(0), num_in, OUTS=weight.outs,
        INS=weight.ins, TILE=4096, num_warps=8,
    )  # fmt: skip
    return out


@jit
def _expand_kernel(
    values_ptr, scales_ptr, out_ptr, values_row, scales_row, num_in, OUTS: tl.constexpr, INS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < num_in
    values = tl.load(values_ptr + row * values_row + i, mask=inside, other=0.0)
    scales = tl.load(scales_ptr + row // OUTS * scales_row + i // INS, mask=inside, other=0.0)
    tl.store(out_ptr + row * num_in + i, (values.to(tl.float32) * scales).to(out_ptr.dtype.element_ty), mask=inside)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [rows, in] to 8-bit floats.

    Returns:
        Values float8_e4m3fn [rows, in] and scales float32 [rows, 1]: the largest number of a row becomes 448.
    """
    return round_rows_triton(x) if converts_fp8(x.device) else round_rows_reference(x)


def round_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    # a product: torch divides by a number on a GPU otherwise than on a CPU
    scales = (wide.abs().amax(1, keepdim=True) * (1 / LARGEST)).clamp_min(LEAST_SCALE)
    return (wide / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def round_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, num_in = x.shape
    values, scales = x.new_empty(rows, num_in, dtype=FP8), x.new_empty(rows, 1, dtype=torch.float32)
    tile = power_of_two(num_in)
    _round_rows_kernel[(rows,)](
        x, values, scales, x.stride(0), num_in, LARGEST, 1 / LARGEST, LEAST_SCALE, TILE=tile,
        num_warps=min(16, max(4, tile // 1024)),
    )  # fmt: skip
    return values, scales


@jit
def _round_rows_kernel(x_ptr, values_ptr, scales_ptr, x_row, num_in, largest, inverse, least, TILE: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inside = i < num_in
    x = tl.load(x_ptr + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) * inverse, least)
    values = tl.minimum(tl.maximum(tl.div_rn(x, scale), -largest), largest)
    tl.store(values_ptr + row * num_in + i, values.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, scale)


def full_product(x: Tensor, weight: Tensor | ScaledWeight | Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` of many rows by a library.

    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out].

    Returns:
        [rows, out] in the dtype of ``x``. Rows of x are rounded to 8 bits if ``rounds_rows``.
    """
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    if isinstance(weight, Int4Weight) or not rounds_rows(x, weight):
        return torch.nn.functional.linear(x, weight.expanded(x.dtype), bias)
    values, scales = round_rows(x)
    return torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=weight.scales.t(), bias=bias, out_dtype=x.dtype
    )


def rounds_rows(x: Tensor, weight: ScaledWeight) -> bool:
    """Whether ``full_product`` multiplies 8-bit floats: torch takes bfloat16 with one scale per output, and sizes in
    multiples of 16."""
    return (
        multiplies_fp8(x.device)
        and x.dtype == torch.bfloat16
        and weight.by_output
        and all(number % 16 == 0 for number in weight.shape)
    )
