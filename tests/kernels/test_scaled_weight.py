"""Weights of 8-bit floats: how they and rows are rounded, expanded and joined. Products of few rows are in
test_linear.py."""

from __future__ import annotations

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from kernels.test_linear import draw, exactly, weight_of

from kvsift.kernels.scaled_weight import (
    FP8,
    ScaledWeight,
    expand_reference,
    expand_triton,
    full_product,
    keeps_fp8,
    round_rows_reference,
    round_rows_triton,
    rounds_rows,
    shared_outs,
)
from kvsift.kernels.skinny_product import choose_scaled_tiling, takes_weight

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]
SIZES = [(40, 300), (33, 256), (200, 140)]
BLOCK = 128
KINDS = ["output", "block"]


def scaled(num_out: int, num_in: int, kind: str) -> ScaledWeight:
    weight, _ = weight_of(kind, num_out, num_in, torch.bfloat16)
    assert isinstance(weight, ScaledWeight)
    return weight


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_expanded_weights_are_rounded_once(num_out: int, num_in: int, kind: str, dtype: torch.dtype) -> None:
    weight = scaled(num_out, num_in, kind)
    exact = expand_reference(weight, torch.float64)
    assert torch.equal(expand_triton(weight, dtype), expand_reference(weight, dtype))
    assert torch.equal(expand_reference(weight, dtype), exact.float().to(dtype))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_to_the_nearest_numbers_below_their_largest(dtype: torch.dtype) -> None:
    x = torch.randn(5, 100).to(DEVICE, dtype)
    x[1], x[2, 3], x[3] = 0, 1000, 1e-7
    values, scales = round_rows_triton(x)
    expected, of = round_rows_reference(x)
    assert torch.equal(scales, of)
    powers = torch.frexp(expected.float()).mantissa.abs() == 0.5
    right = (values.float() == expected.float()) | (
        powers & (DEVICE == "cpu")
    )  # the interpreter loses a carry to these
    assert right.all()
    error = (expected.float() * of - x.float()).abs()
    assert (error <= x.float().abs() / 16 + scales * 2.0**-10).all()  # half a step of 3 bits, or of the smallest one
    assert values[2, 3].float() == 448
    assert not values[1].float().any()


def test_weights_are_rounded_with_a_scale_for_each_output() -> None:
    weight = torch.randn(6, 32)
    weight[2] = 0
    rounded = ScaledWeight.of(weight)
    assert rounded.by_output
    assert rounded.scales.shape == (6, 1)
    error = (rounded.expanded(torch.float32) - weight).abs()
    assert (error <= weight.abs() / 16 + rounded.scales * 2.0**-10).all()


def test_blocks_are_shared_by_as_many_outputs_as_joined_weights_allow() -> None:
    first, second = scaled(192, 64, "block"), scaled(130, 64, "block")
    outs = shared_outs([first, second])
    assert outs == 64
    finer = first.finer(outs)
    assert finer.scales.shape == (3, 1)
    assert torch.equal(finer.expanded(torch.float32), first.expanded(torch.float32))
    assert shared_outs([second]) == BLOCK
    assert shared_outs([scaled(192, 64, "output"), scaled(8, 64, "output")]) == 1


def test_eight_bits_need_a_gpu_that_converts_them_and_rows_of_16_bits() -> None:
    assert not keeps_fp8(torch.device("cpu"), torch.bfloat16)
    assert takes_weight(scaled(8, 64, "output"), torch.bfloat16)
    assert not takes_weight(scaled(8, 64, "output"), torch.float32)
    odd = ScaledWeight(torch.zeros(8, 64).to(FP8), torch.ones(8, 2), 1, 32)
    assert not takes_weight(odd, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 32])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (4096, 14336), (6144, 4096), (28672, 4096)])
def test_tiles_are_powers_of_two_within_a_block(num_out: int, num_in: int, rows: int, steady: bool, kind: str) -> None:
    outs, ins = (1, num_in) if kind == "output" else (BLOCK, BLOCK)
    scales = torch.empty(-(-num_out // outs), -(-num_in // ins))
    tiling = choose_scaled_tiling(
        ScaledWeight(torch.empty(num_out, num_in, dtype=FP8), scales, outs, ins), rows, steady
    )
    assert tiling.dot == (rows > 1 or steady)
    for number in (tiling.outs, tiling.ins, tiling.num_warps, tiling.depth if not tiling.dot else 1):
        assert number & (number - 1) == 0
    assert scales.shape[1] == 1 or not tiling.dot or BLOCK % tiling.ins == 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a library of NVIDIA's multiplies 8-bit floats")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [33, 1000])
def test_many_rows_are_rounded_to_eight_bits_where_each_output_has_a_scale(rows: int, kind: str) -> None:
    weight = scaled(512, 1024, kind)
    x, how = draw(rows, 512, 1024, torch.bfloat16)
    eight_bits = torch.cuda.get_device_capability()[0] >= 9 and kind == "output"
    assert rounds_rows(x, weight) == eight_bits
    assert not rounds_rows(x.half(), weight)
    found = full_product(x, weight, how["bias"])
    values, scales = round_rows_reference(x) if eight_bits else (x, 1)
    exact = values.double() * scales @ expand_reference(weight, torch.float64).T + how["bias"].double()
    assert distance(found, exact) <= 0.004 * float(exact.norm())  # bfloat16, and what tensor cores drop of sums
    own = exactly(x, expand_reference(weight, torch.float64), {"bias": how["bias"]})
    assert distance(found, own) <= 0.05 * float(own.norm())
