"""Weights of 4 bits in groups of inputs with a scale, and perhaps a zero point, each: how they lie in memory, expanded.

Only few rows are multiplied with the codes themselves (``skinny_product``); for many rows the weight is expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, runs_on_triton, tl, triton

CENTRE = 8  # the code of a weight of 0 where there are no zero points
LANE = 16  # inputs whose codes lie in 8 consecutive bytes


@dataclass(frozen=True)
class Int4Weight:
    """A matrix [out, in]: weight [o, i] is ``(code[o, i] - zeros[o, i // ins]) * scales[o, i // ins]``.

    Attributes:
        codes: uint8 [out, in / 2]. Byte 8 * l + b has the code of input 16 * l + b in its lower half and that of input
            16 * l + b + 8 in its upper one, so that a thread multiplies halves of bytes with consecutive inputs.
        scales: [out, in / ins], in 16 or 32 bits.
        zeros: uint8 [out, in / ins], or None: all are 8.
        ins: inputs of a group, a multiple of 16.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    ins: int

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, zeros: Tensor | None, ins: int) -> Int4Weight:
        """Pack codes uint8 [out, in], each below 16; ``in`` is a multiple of 16.

        Kernels read scales and zero points row by row, and AWQ's and GPTQ's files have them by column.
        """
        lanes = codes.unflatten(1, (-1, 2, LANE // 2))
        packed = (lanes[:, :, 0] | lanes[:, :, 1] << 4).flatten(1)
        return cls(packed, scales.contiguous(), None if zeros is None else zeros.contiguous(), ins)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], rounded to a dtype once."""
        expand = expand_int4_triton if runs_on_triton(self.codes) else expand_int4_reference
        return expand(self, dtype)


def expand_int4_reference(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    lanes = weight.codes.unflatten(1, (-1, LANE // 2))
    codes = torch.stack([lanes & 15, lanes >> 4], 2).flatten(1)  # [out, in]
    zeros = CENTRE if weight.zeros is None else weight.zeros.to(torch.int32).repeat_interleave(weight.ins, 1)
    scales = weight.scales.repeat_interleave(weight.ins, 1)
    wide = torch.promote_types(dtype, torch.float32)
    return ((codes.to(torch.int32) - zeros).to(wide) * scales.to(wide)).to(dtype)


def expand_int4_triton(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    num_out, num_in = weight.shape
    out = torch.empty(num_out, num_in, dtype=dtype, device=weight.codes.device)
    _expand_int4_kernel[(num_out, triton.cdiv(num_in, 4096))](
        weight.codes, weight.scales, weight.zeros, out, weight.codes.stride(0), weight.scales.stride(0), num_in,
        INS=weight.ins, TILE=2048, num_warps=8,
    )  # fmt: skip
    return out


@jit
def _expand_int4_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, codes_row, scales_row, num_in, INS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row, byte = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = byte < num_in // 2
    i = byte // 8 * 16 + byte % 8  # the input of the lower half
    codes = tl.load(codes_ptr + row * codes_row + byte, mask=inside, other=0)
    scales = tl.load(scales_ptr + row * scales_row + i // INS, mask=inside, other=0.0).to(tl.float32)
    zeros = 8.0
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + row * scales_row + i // INS, mask=inside, other=0).to(tl.float32)
    out = out_ptr + row * num_in + i
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out, (((codes & 15).to(tl.float32) - zeros) * scales).to(dtype), mask=inside)
    tl.store(out + 8, (((codes >> 4).to(tl.float32) - zeros) * scales).to(dtype), mask=inside)
