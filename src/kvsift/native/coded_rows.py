"""Keys and values in 8 bits, each token's of a head with a scale of its own, so that no token spoils another's.

number[j] is about scale * code[j], with scale = max |number| / 127. A coded row is the codes of a token and behind them
the four bytes of its scale: whatever copies, forks or frees a row carries its scale along. Keys are turned first, by an
orthogonal matrix that spreads each channel over all (``sketch_format.random_rotation``): some channels of real models'
keys are far larger than the others, and would take the precision of all.

Pages that GPUs read have the same bytes in another order (``kernels.coded_pages``).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from kvsift.native.loader import AVAILABLE, core, num_threads
from kvsift.native.shapes import LARGEST_HEAD_DIM, ROW_DTYPES, SCALE_BYTES
from kvsift.native.sketch_format import random_rotation

LARGEST_CODE = 127


def coded_width(head_dim: int) -> int:
    """Bytes of a coded row."""
    return head_dim + SCALE_BYTES


def encode_rows(vectors: Tensor, *, turned: bool = False) -> Tensor:
    """[..., head_dim] -> int8 [..., head_dim + 4]; ``turned``: as keys are."""
    if _in_core(vectors, vectors.dtype, vectors.shape[-1]):
        vectors = vectors.contiguous()
        rows = vectors.new_empty(*vectors.shape[:-1], coded_width(vectors.shape[-1]), dtype=torch.int8)
        core.encode_rows(
            vectors.dtype == torch.bfloat16, vectors.data_ptr(), 1, rows.numel() // rows.shape[-1], vectors.shape[-1],
            turned, num_threads(None), rows.data_ptr(),
        )  # fmt: skip
        return rows
    return encode_rows_reference(vectors, turned=turned)


def encode_rows_reference(vectors: Tensor, *, turned: bool = False) -> Tensor:
    """As ``encode_rows``; turned ones may differ in rounding."""
    numbers = vectors.float()
    if turned:
        numbers = numbers @ random_rotation(numbers.shape[-1], numbers.device)
    scale = numbers.abs().amax(-1, keepdim=True) / LARGEST_CODE
    codes = (numbers / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], -1)


def decode_rows(rows: Tensor, dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    """int8 [..., head_dim + 4] -> [..., head_dim] in ``dtype``; ``turned``: rows of keys."""
    head_dim = rows.shape[-1] - SCALE_BYTES
    if _in_core(rows, dtype, head_dim):
        heads = rows if rows.dim() == 3 and rows[0].is_contiguous() else rows.contiguous().view(1, -1, rows.shape[-1])
        vectors = torch.empty(*rows.shape[:-1], head_dim, dtype=dtype)
        core.decode_rows(
            heads.data_ptr(), heads.stride(0), len(heads), heads.shape[1], head_dim, turned, dtype == torch.bfloat16,
            num_threads(None), vectors.data_ptr(),
        )  # fmt: skip
        return vectors
    return decode_rows_reference(rows, dtype, turned=turned)


def decode_rows_reference(rows: Tensor, dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    """As ``decode_rows``; turned ones may differ in rounding."""
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    return decode_codes(rows[..., :-SCALE_BYTES], scales.squeeze(-1), dtype, turned=turned)


def decode_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    """Codes int8 [..., head_dim] and their scales float32 [...] -> [..., head_dim] in ``dtype``; ``turned``: turn back
    what are keys."""
    numbers, factors = codes, scales.unsqueeze(-1)
    if turned:
        whole, factor = _whole_rotation(codes.shape[-1], codes.device)
        numbers, factors = codes.float() @ whole.mT, factors * factor
    return torch.mul(numbers, factors, out=numbers.new_empty(numbers.shape, dtype=dtype))  # in float32, in one pass


def turn(vectors: Tensor) -> Tensor:
    """Turn vectors [..., head_dim] as keys are; queries meet keys as they are stored then."""
    return (vectors.float() @ random_rotation(vectors.shape[-1], vectors.device)).to(vectors.dtype)


@lru_cache
@torch.inference_mode(False)
def _whole_rotation(head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """The rotation over a factor, and this. If head_dim is a power of two, the former has entries of 1 and -1: sums of
    codes are exact then, whoever adds them up."""
    size = head_dim & -head_dim
    whole = random_rotation(head_dim, device) * math.sqrt(size)
    return (whole.round() if size == head_dim else whole), 1 / math.sqrt(size)


def _in_core(tensor: Tensor, dtype: torch.dtype, head_dim: int) -> bool:
    there = AVAILABLE and tensor.is_cpu and tensor.numel() > 0
    return there and dtype in ROW_DTYPES and 0 < head_dim <= LARGEST_HEAD_DIM
