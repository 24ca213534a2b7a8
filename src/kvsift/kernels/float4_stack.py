"""Experts in MXFP4, the 4-bit floats of gpt-oss: how they lie in memory, expanded, and their product with one row.

A float has a sign, two bits of exponent and one of mantissa. Shifted to the places of these in float16 it is that
number divided by 2^14, subnormal ones included, so that it is converted without a table; the exponent of its block
makes up for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.kernels.scaled_weight import ScaledStack
from kvsift.kernels.triton_shim import INTERPRETED, constant, jit, runs_on_triton, tl, triton

VALUES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0  # of codes without their sign
BLOCK = 32  # inputs that share an exponent
MOST_EXPONENT = 254 - 14  # that is stored, so that float32 holds what makes up for the division
COMPILED = constant(not INTERPRETED)


@dataclass(frozen=True)
class Float4Stack(ScaledStack):
    """Matrices of experts [experts, out, in].

    Attributes:
        values: uint8 [experts, out, in / 2]; a byte has the code of an even input in its lower half, and the next one's
            in its upper half.
        scales: uint8 [experts, out, in / 32], exponents of 2 of ``outs`` x ``ins`` weights, 127 added; at most
            ``MOST_EXPONENT``.
    """

    @classmethod
    def of_codes(cls, values: Tensor, scales: Tensor) -> Float4Stack:
        """Return the stack of codes and exponents."""
        return cls(values.contiguous(), scales.contiguous(), 1, BLOCK)

    @property
    def shape(self) -> torch.Size:
        """[experts, out, in]."""
        return torch.Size((*self.values.shape[:2], 2 * self.values.shape[2]))

    def of_experts(self, ids: Tensor) -> Float4Stack:
        """Return the matrices of these experts, int64 [any number]."""
        return Float4Stack(self.values[ids], self.scales[ids], self.outs, self.ins)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [experts, out, in], rounded to a dtype once."""
        return (expand_float4_triton if runs_on_triton(self.values) else expand_float4_reference)(self, dtype)


def expand_float4_reference(stack: Float4Stack, dtype: torch.dtype) -> Tensor:
    table = torch.tensor(VALUES + tuple(-value for value in VALUES), device=stack.values.device)
    codes = torch.stack((stack.values & 15, stack.values >> 4), -1).flatten(-2)  # [experts, out, in]
    exponents = stack.scales.to(torch.int32).repeat_interleave(BLOCK, -1) - 127
    return torch.ldexp(table[codes.int()], exponents).to(dtype)


def expand_float4_triton(stack: Float4Stack, dtype: torch.dtype) -> Tensor:
    out = torch.empty(stack.shape, dtype=dtype, device=stack.values.device)
    number = stack.values.numel()
    _expand_float4_kernel[(triton.cdiv(number, 2048),)](stack.values, stack.scales, out, number, TILE=2048, num_warps=4)
    return out


@jit
def _expand_float4_kernel(codes_ptr, scales_ptr, out_ptr, number, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    byte, i = start + tl.arange(0, TILE), 2 * start + tl.arange(0, 2 * TILE)
    codes = tl.load(codes_ptr + byte, mask=byte < number, other=0)
    scale = scale_of(tl.load(scales_ptr + byte // 16, mask=byte < number, other=0))
    lower, upper = unpacked(codes)
    weights = tl.interleave(lower * scale, upper * scale)
    tl.store(out_ptr + i, weights.to(out_ptr.dtype.element_ty), mask=i < 2 * number)


@jit
def scale_of(exponents):
    """2^14 times the powers of two of stored exponents."""
    return ((exponents.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)


@jit
def unpacked(codes):
    """Numbers of both halves of bytes, divided by 2^14, in float32; the last axis is a multiple of 4."""
    if COMPILED:  # four bytes of a register at once: their halves are moved to those of registers of two float16
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, last, sign, rest;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 last, $4, 0, 0x4342;
            shl.b32 sign, first, 12;  and.b32 sign, sign, 0x80008000;
            shl.b32 rest, first, 9;   and.b32 rest, rest, 0x0E000E00;  or.b32 $0, sign, rest;
            shl.b32 sign, last, 12;   and.b32 sign, sign, 0x80008000;
            shl.b32 rest, last, 9;    and.b32 rest, rest, 0x0E000E00;  or.b32 $1, sign, rest;
            shl.b32 sign, first, 8;   and.b32 sign, sign, 0x80008000;
            shl.b32 rest, first, 5;   and.b32 rest, rest, 0x0E000E00;  or.b32 $2, sign, rest;
            shl.b32 sign, last, 8;    and.b32 sign, sign, 0x80008000;
            shl.b32 rest, last, 5;    and.b32 rest, rest, 0x0E000E00;  or.b32 $3, sign, rest;
            }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        byte = codes.to(tl.int32)
        lower = ((byte & 8) << 12 | (byte & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True)
        upper = ((byte & 0x80) << 8 | (byte & 0x70) << 5).to(tl.int16).to(tl.float16, bitcast=True)
    return lower.to(tl.float32), upper.to(tl.float32)


@jit
def sum_float4_products(
    x_ptr, weights, scales, num_in, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr
):
    """One row in 16 bits times the weights of outputs [OUTS], float32 [1, OUTS]: a thread has 4 bytes of an output at a
    time, and 8 numbers of the row in 4 pairs, as many as bytes, so that both loads are laid out alike."""
    LANES: tl.constexpr = DEPTH * INS // 8
    lane = tl.arange(0, LANES)[None, :]
    byte = lane[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    pairs_ptr, weights, scales = x_ptr.to(tl.pointer_type(tl.int32)), weights[:, None, None], scales[:, None]
    total = tl.zeros((OUTS, LANES), tl.float32)
    for start in range(0, num_in, DEPTH * INS):
        if EVEN:
            codes, pairs = tl.load(weights + (start // 2 + byte)), tl.load(pairs_ptr + (start // 2 + byte))
            exponents = tl.load(scales + (start // 8 + lane) // 4)
        else:
            inside = byte < (num_in - start) // 2
            codes = tl.load(weights + (start // 2 + byte), mask=inside, other=0)
            pairs = tl.load(pairs_ptr + (start // 2 + byte), mask=inside, other=0)
            exponents = tl.load(scales + (start // 8 + lane) // 4, mask=lane * 8 < num_in - start, other=0)
        lower, upper = unpacked(codes)
        if x_ptr.dtype.element_ty == tl.bfloat16:
            even, odd = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        else:
            even = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        total += tl.sum(even * lower + odd * upper, 2) * scale_of(exponents)
    return tl.sum(total, 1)[None, :]
