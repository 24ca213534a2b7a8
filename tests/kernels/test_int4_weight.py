"""Weights of 4 bits: what their codes stand for, with and without zero points. Their products are in test_linear.py."""

from __future__ import annotations

import pytest
import torch
from kernels.conftest import DTYPES, needs_triton
from kernels.test_linear import weight_of

from kvsift.kernels.int4_weight import Int4Weight, expand_int4_reference, expand_int4_triton
from kvsift.kernels.skinny_product import choose_int4_tiling, takes_weight

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]


@pytest.mark.parametrize("zeros", [None, torch.tensor([[3, 16], [0, 8]], dtype=torch.uint8)], ids=["", "zeros"])
def test_codes_stand_for_multiples_of_their_scale(zeros: torch.Tensor | None) -> None:
    codes, scales = torch.randint(0, 16, (2, 64), dtype=torch.uint8), torch.tensor([[0.5, 2], [0.25, 1]]).half()
    weight = Int4Weight.of(codes, scales, zeros, 32)
    assert weight.shape == codes.shape
    centres = torch.full((2, 2), 8) if zeros is None else zeros
    exact = (codes.double() - centres.repeat_interleave(32, 1)) * scales.double().repeat_interleave(32, 1)
    assert torch.equal(expand_int4_reference(weight, torch.float64), exact)


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("kind", ["int4", "int4 zeros"])
@pytest.mark.parametrize("shape", [(40, 320, 32), (33, 256, 128), (200, 192, 64), (24, 384, 384)], ids=str)
def test_expanded_weights_are_rounded_once(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    num_out, num_in, group = shape
    weight, exact = weight_of(kind, num_out, num_in, dtype, group)
    assert isinstance(weight, Int4Weight)
    assert torch.equal(expand_int4_triton(weight, dtype), exact.float().to(dtype))


def test_groups_of_whole_tiles_and_rows_of_16_bits_are_taken() -> None:
    weight, _ = weight_of("int4", 8, 96, torch.bfloat16)
    assert takes_weight(weight, torch.bfloat16)
    assert not takes_weight(weight, torch.float32)
    assert not takes_weight(weight_of("int4", 8, 96, torch.bfloat16, 48)[0], torch.bfloat16)
    assert isinstance(weight, Int4Weight)
    for rows in (1, 2, 32):
        tiling = choose_int4_tiling(weight, rows)
        assert not tiling.dot or tiling.ins == 32
